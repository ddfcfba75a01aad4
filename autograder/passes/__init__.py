"""The passes that nbgrader calls in place of its own."""
