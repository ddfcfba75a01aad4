"""Triton's kernels compiled for GPUs that need not be there: no spill, wide loads, no fused sums.

It needs Triton only, which brings the compiler and the disassembler: `pip install .[gpu]`. Nothing
runs here; what the kernels calculate is tested in test_triton_kernels.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.helpers import ROOT

pytest.importorskip("triton", reason="needs triton: pip install .[gpu]")


def compiled(*arguments: str) -> list[dict[str, Any]]:
    """Return the rows of `benchmarks/gpu_kernels.py`: by itself, as this process interprets."""
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu_kernels.py", "--json", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.large), 90])
def test_compiled_kernels_spill_nothing_load_wide_and_fuse_nothing(capability: int) -> None:
    rows = compiled("--capability", str(capability))
    for row in rows:
        assert row["stack"] == row["spills"] == 0, row
        assert row["fma"] == 0, row
        assert row["threads"] >= 512, row
        if row["tensors"] == "aligned":
            assert "128" in row["loads"] | row["stores"], row
            # Numbers that belong to a block or a program are loaded and stored one by one, and
            # the bits of eight elements as one byte.
            assert sum(n for width, n in row["loads"].items() if width != "128") <= 3, row
            assert sum(n for width, n in row["stores"].items() if width != "128") <= 2, row
