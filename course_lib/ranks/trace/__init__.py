"""What happened: one event per operation, counted, listed, drawn."""
