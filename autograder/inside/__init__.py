"""What runs inside the sandbox, where nothing is trusted."""
