"""System calls that programs in a bubblewrap sandbox may not make, as a filter for the kernel.

The filter removes parts of the kernel that a sandbox does not need and that have had faults: new user
namespaces, io_uring, bpf, keyrings, mounts. It also denies objects that keep memory outside any process
(memfd, System V queues), and sockets of families that network namespaces do not separate (vsock).
"""

from __future__ import annotations

import errno
import platform
import struct

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Name → value of AUDIT_ARCH."""
DENIED: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "bpf": (321, 280),
    "chroot": (161, 51), "clock_adjtime": (305, 266), "clock_settime": (227, 112),
    "delete_module": (176, 106), "fanotify_init": (300, 262), "finit_module": (313, 273),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fsopen": (430, 430), "fspick": (433, 433),
    "init_module": (175, 105), "ioperm": (173, None), "iopl": (172, None), "kcmp": (312, 272),
    "kexec_file_load": (320, 294), "kexec_load": (246, 104), "keyctl": (250, 219),
    "lookup_dcookie": (212, 18), "memfd_secret": (447, 447), "migrate_pages": (256, 238),
    "mount": (165, 40), "mount_setattr": (442, 442), "move_mount": (429, 429), "move_pages": (279, 239),
    "msgget": (68, 186), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "open_tree": (428, 428), "perf_event_open": (298, 241), "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41), "quotactl": (179, 60), "quotactl_fd": (443, 443), "reboot": (169, 142),
    "request_key": (249, 218), "semget": (64, 190), "setdomainname": (171, 162),
    "sethostname": (170, 161), "setns": (308, 268), "settimeofday": (164, 170), "swapoff": (168, 225),
    "swapon": (167, 224), "syslog": (103, 116), "umount2": (166, 39), "unshare": (272, 97),
    "userfaultfd": (323, 282), "vhangup": (153, 58),
}  # fmt: skip
"""System call → its number on x86_64 and aarch64; refused with EPERM."""
ABSENT: dict[str, tuple[int | None, int | None]] = {
    "clone3": (435, 435), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425), "memfd_create": (319, 279),
}  # fmt: skip
"""The same, refused with ENOSYS, so that programs use an older call instead."""
NEWEST = 462
"""Calls with higher numbers are newer than this list, and absent."""
CLONE, SOCKET = (56, 220), (41, 198)
OF_PROCESS = {
    "prlimit64": (302, 261), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
}  # fmt: skip
"""Calls that change the process of their first argument; refused for the supervisor, process 1, which they
could end or starve."""
OF_PROCESSES = {"setpriority": ((141, 140), 0), "ioprio_set": ((251, 30), 1)}
"""Calls whose first argument is a kind of process set, with the kind of a single process, named by the second
argument. Groups and users are refused: the supervisor has the same."""
NAMESPACES = 0x7E020000
"""CLONE_NEWUSER and the flags of the other namespaces."""
FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK (for lists of interfaces)."""

_LOAD, _AND, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x25, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000


def seccomp_filter(machine: str | None = None) -> bytes | None:
    """Returns the filter as a program for the kernel; None for a processor whose numbers are not listed.

    Args:
        machine: Name of the processor's architecture; this machine's by default.
    """
    name = machine or platform.machine()
    if name not in ARCHITECTURES:
        return None
    column = list(ARCHITECTURES).index(name)
    rules = [
        _rule(_LOAD, _ARCHITECTURE),
        *_unless(_EQUAL, ARCHITECTURES[name], errno.ENOSYS),
        _rule(_LOAD, _NUMBER),
        *_if(_GREATER, NEWEST, errno.ENOSYS),
    ]
    for listed, number in ((DENIED, errno.EPERM), (ABSENT, errno.ENOSYS)):
        for numbers in listed.values():
            if (call := numbers[column]) is not None:
                rules += _if(_EQUAL, call, number)
    rules += _for_call(CLONE[column], _if(_ANY_BIT, NAMESPACES, errno.EPERM))
    not_first = _if(_EQUAL, 1, errno.EPERM)
    for numbers in OF_PROCESS.values():
        rules += _for_call(numbers[column], not_first)
    for numbers, single in OF_PROCESSES.values():
        of_one = [*_if(_GREATER, single, errno.EPERM), _rule(_LOAD, _SECOND_ARGUMENT), *not_first]
        rules += _for_call(numbers[column], of_one)
    families = [_rule(_EQUAL, family, yes=len(FAMILIES) - place) for place, family in enumerate(FAMILIES)]
    rules += _for_call(SOCKET[column], [*families, _rule(_RETURN, _ERROR | errno.EAFNOSUPPORT)])
    return b"".join([*rules, _rule(_RETURN, _ALLOW)])


def _rule(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """Returns an instruction; `yes` and `no` are the numbers of instructions that a comparison skips."""
    return struct.pack("=HBBI", code, yes, no, value)


def _if(code: int, value: int, number: int) -> list[bytes]:
    return [_rule(code, value, no=1), _rule(_RETURN, _ERROR | number)]


def _unless(code: int, value: int, number: int) -> list[bytes]:
    return [_rule(code, value, yes=1), _rule(_RETURN, _ERROR | number)]


def _for_call(call: int, rules: list[bytes]) -> list[bytes]:
    """Applies rules, which begin with the first argument, to one call, which is otherwise allowed."""
    checks = [_rule(_LOAD, _FIRST_ARGUMENT), *rules, _rule(_RETURN, _ALLOW)]
    return [_rule(_EQUAL, call, no=len(checks)), *checks]
