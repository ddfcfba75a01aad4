"""The commands of the program `autograder`."""
