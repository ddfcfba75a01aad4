"""The filter refuses what it should, and no call of honest code."""

from __future__ import annotations

import errno
import struct

import pytest

from autograder.sandbox import seccomp
from autograder.sandbox.seccomp import numbers_of, seccomp_filter

REFUSED, NO_SUCH_CALL, KILLED, ALLOWED = 0x00050001, 0x00050026, 0x80000000, 0x7FFF0000


def run(program: bytes, number: int, architecture: int, *arguments: int) -> int:
    """Carry out a filter as the kernel would; return what it answers."""
    values = [(a or 0) for a in (*arguments, *[0] * (6 - len(arguments)))]
    data = struct.pack("=IIQ6Q", number, architecture, 0, *values)
    at, register = 0, 0
    while True:
        code, yes, no, value = struct.unpack_from("=HBBI", program, 8 * at)
        at += 1
        if code == 0x20:
            (register,) = struct.unpack_from("=I", data, value)
        elif code == 0x54:
            register &= value
        elif code == 0x06:
            return value
        else:
            holds = register == value if code == 0x15 else register >= value
            assert code in (0x15, 0x35)
            at += yes if holds else no


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_it_refuses_its_list_and_nothing_else(machine: str) -> None:
    program = seccomp_filter(machine)
    architecture = seccomp._ARCHITECTURES[machine]
    locks, by_arguments = numbers_of(machine, "locks"), numbers_of(machine, "arguments")
    kinds = ("others", "kernel", "namespaces", "cells", "memory")
    refused = {*numbers_of(machine, *kinds).values(), *locks.values()}
    assert len(refused) == (75 if machine == "x86_64" else 74)
    fcntl, socket, futex, clone, clone3, kill = (
        by_arguments[name] for name in ("fcntl", "socket", "futex", "clone", "clone3", "kill")
    )
    for number in range(600):
        expected = REFUSED if number in refused else NO_SUCH_CALL if number == clone3 else ALLOWED
        # Arguments that are good for socket (AF_UNIX), fcntl (F_GETFD) and futex (private wait).
        good = (1, 1) if number != futex else (1, 128)
        assert run(program, number, architecture, *good) == expected, number
    for command in (5, 6, 7, 36, 37, 38, 1024, 1026, 1031, 1036):  # locks, lease, watch, pipe, hint
        assert run(program, fcntl, architecture, 3, command) == REFUSED
    madvise = by_arguments["madvise"]
    for advice in range(26):  # MADV_COLD, MADV_PAGEOUT
        expected = REFUSED if advice in (20, 21) else ALLOWED
        assert run(program, madvise, architecture, 4096, 4096, advice) == expected
    for family in (2, 10, 16, 17, 38, 40):  # TCP, netlink, raw packets, cryptography, AF_VSOCK
        assert run(program, socket, architecture, family, 1) == REFUSED
    assert run(program, futex, architecture, 7, 0) == 0x00050000 | errno.EAGAIN
    assert run(program, futex, architecture, 7, 1) == 0x00050000 | errno.EINVAL
    with_locks = seccomp_filter(machine, locks=True)
    assert run(with_locks, futex, architecture, 7, 1) == ALLOWED
    assert run(seccomp_filter(machine, tcp=True), socket, architecture, 2, 1) == ALLOWED
    for number in refused:
        answer = ALLOWED if number in locks.values() else REFUSED
        assert run(with_locks, number, architecture) == answer, number
    for flag in (0x00020000, 0x02000000, 0x10000000, 0x20000000, 0x40000000):
        assert run(program, clone, architecture, flag | 17) == REFUSED
    assert run(program, clone, architecture, 0x003D0F00) == ALLOWED  # a thread
    assert run(program, 1, 0x40000003) == KILLED  # i386
    assert run(program, kill, architecture, 1, 9) == KILLED
    assert run(program, kill, architecture, 1, 15) == ALLOWED
    assert run(program, kill, architecture, 2, 9) == ALLOWED
    # Nobody sets a limit after which the kernel sends SIGKILL.
    setrlimit, prlimit = by_arguments["setrlimit"], by_arguments["prlimit64"]
    cpu, files, somewhere = 0, 7, 0x7FFF_0000_1000
    assert run(program, setrlimit, architecture, cpu, somewhere) == REFUSED
    assert run(program, setrlimit, architecture, files, somewhere) == ALLOWED
    for pointer in (somewhere, 0x1000, 0x1_0000_0000):
        assert run(program, prlimit, architecture, 0, cpu, pointer) == REFUSED
    assert run(program, prlimit, architecture, 0, cpu, 0, somewhere) == ALLOWED  # it only asks
    assert run(program, prlimit, architecture, 0, files, somewhere) == ALLOWED
