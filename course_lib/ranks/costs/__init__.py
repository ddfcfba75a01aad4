"""Cost models: the time of messages on a network, of collectives and of computation."""
