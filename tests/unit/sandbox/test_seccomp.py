"""The filter of system calls, evaluated as the kernel does."""

from __future__ import annotations

import errno
import struct

import pytest

from tidegate.sandbox.seccomp import ABSENT, ARCHITECTURES, DENIED, OF_PROCESS, OF_PROCESSES, seccomp_filter

CLONE_NEWUSER, SIGCHLD, AF_UNIX, AF_VSOCK = 0x10000000, 17, 1, 40


def verdict(program: bytes, architecture: int, number: int, first: int = 0, second: int = 0) -> int:
    """Runs the filter on a call; returns the error's number, 0 if the call is allowed."""
    data = struct.pack("=IIQQQ", number, architecture, 0, first, second)
    rules, place, value = list(struct.iter_unpack("=HBBI", program)), 0, 0
    while True:
        code, yes, no, operand = rules[place]
        place += 1
        match code:
            case 0x20:
                value = struct.unpack_from("=I", data, operand)[0]
            case 0x06:
                return 0 if operand == 0x7FFF0000 else operand & 0xFFFF
            case 0x15 | 0x25 | 0x45:
                met = {0x15: value == operand, 0x25: value > operand, 0x45: bool(value & operand)}[code]
                place += yes if met else no


@pytest.mark.parametrize(("column", "machine"), list(enumerate(ARCHITECTURES)))
def test_listed_calls_are_refused_and_others_pass(column: int, machine: str) -> None:
    program, architecture = seccomp_filter(machine), ARCHITECTURES[machine]
    assert program is not None
    refused = {numbers[column]: errno.EPERM for numbers in DENIED.values()}
    refused |= {numbers[column]: errno.ENOSYS for numbers in ABSENT.values()}
    clone, socket = ((56, 41), (220, 198))[column]
    for number in range(463):
        if number not in (clone, socket):
            assert verdict(program, architecture, number) == refused.get(number, 0), number
    assert verdict(program, architecture, clone, SIGCHLD) == 0
    assert verdict(program, architecture, clone, CLONE_NEWUSER | SIGCHLD) == errno.EPERM
    assert verdict(program, architecture, socket, AF_UNIX) == 0
    assert verdict(program, architecture, socket, AF_VSOCK) == errno.EAFNOSUPPORT


@pytest.mark.parametrize(("column", "machine"), list(enumerate(ARCHITECTURES)))
def test_the_supervisor_cannot_be_limited_or_starved(column: int, machine: str) -> None:
    program, architecture = seccomp_filter(machine), ARCHITECTURES[machine]
    assert program is not None
    for numbers in OF_PROCESS.values():
        refused = [verdict(program, architecture, numbers[column], process) for process in (0, 1, 2)]
        assert refused == [0, errno.EPERM, 0]
    for numbers, single in OF_PROCESSES.values():
        for group in (single + 1, single + 2):
            assert verdict(program, architecture, numbers[column], group, 0) == errno.EPERM
        refused = [verdict(program, architecture, numbers[column], single, process) for process in (0, 1, 2)]
        assert refused == [0, errno.EPERM, 0]


def test_calls_of_other_architectures_and_newer_kernels_are_absent() -> None:
    program = seccomp_filter("x86_64")
    assert program is not None
    i386, x32 = 0x40000003, 0x40000000
    assert verdict(program, i386, 1) == errno.ENOSYS
    assert verdict(program, ARCHITECTURES["x86_64"], x32 + 1) == errno.ENOSYS
    assert verdict(program, ARCHITECTURES["x86_64"], 463) == errno.ENOSYS


def test_a_processor_without_a_list_has_no_filter() -> None:
    assert seccomp_filter("riscv64") is None
