"""What the contracts in pyproject.toml cannot say: of notebooks, and of torch's private names."""

import ast
import json
import re
import sys
import tomllib

from course_lib import READING_ORDER
from tests.helpers import ROOT

# What students, authors and readers of notebooks need: `scripts` is beside the lectures.
ALLOWED = {"torch", "numpy", "matplotlib", "IPython", "course_lib", "scripts"}
# Code that extends PyTorch needs these two, and so does `costs`, which lies below `_torch`.
EVERYWHERE = {"torch.utils._python_dispatch.TorchDispatchMode", "torch.utils._pytree.tree_leaves"}


def sources():
    """Yield the files of assignments, and the code of all notebooks without lines of shell."""
    for folder in (ROOT / name for name in ("lectures", "assignments", "instructor")):
        for path in folder.rglob("*.py"):
            yield path, path.read_text()
        for path in folder.rglob("*.ipynb"):
            for cell in json.loads(path.read_text())["cells"]:
                if cell["cell_type"] == "code":
                    code = "".join(cell["source"])
                    yield path, re.sub(r"^\s*[%!].*$", "", code, flags=re.MULTILINE)


def test_notebooks_and_assignments_import_only_the_course_and_what_it_names() -> None:
    standard = sys.stdlib_module_names
    wrong = []
    for path, source in sources():
        try:
            tree = ast.parse(source)
        except SyntaxError:  # shown in a lecture on purpose
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                continue
            packages = {name.partition(".")[0] for name in names} - ALLOWED - standard
            wrong += [f"{path.relative_to(ROOT)} imports {name}" for name in packages]
    assert not wrong, "\n".join(wrong)


def private_to_torch(source: str) -> list[str]:
    """Return what a file uses of PyTorch that begins with ``_``, as ``torch._C``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("torch.")]
        elif isinstance(node, ast.Attribute):
            found.append(ast.unparse(node))
    private = re.compile(r"(torch|dist|c10d)(\.\w+)*\._[a-zA-Z]")
    return [name for name in found if private.match(name) and name not in EVERYWHERE]


def test_only_one_room_touches_what_pytorch_does_not_document() -> None:
    files = [
        path for path in (ROOT / "course_lib/ranks").rglob("*.py") if path.parent.name != "_torch"
    ]
    assert files
    problems = {path: private_to_torch(path.read_text()) for path in files}
    wrong = [f"{path.relative_to(ROOT)}: {names}" for path, names in problems.items() if names]
    assert not wrong, "\n".join(["this belongs into course_lib/ranks/_torch:", *wrong])


def test_the_reading_order_is_the_ladder_of_the_contracts_and_of_the_docstring() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    ladder = tools["importlinter"]["contracts"][0]["layers"]
    assert tuple(reversed(ladder))[: len(READING_ORDER)] == READING_ORDER
    docstring = ast.get_docstring(ast.parse((ROOT / "course_lib/__init__.py").read_text())) or ""
    contents = re.findall(r"^- `(\w+)`", docstring, re.MULTILINE)
    assert tuple(name for name in contents if name in READING_ORDER) == READING_ORDER
