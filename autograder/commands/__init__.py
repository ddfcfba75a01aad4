"""The commands of the program `autograder`."""

import argparse


def add_assignment(parser: argparse.ArgumentParser) -> None:
    """Declare the argument ASSIGNMENT of the commands that need one."""
    parser.add_argument("assignment", help="the assignment's name, such as 02_data_parallel_sgd")
