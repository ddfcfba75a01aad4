"""The time that things take: messages on a network, collectives, computation."""
