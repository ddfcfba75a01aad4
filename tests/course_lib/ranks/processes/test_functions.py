"""Functions of the notebook arrive whole: cloudpickle is the oracle of what they need."""

import concurrent.futures
import os.path
import pickle
import subprocess
import sys
import xml.dom.minidom
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cloudpickle import cloudpickle
from torch import nn

from course_lib.ranks.processes.functions import imported_submodules
from course_lib.ranks.processes.packing import to_bytes


def with_a_closure() -> Callable[..., Any]:
    package = xml

    def parses() -> Any:
        return package.dom.minidom.parseString("<a/>").documentElement.tagName

    return parses


FUNCTIONS: list[Callable[..., Any]] = [
    lambda: dist.get_rank(),
    lambda x: torch.nn.functional.relu(x) + torch.distributed.get_rank(),
    lambda x: nn.functional.relu(x).utils,
    lambda: concurrent.futures.ThreadPoolExecutor(),
    lambda: xml.dom.minidom.parseString("<a/>"),
    lambda: os.path.sep,
    with_a_closure(),
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_submodules_found_by_name_are_those_that_a_search_of_all_finds(function) -> None:
    names = cloudpickle._extract_code_globals(function.__code__)
    reached = [function.__globals__[name] for name in names if name in function.__globals__]
    reached += [cell.cell_contents for cell in function.__closure__ or ()]
    found = imported_submodules(function.__code__, reached)
    expected = cloudpickle._find_imported_submodules(function.__code__, reached)
    assert {each.__name__ for each in found} == {each.__name__ for each in expected}


def test_they_are_imported_where_the_function_arrives() -> None:
    read = "import pickle, sys; print(pickle.load(sys.stdin.buffer)())"
    for function in (with_a_closure(), lambda: xml.dom.minidom.parseString("<a/>").nodeType):
        done = subprocess.run(
            [sys.executable, "-c", read], input=to_bytes(function), capture_output=True, timeout=60
        )
        assert done.stdout.split() == [str(function()).encode()], done.stderr.decode()


def test_functions_that_name_one_another_or_themselves_arrive_as_one_family() -> None:
    cell: dict[str, Any] = {}
    exec(
        "count = [0]\n"
        "def even(n): count[0] += 1; return n == 0 or odd(n - 1)\n"
        "def odd(n): count[0] += 1; return n != 0 and even(n - 1)\n"
        "even.calls = count\n",
        cell,
    )
    even = pickle.loads(to_bytes(cell["even"]))
    assert [even(10), even(7)] == [True, False]
    assert even.calls == [19] and even.calls is even.__globals__["count"]
    assert cell["count"] == [0]
