"""Ranks that are processes on a fabric at the other end of a socket."""
