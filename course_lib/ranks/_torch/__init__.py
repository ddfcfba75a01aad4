"""All undocumented parts of PyTorch that ranks need, and the one table of collectives."""
