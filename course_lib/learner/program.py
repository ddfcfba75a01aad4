"""Read the command line of a program with commands: `course`, and the grader's `autograder`.

A command is a module with ``add_options(parser)``. Its docstring is the text of its ``--help``; if
the docstring ends in ``For example::``, the lines below stay as they are. Only the command that is
given is imported, because ``--help`` of all commands must need no library.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from course_lib.learner import did_you_mean


def parse(
    parser: argparse.ArgumentParser,
    package: str,
    lines: Mapping[str, str],
    argv: Sequence[str],
    **options: Any,
) -> tuple[ModuleType, argparse.Namespace]:
    """Return the module of the command that is given, and its arguments, or exit with a message.

    Args:
        parser: the program's own options.
        package: with a module for each command.
        lines: each command's name → its line in ``--help``.
        argv: the command line. What the command does not know is in ``arguments.more``.
        **options: of every command's own parser.

    """
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    module = ModuleType("no command")
    for name, line in lines.items():
        command = commands.add_parser(name, help=line, **options)
        if name in argv[:1]:
            module = importlib.import_module(f"{package}.{name}")
            text, _, examples = (module.__doc__ or "").partition("\nFor example::\n\n")
            command.description = text
            if examples:
                command.formatter_class = argparse.RawDescriptionHelpFormatter
                command.epilog = f"examples:\n{examples}"
            module.add_options(command)
    for word in argv[:1]:
        if word not in lines and not word.startswith("-"):
            similar = did_you_mean(word, lines)
            listed = ", ".join(lines)
            parser.error(f"there is no command {word}.{similar} The commands are: {listed}")
    arguments, unknown = parser.parse_known_args(argv)
    if unknown and not getattr(module, "PASSES_ON", False):
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    arguments.more = unknown
    return module, arguments
