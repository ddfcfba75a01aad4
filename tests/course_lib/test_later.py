"""Names that are imported late are the ones that the package lists, and are what they seem."""

import importlib

import pytest

PACKAGES = ("course_lib.ranks", "course_lib.pipeline_parallel", "course_lib.sharded_optimizer")


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_has_all_that_it_lists(name: str) -> None:
    package = importlib.import_module(name)
    for listed in package.__all__:
        assert getattr(package, listed).__name__ == listed
    with pytest.raises(ImportError):
        exec(f"from {name} import no_such_name")
