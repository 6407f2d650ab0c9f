"""The end of a process is seen, by a pidfd and without one."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from tests.support.capabilities import absent

from penstock.process.end import open_process_end

BOUND_S = 30.0


@pytest.fixture(params=["pidfd", "polling"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    with absent("pidfd") if request.param == "polling" else nullcontext():
        yield request.param


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE) as one:
        yield one
        one.kill()


def is_readable(descriptor: int, within_s: float) -> bool:
    watched = select.poll()
    watched.register(descriptor, select.POLLIN)
    return bool(watched.poll(within_s * 1000))


def test_a_process_that_runs_has_not_ended(process: subprocess.Popen[bytes]) -> None:
    end = open_process_end(process.pid)
    try:
        assert not is_readable(end, 0.2)
    finally:
        os.close(end)


def test_the_end_is_seen_before_the_process_is_reaped(process: subprocess.Popen[bytes]) -> None:
    end = open_process_end(process.pid)
    try:
        process.kill()
        assert is_readable(end, BOUND_S)
    finally:
        os.close(end)


def test_a_zombie_has_ended(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    end = open_process_end(process.pid)
    try:
        assert is_readable(end, BOUND_S)
    finally:
        os.close(end)


def test_a_process_that_is_gone_is_an_error(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    with pytest.raises(ProcessLookupError):
        open_process_end(process.pid)


def test_closing_the_descriptor_ends_the_watching(process: subprocess.Popen[bytes]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    os.close(open_process_end(process.pid))
    nothing = select.poll()
    for _ in range(int(BOUND_S / 0.05)):
        if len(os.listdir("/proc/self/fd")) <= before:
            return
        nothing.poll(50)
    raise AssertionError(f"{len(os.listdir('/proc/self/fd')) - before} descriptors are left")
