"""Names that are imported late are the ones that type checkers see, and are what they seem."""

import ast
from pathlib import Path

import pytest

from course_lib import ranks


def test_the_package_has_all_that_it_imports() -> None:
    for node in ast.walk(ast.parse(Path(ranks.__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(ranks.__name__):
            for imported in node.names:
                assert getattr(ranks, imported.name).__name__ == imported.name
    with pytest.raises(ImportError):
        exec("from course_lib.ranks import no_such_name")
