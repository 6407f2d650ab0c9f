"""The simulation of a step: what must hold for any graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.advice.simulate import Task, _Run, simulate


@st.composite
def graphs(draw: st.DrawFn) -> list[Task]:
    count = draw(st.integers(1, 24))
    tasks = []
    for index in range(count):
        before = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        cost = float(draw(st.integers(1, 1000)))
        tasks.append(Task(f"op_{index}", cost, tuple(sorted(before)), draw(st.integers(-1, 2))))
    return tasks


def span(tasks: list[Task], *, workers: int, cores: int = 64) -> float:
    return simulate(tasks, workers=workers, cores=cores, handle_ns=0.0).span_ns


def longest_path(tasks: list[Task]) -> float:
    ends: list[float] = []
    for task in tasks:
        ends.append(task.cost_ns + max((ends[one] for one in task.before), default=0.0))
    return max(ends)


def no_hand_overs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HANDOVER_NS", "WAKE_NS"):
        monkeypatch.setattr(f"penstock.advice.simulate.{name}", 0.0)


@given(graphs())
def test_one_worker_takes_the_sum_of_all_costs(tasks: list[Task]) -> None:
    made = simulate(tasks, workers=1, cores=4, handle_ns=0.0)
    assert made.span_ns == pytest.approx(sum(task.cost_ns for task in tasks))
    assert list(made.busy_ns) == pytest.approx([made.span_ns])


@given(graphs())
def test_no_step_beats_its_longest_path_or_its_share_of_work(tasks: list[Task]) -> None:
    for workers in (2, 3, 8):
        made = span(tasks, workers=workers)
        assert made >= longest_path(tasks) - 1e-6
        assert made >= sum(task.cost_ns for task in tasks) / workers - 1e-6


@given(graphs())
def test_unlimited_workers_take_the_longest_path(tasks: list[Task]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        no_hand_overs(patch)
        anywhere = [replace(task, home=index) for index, task in enumerate(tasks)]
        assert span(anywhere, workers=len(tasks)) == pytest.approx(longest_path(tasks))


@given(graphs())
def test_every_task_starts_after_those_before_it_have_ended(tasks: list[Task]) -> None:
    for workers in (1, 2, 4):
        made = simulate(tasks, workers=workers, cores=64, handle_ns=0.0)
        for index, task in enumerate(tasks):
            for one in task.before:
                assert made.start_ns[index] >= made.start_ns[one] + tasks[one].cost_ns - 1e-6
        assert sum(made.busy_ns) == pytest.approx(sum(task.cost_ns for task in tasks))


@given(graphs(), st.integers(2, 5))
def test_costs_that_grow_together_scale_the_step(tasks: list[Task], factor: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        no_hand_overs(patch)
        larger = [replace(task, cost_ns=task.cost_ns * factor) for task in tasks]
        assert span(larger, workers=2) == pytest.approx(factor * span(tasks, workers=2))


@given(graphs())
def test_more_workers_than_cores_do_no_more_work(tasks: list[Task]) -> None:
    total = sum(task.cost_ns for task in tasks)
    assert span(tasks, workers=4, cores=1) >= total - 1e-6


@given(graphs())
def test_the_path_is_a_chain_that_ends_with_the_step(tasks: list[Task]) -> None:
    made = simulate(tasks, workers=2, cores=2)
    starts = [made.start_ns[index] for index in made.path]
    assert starts == sorted(starts) and len(set(made.path)) == len(made.path)
    ends = max(made.start_ns[index] + tasks[index].cost_ns for index in range(len(tasks)))
    last = made.path[-1]
    assert made.start_ns[last] + tasks[last].cost_ns == pytest.approx(ends, abs=1000.0)


def test_stretch_slows_only_what_runs_beside_others() -> None:
    pair = [Task("a", 1e6, (), 0, 1.5), Task("b", 1e6, (), 1, 1.5)]
    assert span(pair, workers=1) == pytest.approx(2e6)
    assert span(pair, workers=2) == pytest.approx(1.5e6)
    alone = [pair[0], replace(pair[1], before=(0,))]
    assert span(alone, workers=2) == pytest.approx(2e6, rel=0.02)


def test_an_edge_backwards_is_refused() -> None:
    with pytest.raises(ValueError, match="edges go forward"):
        simulate([Task("a", 1.0, (0,))], workers=1, cores=1)


def test_two_replicas_of_a_chain_run_side_by_side() -> None:
    chain = [Task(f"op_{i}#{r}", 1e6, () if i == 0 else (2 * (i - 1) + r,), r) for i in range(5) for r in range(2)]
    made = simulate(chain, workers=2, cores=2, handle_ns=0.0)
    assert made.span_ns == pytest.approx(5e6, rel=0.01)
    assert list(made.busy_ns) == pytest.approx([5e6, 5e6])


def test_idle_workers_are_not_asked_when_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    take = _Run._take

    def counted(self: _Run, me: int) -> int:
        asked.append(me)
        return take(self, me)

    monkeypatch.setattr(_Run, "_take", counted)
    chain = [Task(f"op_{i}", 1000.0, (i - 1,) if i else (), 0) for i in range(100)]
    simulate(chain, workers=64, cores=64)
    assert len(asked) <= len(chain) + 64
