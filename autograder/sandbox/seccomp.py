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

# Offsets in struct seccomp_data.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # arguments have 8 bytes

_LOAD, _AND = 0x20, 0x54  # BPF_LD|BPF_W|BPF_ABS, BPF_ALU|BPF_AND|BPF_K
_EQUAL, _AT_LEAST, _RETURN = 0x15, 0x35, 0x06  # BPF_JMP|BPF_JEQ, BPF_JMP|BPF_JGE, BPF_RET
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000

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


class UnknownArchitecture(RuntimeError):
    """The numbers of system calls are not known for this processor."""


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
        UnknownArchitecture: the machine is neither of them.

    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise UnknownArchitecture(
            f"no seccomp filter for {machine}, only for {', '.join(_ARCHITECTURES)}"
        )
    number = numbers_of(machine, "arguments")
    code = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUAL, _ARCHITECTURES[machine], yes=1),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        code += [_instruction(_AT_LEAST, _X32, no=1), _refuse(errno.ENOSYS)]
    kinds = ["others", "kernel"]
    if not namespaces:
        kinds += ["namespaces", "cells", "memory"]
    if not namespaces and not locks:
        kinds += ["locks"]
    for refused in numbers_of(machine, *kinds).values():
        code += [_instruction(_EQUAL, refused, no=1), _refuse(errno.EPERM)]
    if not namespaces:
        first, second, third = (_FIRST_ARGUMENT + 8 * i for i in range(3))
        code += _of_call(number["kill"], _ends_itself(second))
        code += _of_call(number["tgkill"], _ends_itself(third))
        code += _of_call(number["setrlimit"], _no_processor_time(first))
        # The pointer to the new limit is null if the caller only reads it.
        asks = [_instruction(_LOAD, third), _instruction(_EQUAL, 0, no=2)]
        asks += [_instruction(_LOAD, third + 4), _instruction(_EQUAL, 0, yes=1)]
        code += _of_call(number["prlimit64"], _no_processor_time(second, unless=asks))
        code += _allows_only(number["fcntl"], second, _FCNTL_COMMANDS)
        code += _allows_only(number["socket"], first, _FAMILIES if tcp else _FAMILIES[:1])
        code += _allows_only(number["madvise"], third, _FORGETTING, but=True)
        if not locks:
            code += _of_call(number["futex"], _private_futexes(second))
        code += _of_call(number["clone3"], [_refuse(errno.ENOSYS)])
        namespaces_asked = [_instruction(_LOAD, first), _instruction(_AND, _NEW_NAMESPACES)]
        namespaces_asked += [_instruction(_EQUAL, 0, yes=1), _refuse(errno.EPERM)]
        code += _of_call(number["clone"], namespaces_asked)
    return b"".join([*code, _instruction(_RETURN, _ALLOW)])


def _of_call(number: int, code: Sequence[bytes]) -> list[bytes]:
    """Return code that runs for one call only. Before and after it, the call's number is loaded."""
    skip = _instruction(_EQUAL, number, no=len(code) + 1)
    return [skip, *code, _instruction(_LOAD, _NUMBER)]


def _ends_itself(signal_at: int) -> list[bytes]:
    """Return code that ends a process which sends SIGKILL or SIGSTOP to process 1 of its cell.

    Process 1 of a pid namespace receives neither signal from inside. Without this code, a student
    process that killed or stopped itself would continue.
    """
    return [
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _instruction(_EQUAL, 1, no=4),
        _instruction(_LOAD, signal_at),
        _instruction(_EQUAL, signal.SIGKILL, yes=1),
        _instruction(_EQUAL, signal.SIGSTOP, no=1),
        _instruction(_RETURN, _KILL),
    ]


def _no_processor_time(argument: int, unless: Sequence[bytes] = ()) -> list[bytes]:
    """Return code that refuses a limit on processor time, ``RLIMIT_CPU``, which is number 0.

    If a process exceeds its hard limit, the kernel sends SIGKILL, even to process 1. Student code
    has no other way to end its process by SIGKILL. So with this code, SIGKILL always comes from the
    machine.
    """
    zero = _instruction(_EQUAL, 0, no=len(unless) + 1)
    return [_instruction(_LOAD, argument), zero, *unless, _refuse(errno.EPERM)]


def _allows_only(
    number: int, argument: int, values: Sequence[int], *, but: bool = False
) -> list[bytes]:
    """Return code that refuses a call unless its argument is one of these values; `but`: if it is.

    Each comparison that holds jumps behind the refusal, or with `but` to it. The last one that does
    not hold must then jump over it.
    """
    count = len(values)
    comparisons = [
        _instruction(_EQUAL, value, yes=count - i - but, no=but and i == count - 1)
        for i, value in enumerate(values)
    ]
    return _of_call(number, [_instruction(_LOAD, argument), *comparisons, _refuse(errno.EPERM)])


def _private_futexes(operation: int) -> list[bytes]:
    """Return code that makes a futex useless unless it is private to its process.

    The key of any other futex is a place in a file, also in one that is mapped only for reading. To
    wait ends at once, as if the value had changed: code that waits for its threads then polls.
    """
    private, command, wait, wait_bitset = 128, 127, 0, 9
    return [
        _instruction(_LOAD, operation),
        _instruction(_AND, private),
        _instruction(_EQUAL, private, yes=6),
        _instruction(_LOAD, operation),
        _instruction(_AND, command),
        _instruction(_EQUAL, wait, yes=1),
        _instruction(_EQUAL, wait_bitset, no=1),
        _refuse(errno.EAGAIN),
        _refuse(errno.EINVAL),
    ]


def _instruction(operation: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """Return one instruction, which skips `yes` or `no` more if its comparison holds or fails."""
    return struct.pack("=HBBI", operation, yes, no, value)


def _refuse(number: int) -> bytes:
    return _instruction(_RETURN, _ERRNO | number)
