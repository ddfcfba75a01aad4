"""Names that are imported late are the ones that the package lists, and are what they seem."""

import importlib
import subprocess
import sys

import pytest

PACKAGES = ("course_lib.ranks", "course_lib.pipeline_parallel", "course_lib.sharded_optimizer")


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_has_all_that_it_lists(name: str) -> None:
    package = importlib.import_module(name)
    for each in package.__all__:
        assert getattr(package, each).__name__ == each
    with pytest.raises(ImportError):
        exec(f"from {name} import no_such_name")


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("import autograder.collection.repair", marks=pytest.mark.large),
        "from course_lib.learner.__main__ import main; main(['start', 'no such assignment'])",
    ],
)
def test_who_reads_notebooks_does_not_wait_for_a_grammar_of_addresses(program: str) -> None:
    line = f"import sys; {program}; print('nbformat' in sys.modules, sys.modules['rfc3987_syntax'])"
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, timeout=300)
    assert done.stdout == "True None\n", done.stderr
