"""How many pilots a queue needs, decided from facts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.provisioner import Phase, Shape
from penstock.cluster.scaling import Answer, Launch, Limits, NodeFacts, PilotFacts, WaitingJob, decide

GIB = 1 << 30
LIMITS = Limits(Shape(2, 4 * GIB), most=4, idle_s=60.0)
IDLE = NodeFacts("READY", (2, 0, 4 * GIB), idle_s=10.0)
BUSY = NodeFacts("READY", (2, 0, 4 * GIB), cpus_used=2, is_busy=True)


def job(count: int, cpus: int = 1, name: str = "job") -> WaitingJob:
    return WaitingJob(name, ((cpus, 0, GIB),) * count)


def pilot(
    number: int, phase: Phase = Phase.RUNNING, node: NodeFacts | None = None, *, drained: bool = False
) -> PilotFacts:
    return PilotFacts(f"slurm-{number}-0", phase, "for job 'job'", "Resources", node, is_drained_by_us=drained)


def test_empty_queue_asks_for_nothing() -> None:
    assert decide([], [], [], LIMITS) == Answer()


def test_gang_gets_as_many_pilots_as_hold_it() -> None:
    assert decide([job(5)], [], [], LIMITS).launches == (Launch(3, "for job 'job'"),)


def test_pilots_under_way_are_not_asked_for_twice() -> None:
    under_way = [pilot(0, Phase.PENDING), pilot(1, Phase.RUNNING)]
    assert decide([job(4)], under_way, [], LIMITS).launches == ()
    assert decide([job(5)], under_way, [], LIMITS).launches == (Launch(1, "for job 'job'"),)


def test_idle_nodes_are_used_before_pilots_are_launched() -> None:
    assert decide([job(4)], [pilot(0, node=IDLE)], [IDLE], LIMITS).launches == ()
    assert decide([job(4)], [pilot(0, node=BUSY)], [IDLE], LIMITS).launches == (Launch(1, "for job 'job'"),)


def test_job_that_no_pilot_holds_is_named_and_holds_up_none() -> None:
    answer = decide([job(1, cpus=3, name="large"), job(1)], [], [], LIMITS)
    assert "'large' asks for 3 CPUs" in answer.unmet[0]
    assert answer.launches == (Launch(1, "for job 'job'"),)


def test_gang_beyond_the_limit_launches_none_of_it() -> None:
    answer = decide([job(9), job(1, name="small")], [], [], LIMITS)
    assert answer.launches == ()
    assert "needs 5 more pilots, and 4 may be launched" in answer.unmet[0]


def test_once_pilots_are_not_shared_by_jobs() -> None:
    once = Limits(Shape(2, 4 * GIB), most=4, once=True)
    waiting = [job(1, name="a"), job(1, name="b")]
    assert decide(waiting, [], [], LIMITS).launches == (Launch(1, "for job 'a'"),)
    assert [launch.why for launch in decide(waiting, [], [], once).launches] == ["for job 'a'", "for job 'b'"]


def test_pending_pilot_that_no_job_needs_is_cancelled() -> None:
    assert decide([], [pilot(0, Phase.PENDING)], [], LIMITS).cancel == ("slurm-0-0",)
    kept = Limits(LIMITS.shape, most=4, least=1)
    assert decide([], [pilot(0, Phase.PENDING)], [], kept).cancel == ()


def test_idle_pilot_is_drained_after_a_while_and_then_cancelled() -> None:
    assert decide([], [pilot(0, node=IDLE)], [], LIMITS).drain == ()
    long_idle = NodeFacts("READY", (2, 0, 4 * GIB), idle_s=60.0)
    assert decide([], [pilot(0, node=long_idle)], [], LIMITS).drain == ("slurm-0-0",)
    draining = NodeFacts("DRAINING", (2, 0, 4 * GIB), cpus_used=1, is_busy=True)
    assert decide([], [pilot(0, node=draining, drained=True)], [], LIMITS).cancel == ()
    drained = NodeFacts("DRAINED", (2, 0, 4 * GIB))
    assert decide([], [pilot(0, node=drained, drained=True)], [], LIMITS).cancel == ("slurm-0-0",)


def test_least_pilots_are_launched_without_a_job() -> None:
    assert decide([], [], [], Limits(LIMITS.shape, most=4, least=2)).launches == (Launch(2, "kept: 2 at least"),)


jobs = st.lists(st.builds(job, st.integers(1, 6), st.integers(0, 4)), max_size=5)
nodes = st.none() | st.sampled_from([IDLE, BUSY, NodeFacts("DOWN", (2, 0, 4 * GIB)), NodeFacts("DRAINED", (2, 0, GIB))])
pilots = st.lists(st.tuples(st.sampled_from(Phase), nodes, st.booleans()), max_size=4)


@given(jobs, pilots, st.integers(0, 4), st.booleans())
def test_limits_hold_and_each_pilot_has_a_reason(
    waiting: list[WaitingJob], given: list[tuple[Phase, NodeFacts | None, bool]], least: int, once: bool
) -> None:
    known = [pilot(i, phase, node, drained=drained) for i, (phase, node, drained) in enumerate(given)]
    answer = decide(waiting, known, [], Limits(LIMITS.shape, most=4, least=least, once=once))
    live = [one for one in known if one.phase is not Phase.ENDED]
    assert len(live) + sum(launch.count for launch in answer.launches) <= 4
    assert set(answer.reasons) == {one.name for one in live}
    assert all(answer.reasons.values())
    assert not set(answer.drain) & set(answer.cancel)
    busy = {one.name for one in live if one.node is not None and one.node.is_busy}
    assert not busy & {*answer.drain, *answer.cancel}
