"""Properties of desired x observed -> instructions."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.agent import Desired
from penstock_worker.reconcile import Forget, Life, Observed, Start, Stop, reconcile

IDS = st.sampled_from(["a", "b", "c", "d", "e"])
OBSERVED = st.dictionaries(IDS, st.builds(Observed, epoch=st.integers(1, 3), life=st.sampled_from(Life)))


def desired(replica_id: str, epoch: int) -> Desired:
    return Desired(
        replica_id=replica_id,
        job_id="j",
        job_name="n",
        role="trainer",
        index=0,
        epoch=epoch,
        stream=1,
        entrypoint=["x"],
    )


DESIRED = st.dictionaries(IDS, st.integers(1, 3)).map(lambda d: {key: desired(key, epoch) for key, epoch in d.items()})


def apply(observed: dict[str, Observed], wanted: dict[str, Desired]) -> tuple[dict[str, Observed], int]:
    """Carry the instructions out as a perfect machine would: stops end and are confirmed at once."""
    after = dict(observed)
    instructions = reconcile(wanted, observed)
    for instruction in instructions:
        match instruction:
            case Start(order):
                after[order.replica_id] = Observed(order.epoch, Life.ALIVE)
            case Stop(replica_id):
                after[replica_id] = Observed(after[replica_id].epoch, Life.SETTLED)
            case Forget(replica_id):
                del after[replica_id]
    return after, len(instructions)


@settings(deadline=None)
@given(DESIRED, OBSERVED)
def test_no_replica_gets_two_instructions(wanted: dict[str, Desired], observed: dict[str, Observed]) -> None:
    ids = [i.desired.replica_id if isinstance(i, Start) else i.replica_id for i in reconcile(wanted, observed)]
    assert len(ids) == len(set(ids))


@settings(deadline=None)
@given(DESIRED, OBSERVED)
def test_what_is_wanted_and_here_is_left_alone(wanted: dict[str, Desired], observed: dict[str, Observed]) -> None:
    same = {key: value for key, value in observed.items() if key in wanted and wanted[key].epoch <= value.epoch}
    touched = {i.replica_id for i in reconcile(wanted, observed) if not isinstance(i, Start)}
    started = {i.desired.replica_id for i in reconcile(wanted, observed) if isinstance(i, Start)}
    assert not same.keys() & (touched | started)


@settings(deadline=None)
@given(DESIRED, OBSERVED)
def test_nothing_that_is_here_is_started_again(wanted: dict[str, Desired], observed: dict[str, Observed]) -> None:
    started = {i.desired.replica_id for i in reconcile(wanted, observed) if isinstance(i, Start)}
    assert started == wanted.keys() - observed.keys()


@settings(deadline=None)
@given(DESIRED, OBSERVED)
def test_an_unconfirmed_end_is_never_forgotten(wanted: dict[str, Desired], observed: dict[str, Observed]) -> None:
    forgotten = {i.replica_id for i in reconcile(wanted, observed) if isinstance(i, Forget)}
    assert all(observed[replica_id].life is Life.SETTLED for replica_id in forgotten)


@settings(deadline=None)
@given(DESIRED, OBSERVED)
def test_the_node_converges_to_what_is_wanted(wanted: dict[str, Desired], observed: dict[str, Observed]) -> None:
    state = {
        key: value if value.life in (Life.ALIVE, Life.SETTLED) else Observed(value.epoch, Life.SETTLED)
        for key, value in observed.items()
    }
    for _ in range(4):
        state, changes = apply(state, wanted)
    assert changes == 0
    assert state.keys() == wanted.keys()
    assert all(state[key].epoch >= wanted[key].epoch for key in wanted)
