"""Where the values of a server come from, and whose they are: for trainers that go on from a checkpoint. Pure.

A checkpoint's part of the servers has a *token* that no other save has. Servers and trainers each look for the newest
checkpoint, at different times, and what they find may differ; the token says whether it does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from penstock.errors import PeerError, UserError


@dataclass(frozen=True, slots=True)
class Copy:
    """A checkpoint, by the token of its servers' part and the name of its folder; '' both: none."""

    token: str = ""
    name: str = ""

    def __str__(self) -> str:
        return self.name or "no checkpoint"


@dataclass(frozen=True, slots=True)
class Origin:
    """What a server says. `knows`: it has the values of the copy that it was asked for, or newer ones: it began from
    it, has written it since, or goes on from a state of its own. `began`: what it began from, in words.

    `epochs`: trainer -> the newest incarnation of it that has joined this run of the servers.
    """

    knows: bool
    began: str
    epochs: Mapping[int, int]

    def text(self) -> str:
        """Return JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str | bytes) -> Origin:
        """Read `text`. Raises PeerError."""
        try:
            content = json.loads(text)
            epochs = {int(trainer): int(epoch) for trainer, epoch in content["epochs"].items()}
            return Origin(bool(content["knows"]), str(content["began"]), epochs)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PeerError(f"a server says where its values come from with {text!r}: {error!r}") from error


class OtherCheckpoint(UserError):
    """Trainers and servers have restored different checkpoints. Fields: got, expected."""

    code = "other_checkpoint"


def check_origins(mine: Copy, origins: Mapping[str, Origin], trainer: int) -> None:
    """Raise OtherCheckpoint, naming the servers (endpoint -> what it says) that do not know what a trainer restores."""
    others = {endpoint: origin.began for endpoint, origin in origins.items() if not origin.knows}
    if others:
        said = ", ".join(f"the server {endpoint} began from {began}" for endpoint, began in others.items())
        raise OtherCheckpoint(
            f"trainer {trainer} restores {mine}, but {said}: their values are not of one step. Every server has to "
            "call CheckpointManager(folder, program).restore() before it serves, with the folder of the trainers; if "
            "they do, start the whole job again, servers too, so that all look anew for the newest whole checkpoint",
            got=others, expected=str(mine),
        )  # fmt: skip
