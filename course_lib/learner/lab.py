"""``course lab``: bring the desk up to date and open JupyterLab on it."""

from __future__ import annotations

import argparse

from course_lib.desk.__main__ import main

DESCRIPTION = (
    "Bring your copies up to date and open JupyterLab on them. All options except --desk go to "
    "JupyterLab, for example --no-browser or --port=9000."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--desk", help="the folder of your copies (default: work)")


def run(arguments: argparse.Namespace) -> int:
    """Become JupyterLab, or return the exit status."""
    desk = ["--desk", arguments.desk] if arguments.desk else []
    return main([*desk, "--lab", *arguments.more])
