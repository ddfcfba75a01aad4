"""All that ranks need of PyTorch beyond its documentation, and the one table of collectives."""
