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

import errno
import platform
import signal
import struct
from collections.abc import Sequence

# Offsets in struct seccomp_data.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # arguments have 8 bytes

_LOAD, _AND = 0x20, 0x54  # BPF_LD|BPF_W|BPF_ABS, BPF_ALU|BPF_AND|BPF_K
_EQUAL, _AT_LEAST, _RETURN = 0x15, 0x35, 0x06  # BPF_JMP|BPF_JEQ, BPF_JMP|BPF_JGE, BPF_RET
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000

_X32 = 0x40000000
"""Calls of x86's third ABI (x32) have this bit; this ABI has different numbers for the calls."""

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Name → its number on x86_64 and on aarch64.
WATCHING_OTHERS = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "perf_event_open": (298, 241),
}
KERNEL_ITSELF = {
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "lookup_dcookie": (212, 18),
    "vhangup": (153, 58),
    "fanotify_init": (300, 262),
}
NAMESPACES = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
}
OTHER_CELLS = {
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "mincore": (27, 232),
    "cachestat": (451, 451),
    "preadv2": (327, 286),  # its flag RWF_NOWAIT tells what the page cache has
    "fadvise64": (221, 223),  # takes a file out of the page cache; a timed read tells that
    "readahead": (187, 213),
    "move_pages": (279, 239),  # tells on which memory node a page of a file is
    "get_mempolicy": (239, 236),
    "io_setup": (206, 0),  # of all io_setup together, the machine allows fs.aio-max-nr
    "sysinfo": (99, 179),
    "sched_rr_get_interval": (148, 127),
}
HIDDEN_MEMORY = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
}
LOCKS = {
    "flock": (73, 32),
    "setsid": (112, 157),  # /proc/self/autogroup has its number, which counts those of all cells
    "futex_waitv": (449, 449),
    "futex_wake": (454, 454),
    "futex_wait": (455, 455),
    "futex_requeue": (456, 456),
}
BY_ARGUMENTS = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "fcntl": (72, 25),
    "futex": (202, 98),
    "kill": (62, 129),
    "madvise": (28, 233),
    "prlimit64": (302, 261),
    "setrlimit": (160, 164),
    "socket": (41, 198),
    "tgkill": (234, 131),
}
_INOTIFY_INIT = 253  # on x86_64 only
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
    column = list(_ARCHITECTURES).index(machine)
    number = {name: numbers[column] for name, numbers in BY_ARGUMENTS.items()}
    code = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUAL, _ARCHITECTURES[machine], yes=1),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        code += [_instruction(_AT_LEAST, _X32, no=1), _refuse(errno.ENOSYS)]
    refused = {**WATCHING_OTHERS, **KERNEL_ITSELF}
    if not namespaces:
        refused |= NAMESPACES | OTHER_CELLS | HIDDEN_MEMORY | ({} if locks else LOCKS)
    for numbers in refused.values():
        code += [_instruction(_EQUAL, numbers[column], no=1), _refuse(errno.EPERM)]
    if machine == "x86_64" and not namespaces:
        code += [_instruction(_EQUAL, _INOTIFY_INIT, no=1), _refuse(errno.EPERM)]
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
