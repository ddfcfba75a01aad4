"""The output of ranks in the notebook: text and displays."""
