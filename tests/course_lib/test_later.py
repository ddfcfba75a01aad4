"""Names that are imported late are the ones that type checkers see, and are what they seem."""

import ast
import importlib
from pathlib import Path

import pytest

PACKAGES = ("course_lib.ranks", "course_lib.pipeline_parallel", "course_lib.sharded_optimizer")


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_has_all_that_it_imports(name: str) -> None:
    package = importlib.import_module(name)
    for node in ast.walk(ast.parse(Path(str(package.__file__)).read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(name):
            for imported in node.names:
                assert getattr(package, imported.name).__name__ == imported.name
    with pytest.raises(ImportError):
        exec(f"from {name} import no_such_name")
