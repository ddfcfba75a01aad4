"""Compile the course's Triton kernels for GPUs, without a GPU, and count registers and widths.

    python benchmarks/gpu_kernels.py [--write]

This compiles every kernel of `course_lib.compression.triton_kernels` for compute capability 8.0
(A100) and 9.0 (H100), and reads the machine code (SASS). A row has:

- registers of a thread, and the threads that fit on a processor with them (2048 at most)
- spills: bytes of a thread's stack, and loads and stores of local memory; there should be none
- shared memory of a program, in bytes
- loads and stores of global memory by width. 128 bits at once are four float32 or 16 codes. If a
  tensor is not aligned, or 16 does not divide its length, it is loaded number by number
- multiplications and additions fused into one (FMA), per element. An FMA rounds once where PyTorch
  rounds twice, so there must be none. A division consists of some FMAs, and rounds like PyTorch's.
  It is done once per program. So only the FMAs that are added by twice as many elements count.

This needs Triton (`pip install .[gpu]`), which includes the compiler and the disassembler. It says
nothing about speed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from machine import RESULTS

LENGTH = 25 * 2**20 // 4
"""Elements of the bucket for which kernels are compiled: 25 MiB, as in PyTorch's DDP."""
CAPABILITIES = (80, 90)
THREADS = 128  # of a program: Triton's default, four warps
REGISTERS = 1 << 16  # of a processor
TYPES = {"n": "i32", "codes": "*u8", "packed": "*u8"}
"""Triton's types of the kernels' arguments; all other arguments are float32 tensors."""


class Case(NamedTuple):
    """A kernel with the constants for which it is compiled."""

    kernel: str
    constants: dict[str, Any]
    capability: int
    aligned: bool

    @property
    def name(self) -> str:
        """Return the kernel's name, with the options that its constants enable."""
        on = [name for name, value in self.constants.items() if value is True]
        parts = [f"{self.constants['PARTS']} parts"] if "PARTS" in self.constants else []
        return " ".join([self.kernel, *parts, *on])


def cases() -> list[Case]:
    """Return every kernel, with every constant with which it is launched for `LENGTH` elements."""
    from course_lib.compression.triton_kernels import TILE, cut_blocks
    from course_lib.compression.uniform_8bit import BLOCK, SMALLEST

    several, one = cut_blocks(LENGTH, BLOCK), cut_blocks(LENGTH, TILE)
    kernels = [
        ("_find_largest", several, "REMEMBER"),
        ("_encode_bytes", several | {"SMALLEST": SMALLEST}, "REMEMBER"),
        ("_encode_bytes", one | {"SMALLEST": SMALLEST}, "REMEMBER"),
        ("_decode_bytes", several, "ADD"),
        ("_encode_bits", {"TILE": TILE}, "REMEMBER"),
        ("_decode_bits", {"TILE": TILE}, "ADD"),
    ]
    return [
        Case(kernel, constants | {switch: on}, capability, aligned)
        for capability in CAPABILITIES
        for kernel, constants, switch in kernels
        for aligned, on in ((True, True), (True, False), (False, True))
    ]


def machine_code(case: Case, fused: bool = False) -> tuple[str, str, int]:
    """Compile a case; return the SASS, a line on resource usage, and bytes of shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from course_lib.compression import triton_kernels

    kernel = getattr(triton_kernels, case.kernel)
    types = {
        name: "constexpr" if name in case.constants else TYPES.get(name, "*fp32")
        for name in kernel.arg_names
    }
    by_16 = [["tt.divisibility", 16]] if case.aligned else []
    known = {(i,): by_16 for i, name in enumerate(kernel.arg_names) if name not in case.constants}
    done = triton.compile(
        ASTSource(kernel, types, case.constants, known),
        target=GPUTarget("cuda", case.capability, 32),
        options={"enable_fp_fusion": fused, "num_warps": THREADS // 32},
    )
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        sass, use = (
            subprocess.run(
                [tools / command[0], *command[1:], file.name],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for command in (["nvdisasm", "-c"], ["cuobjdump", "-res-usage"])
        )
    return sass, use, done.metadata.shared


def instructions(sass: str) -> Counter[str]:
    """Return how often each instruction occurs in a listing."""
    line = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
    return Counter(line.findall(sass))


def widths(found: Counter[str], kind: str) -> dict[int, int]:
    """Return width in bits → number of instructions of a kind (LDG or STG), the widest first."""
    counts: Counter[int] = Counter()
    for name, count in found.items():
        if name.partition(".")[0] == kind:
            size = re.search(r"\.(?:[US]?(8|16)|(64|128))\b", name)
            counts[int(size[1] or size[2]) if size else 32] += count
    return dict(sorted(counts.items(), reverse=True))


def fused_operations(found: Counter[str]) -> int:
    """Return the number of instructions that multiply and add at once."""
    return sum(count for name, count in found.items() if name.partition(".")[0] == "FFMA")


def twice(case: Case) -> Case:
    """Return a case with twice as many elements in a program."""
    constants = case.constants | {"TILE": 2 * case.constants["TILE"]}
    if "PARTS" in constants:
        constants["BLOCK"] *= 2
    return case._replace(constants=constants)


def row(case: Case, fused: bool = False) -> dict[str, Any]:
    """Compile a case; return the values that the module's docstring lists."""
    sass, use, shared = machine_code(case, fused)
    found = instructions(sass)
    registers, stack = (int(n) for n in re.search(r"REG:(\d+) STACK:(\d+)", use).groups())  # type: ignore[union-attr]
    more = fused_operations(found)
    if more:  # then there is a division, or something is wrong
        more = fused_operations(instructions(machine_code(twice(case), fused)[0])) - more
    in_eights = -(-registers // 8) * 8  # a processor allocates registers to threads in eights
    return {
        "kernel": case.name,
        "sm": case.capability,
        "tensors": "aligned" if case.aligned else "anywhere",
        "registers": registers,
        "threads": min(2048, REGISTERS // (in_eights * THREADS) * THREADS),
        "stack": stack,
        "spills": sum(found[name] for name in found if name.partition(".")[0] in ("LDL", "STL")),
        "shared": shared,
        "loads": widths(found, "LDG"),
        "stores": widths(found, "STG"),
        "fma": more * THREADS / case.constants["TILE"],
    }


def _cache_in(folder: str) -> None:
    """Make Triton compile, not interpret, in this process, with its cache in `folder`."""
    os.environ["TRITON_CACHE_DIR"] = folder
    os.environ.pop("TRITON_INTERPRET", None)


def rows(chosen: list[Case], fused: bool = False) -> list[dict[str, Any]]:
    """Compile the cases; `fused` allows forbidden FMAs, to test that they would be found."""
    with tempfile.TemporaryDirectory(prefix="kernels_") as folder:
        workers = ProcessPoolExecutor(2, get_context("spawn"), _cache_in, (folder,))
        with workers as pool:
            return list(pool.map(row, chosen, [fused] * len(chosen)))


def table(found: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the rows."""

    def by_width(counts: dict[int, int]) -> str:
        return ", ".join(f"{count} x {bits}" for bits, count in counts.items())

    lines = [
        "| kernel | sm | tensors | registers | threads that fit | spills | shared (bytes) "
        "| loads (bits) | stores (bits) | FMA per element |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in found:
        lines.append(
            f"| `{each['kernel']}` | {each['sm']} | {each['tensors']} | {each['registers']} "
            f"| {each['threads']} | {each['stack'] + each['spills']} | {each['shared']} "
            f"| {by_width(each['loads'])} | {by_width(each['stores'])} | {each['fma']:g} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Print the table; return an exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="also write benchmarks/results/gpu/")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--list", action="store_true", help="print the kernels' names")
    parser.add_argument("--only", metavar="KERNEL", help="compile only this kernel")
    parser.add_argument(
        "--capability", type=int, choices=CAPABILITIES, help="compile for this kind of GPU only"
    )
    parser.add_argument(
        "--fused", action="store_true", help="allow fused multiply-adds, to test their count"
    )
    options = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)  # read when Triton is imported
    try:
        import triton
    except ImportError:
        print("Triton is not installed here. `pip install .[gpu]` brings it.", file=sys.stderr)
        return 1
    chosen = [
        case
        for case in cases()
        if options.only in (None, case.kernel) and options.capability in (None, case.capability)
    ]
    if options.list:
        print("\n".join(dict.fromkeys(case.kernel for case in chosen)))
        return 0
    found = rows(chosen, options.fused)
    if options.json:
        print(json.dumps(found))
        return 0
    text = (
        "# Kernels compiled, not run\n\n"
        f"Triton {triton.__version__}, for {LENGTH} elements (25 MiB). "
        f"Made by `python benchmarks/gpu_kernels.py --write`, which explains the columns.\n\n"
        f"{table(found)}\n"
    )
    print(text)
    if options.write:
        folder = RESULTS / "gpu"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernels.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
