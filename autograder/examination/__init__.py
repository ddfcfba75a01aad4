"""One submission under examination: its cells, its cases, its verdict."""
