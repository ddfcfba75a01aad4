"""The trace of a call: one event per operation, counted, listed, drawn."""
