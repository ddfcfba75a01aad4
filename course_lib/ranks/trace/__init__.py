"""The trace of a call: one event per operation, which can be counted, listed and drawn."""
