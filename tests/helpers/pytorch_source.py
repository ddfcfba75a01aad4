"""PyTorch's own distributed tests, rewritten so that they run on a CPU, with any DDP class.

torch ships `torch/testing/_internal/distributed/distributed_test.py`. Most of its tests of DDP ask
for GPUs only because they were written on some. If their tensors stay where they are, they test the
same with gloo. So the file is not imported but read, rewritten and executed. Moves to a GPU, and
skips of tests without one, are taken out; `DistributedDataParallel` is replaced by the class that
is given here.
"""

import ast
import functools
import importlib.util
import os
import sys
import types
import unittest
from pathlib import Path

import torch

SKIPS = ("skip_if_lt_x_gpu", "skip_if_no_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl")
DEVICE_NAMES = ("rank", "self.rank", "device_id", "torch.cuda.current_device()")
DDP_NAMES = ("nn.parallel.DistributedDataParallel", "torch.nn.parallel.DistributedDataParallel")


class OnCPU(ast.NodeTransformer):
    """Takes GPUs out of the tests, and PyTorch's DDP too."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = [
            decorator
            for decorator in node.decorator_list
            if not ast.unparse(decorator).startswith(SKIPS)
        ]
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if ast.unparse(node) in DDP_NAMES:
            return ast.Name("DistributedDataParallel", node.ctx)
        return self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        node.names = [name for name in node.names if name.name != "DistributedDataParallel"]
        return node if node.names else None

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called = ast.unparse(node.func)
        node.keywords = [
            word
            for word in node.keywords
            if word.arg not in ("device_ids", "output_device", "device_id")
        ]
        for word in node.keywords:
            if word.arg == "device":
                word.value = ast.Constant("cpu")
        if called == "torch.device":
            node.args = [ast.Constant("cpu")]
        elif called == "init_device_mesh":
            node.args[0] = ast.Constant("cpu")
        elif called == "torch.cuda.current_device":
            return ast.Constant("cpu")
        elif called.startswith("torch.cuda.") and called != "torch.cuda.is_available":
            return ast.Constant(None)
        elif isinstance(node.func, ast.Attribute):
            if node.func.attr == "cuda":
                return node.func.value
            if node.func.attr == "to" and node.args and ast.unparse(node.args[0]) in DEVICE_NAMES:
                node.args[0] = ast.Constant("cpu")
        return node


def source_path() -> Path:
    """Return the file of PyTorch's tests, without importing it."""
    return Path(torch.__file__).parent / "testing/_internal/distributed/distributed_test.py"


@functools.cache
def tree() -> ast.Module:
    """Return the rewritten tests. Once per process; the caller may not change it."""
    return ast.fix_missing_locations(OnCPU().visit(ast.parse(source_path().read_text())))


@functools.cache
def load(ddp: type):
    """Return the module of PyTorch's tests, rewritten, with `ddp` as DistributedDataParallel.

    It reads WORLD_SIZE from the environment, which must be there.
    """
    # Only its class is needed, as a base of PyTorch's test cases, for what these tests do not use.
    if importlib.util.find_spec("expecttest") is None:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    os.environ.setdefault("BACKEND", "gloo")
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0")
    # Without it, PyTorch would take the tests for being run with its command line.
    module = types.ModuleType("distributed_test_on_cpu")
    module.__file__ = str(source_path())
    module.DistributedDataParallel = ddp
    sys.modules[module.__name__] = module
    exec(compile(tree(), module.__file__, "exec"), module.__dict__)
    module.init_multigpu_helper = lambda world_size, _: {r: [r] for r in range(int(world_size))}
    return module


@functools.cache
def test_names() -> list[str]:
    """Return the names of the tests of DDP, in the order of the file.

    A test is one of DDP if it, or a method it calls, says `DistributedDataParallel`.
    """
    methods: dict[str, set[str]] = {}
    for node in ast.walk(tree()):
        if isinstance(node, ast.ClassDef) and node.name == "_DistTestBase":
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    methods[method.name] = _words(method)

    def about_ddp(name: str, above: tuple[str, ...] = ()) -> bool:
        words = methods[name]
        return "DistributedDataParallel" in words or any(
            about_ddp(word, (*above, name)) for word in words & methods.keys() - {name, *above}
        )

    return [name for name in methods if name.startswith("test_") and about_ddp(name)]


def _words(method: ast.AST) -> set[str]:
    nodes = list(ast.walk(method))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}
