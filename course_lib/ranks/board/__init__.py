"""What the ranks are doing, in memory that they share with their parent."""
