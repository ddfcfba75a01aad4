"""The code that runs inside the sandbox, where nothing is trusted."""
