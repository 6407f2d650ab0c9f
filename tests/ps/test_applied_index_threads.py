"""The applied index while several threads use it: a trainer leaves while others' pushes are applied."""

from __future__ import annotations

from penstock.ps.durability.wal import AppliedIndex
from penstock.ps.rounds.messages import TrainerIncarnation


class Interrupted(int):
    """A trainer's number; whenever it is compared, another thread has just applied a push."""

    def __new__(cls, number: int, index: AppliedIndex) -> Interrupted:
        self = super().__new__(cls, number)
        self.index = index
        return self

    index: AppliedIndex

    def __eq__(self, other: object) -> bool:
        self.index.apply(TrainerIncarnation(0, 0), 1, f"w{len(self.index.applied)}", None)
        return int(self) == other

    __hash__ = int.__hash__


def test_a_trainer_leaves_while_the_pushes_of_others_are_applied() -> None:
    index = AppliedIndex(trainers=2, keeps_changes=False)
    for trainer in (0, 1):
        index.apply(TrainerIncarnation(trainer, 0), 1, "w", None)
    index.leave(Interrupted(1, index))
    assert {trainer for trainer, _ in index.applied} == {0}
    assert len(index.applied) > 1, "pushes were applied meanwhile"
