"""Steps of a program are counted by several threads, as Hogwild ones."""

from __future__ import annotations

import sys
import threading

from penstock.program.program import Program
from penstock.scope import Scope


def test_threads_that_count_steps_get_each_number_once() -> None:
    scope, program, num_threads, each = Scope(), Program(), 4, 5000
    found: list[list[int]] = [[] for _ in range(num_threads)]
    threads = [
        threading.Thread(target=lambda mine=mine: mine.extend(scope.next_step(program) for _ in range(each)))
        for mine in found
    ]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert sorted(n for mine in found for n in mine) == list(range(num_threads * each))
    assert scope.steps(program) == num_threads * each
