"""The capstone's leaderboard: time every submission, rank them, show them."""
