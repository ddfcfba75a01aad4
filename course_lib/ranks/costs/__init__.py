"""What things take: messages on a network, collectives, computation."""
