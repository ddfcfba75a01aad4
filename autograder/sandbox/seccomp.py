"""Limit the system calls of student code with a seccomp filter, as classic BPF.

The filter is a deny list, because Python, NumPy and PyTorch use some 150 calls, and other versions
of them a few more. It refuses calls that course code does not need and that attacks on kernels and
other processes use. See seccomp(2), and ``linux/seccomp.h`` for `struct seccomp_data`.

Cells must not reach one another, but they see the same read-only files. So the filter also refuses
whatever passes a state on through a file that a process can only read: locks, leases, watches, the
page cache, shared futexes. It refuses to change numbers of the whole machine that other cells can
read. And it refuses memory that no process appears to hold.

The filter answers EPERM, as a kernel answers a caller without the right. To ``clone3`` it answers
ENOSYS, because a filter cannot see its flags; libraries then fall back to ``clone``.
"""

from __future__ import annotations

import csv
import errno
import functools
import platform
import signal
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from autograder.errors import SandboxUnavailable

# Offsets in struct seccomp_data.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # arguments have 8 bytes

_LOAD, _AND = 0x20, 0x54  # BPF_LD|BPF_W|BPF_ABS, BPF_ALU|BPF_AND|BPF_K
_EQUAL, _AT_LEAST, _RETURN = 0x15, 0x35, 0x06  # BPF_JMP|BPF_JEQ, BPF_JMP|BPF_JGE, BPF_RET
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_REFUSE, _NO_SUCH_CALL = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS

_X32 = 0x40000000
"""Calls of x86's third ABI (x32) have this bit; this ABI has different numbers for the calls."""

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_TABLE = Path(__file__).with_name("calls.csv")
"""A line for each call: its numbers, and the kind that says when it is refused.

``others`` watch other processes, and ``kernel`` change the kernel itself: always. ``namespaces``;
``cells``, which tell of other cells; ``memory``, which no process appears to hold: to students.
``locks``: to students, unless they may lock. ``arguments``: as the code below says.
"""
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 8, 9, 10, 11, 1030, 1032)
"""Commands on descriptors, pipes and signals. Others, such as locks, concern the file, or what all
processes of a user have together (F_SETPIPE_SZ)."""
_FORGETTING = (20, 21)
"""MADV_COLD and MADV_PAGEOUT, which take a file's pages out of the page cache."""
_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6 and AF_NETLINK, all of which the cell's namespace contains. A rank of
a case needs only the first. TCP's memory is one number for all cells (/proc/net/sockstat)."""
_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""


def numbers_of(machine: str, *kinds: str) -> dict[str, int]:
    """Return the calls of these kinds that a machine has → their numbers."""
    with _TABLE.open(encoding="utf-8") as table:
        rows = [row for row in csv.DictReader(table) if row["kind"] in kinds and row[machine]]
    return {row["call"]: int(row[machine]) for row in rows}


@functools.cache
def seccomp_filter(
    machine: str | None = None, *, namespaces: bool = False, locks: bool = False, tcp: bool = False
) -> bytes:
    """Return the filter in the kernel's format, with 8 bytes per instruction.

    Args:
        machine: ``x86_64`` or ``aarch64``; by default this machine's.
        namespaces: whether the process may make namespaces and change mounts. Our own process
            may, because it gives every student process its own namespaces. It then applies the
            filter that does not allow this.
        locks: whether the process may use ``flock``, sessions, and futexes that processes share.
            The ranks that a notebook starts need them. A rank of a case may not: it has secret
            inputs.
        tcp: whether the process may make sockets of other families than AF_UNIX.

    Raises:
        SandboxUnavailable: the machine is neither of them.

    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise SandboxUnavailable(
            f"The sandbox runs on {' and '.join(_ARCHITECTURES)}, but this machine is {machine}."
        )
    kinds = ["others", "kernel"]
    if not namespaces:
        kinds += ["namespaces", "cells", "memory"]
    if not namespaces and not locks:
        kinds += ["locks"]
    code = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUAL, _ARCHITECTURES[machine], yes=1),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        code += [_instruction(_AT_LEAST, _X32, no=1), _instruction(_RETURN, _NO_SUCH_CALL)]
    for number in numbers_of(machine, *kinds).values():
        code += _rule(number, _REFUSE)
    if not namespaces:
        numbers = numbers_of(machine, "arguments")
        for name, answer, *conditions in _rules(locks, _FAMILIES if tcp else _FAMILIES[:1]):
            code += _rule(numbers[name], answer, *conditions)
    return b"".join([*code, _instruction(_RETURN, _ALLOW)])


class _If(NamedTuple):
    """A condition: the part `mask` of the word at `at` is one of `values`, or is none of them."""

    at: int
    values: Sequence[int]
    is_one: bool = True
    mask: int = 0xFFFFFFFF


def _rules(locks: bool, families: Sequence[int]) -> list[tuple[Any, ...]]:
    """Return the rules of students: a call, its answer, and the conditions of this answer."""
    first, second, third = (_FIRST_ARGUMENT + 8 * i for i in range(3))
    itself, ending = _If(first, [1]), [signal.SIGKILL, signal.SIGSTOP]
    shared, waits = _If(second, [0], mask=128), _If(second, [0, 9], mask=127)
    rules: list[tuple[Any, ...]] = [
        # Process 1 of a pid namespace receives neither signal from inside. Without these rules, a
        # student process that killed or stopped itself would continue.
        ("kill", _KILL, itself, _If(second, ending)),
        ("tgkill", _KILL, itself, _If(third, ending)),
        # If a process exceeds its hard limit of processor time, RLIMIT_CPU, the kernel sends
        # SIGKILL, even to process 1. Student code has no other way to end its process by SIGKILL.
        # So with these rules, SIGKILL always comes from the machine. The pointer to the new limit
        # is null if the caller of prlimit64 only reads it.
        ("setrlimit", _REFUSE, _If(first, [0])),
        ("prlimit64", _REFUSE, _If(second, [0]), _If(third, [0], is_one=False)),
        ("prlimit64", _REFUSE, _If(second, [0]), _If(third + 4, [0], is_one=False)),
        ("fcntl", _REFUSE, _If(second, _FCNTL_COMMANDS, is_one=False)),
        ("socket", _REFUSE, _If(first, families, is_one=False)),
        ("madvise", _REFUSE, _If(third, _FORGETTING)),
        ("clone3", _NO_SUCH_CALL),
        ("clone", _REFUSE, _If(first, [0], is_one=False, mask=_NEW_NAMESPACES)),
    ]
    if not locks:
        # The key of a futex that is not private to its process is a place in a file, also in one
        # that is mapped only for reading. To wait ends at once, as if the value had changed: code
        # that waits for its threads then polls.
        rules += [("futex", _ERRNO | errno.EAGAIN, shared, waits)]
        rules += [("futex", _ERRNO | errno.EINVAL, shared)]
    return rules


def _rule(number: int, answer: int, *conditions: _If) -> list[bytes]:
    """Return code that answers a call if all conditions hold.

    Before it and after it, the call's number is loaded. A condition that does not hold jumps over
    the answer.
    """
    code = [_instruction(_RETURN, answer), _instruction(_LOAD, _NUMBER)]
    for at, values, is_one, mask in reversed(conditions):
        over = len(code) - 1
        comparisons = [
            _instruction(
                _EQUAL,
                value,
                yes=following + (0 if is_one else over),
                no=over if is_one and not following else 0,
            )
            for following, value in zip(reversed(range(len(values))), values, strict=True)
        ]
        code = [_instruction(_LOAD, at), _instruction(_AND, mask), *comparisons, *code]
    return [_instruction(_EQUAL, number, no=len(code)), *code]


def _instruction(operation: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """Return one instruction, which skips `yes` or `no` more if its comparison holds or fails."""
    return struct.pack("=HBBI", operation, yes, no, value)
