"""The writer's thread is waited for, whatever interrupts the wait."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import pytest

from penstock.io.checkpoints.writer_thread import WriterThread


def interrupted(work: Callable[[], object], *, at_main: bool = True) -> None:
    """Do `work`, which waits, until Ctrl-C comes: to the main thread, or to another, which does not wake it."""
    main = threading.main_thread().ident
    assert main is not None

    def interrupts() -> None:
        time.sleep(0.2)
        signal.pthread_kill(main if at_main else threading.get_ident(), signal.SIGINT)

    def waits() -> None:
        threading.Thread(target=interrupts).start()
        work()
        time.sleep(60)  # it has not waited

    with pytest.raises(KeyboardInterrupt):
        waits()


def test_a_job_whose_wait_was_interrupted_runs_on_till_awaited() -> None:
    background, may_end, done = WriterThread(), threading.Event(), list[int]()

    def job() -> None:
        assert may_end.wait(60)
        done.append(1)

    background.start(job, "a job")
    interrupted(background.join)
    interrupted(background.wait)
    interrupted(background.wait, at_main=False)
    assert background.is_busy
    assert not done
    threading.Timer(0.1, may_end.set).start()
    background.wait()
    assert done == [1]
    assert not background.is_busy
    background.start(lambda: 1 / 0, "a division")
    with pytest.raises(ZeroDivisionError):
        background.wait()
    background.wait()
