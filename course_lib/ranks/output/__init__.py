"""What ranks print and display, in the notebook."""
