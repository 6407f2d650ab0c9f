"""Parts of parameter servers in a checkpoint: one of each server, all of one save, which its trainers restore too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from penstock.errors import PeerError, UserError
from penstock.io.checkpoints.layout import Place
from penstock.io.checkpoints.reading import StoredCheckpoint
from penstock.io.saves.files import digest_of, flush
from penstock.io.saves.manifest import ServersPart, StoredFile
from penstock.ps.durability.server_snapshots import finished_cut
from penstock.ps.settings import Copy
from penstock.ps.wire import Origin


def parts(folder: Path, servers: ServersPart) -> list[Path]:
    """Return where each server's part lies in the folder of a checkpoint, by the server's number."""
    count = servers.num_servers
    return [folder / servers.folder / f"{index}-of-{count}" for index in range(count)]


def copy_of(found: StoredCheckpoint | None) -> Copy:
    """Return what a checkpoint, or none, is called between trainers and servers."""
    if found is None or found.record.servers is None:
        return Copy()
    record = found.record
    return Copy(PurePosixPath(found.record.servers.folder).name, Place(record.attempt, record.step).name)


def files_of(folder: Path, servers: ServersPart) -> list[StoredFile]:
    """Return the files of all parts. Reads them, for their digests.

    Raises PeerError unless every server has finished its part, and in sync mode all parts are of one round.
    """
    found: list[StoredFile] = []
    rounds: dict[int, int] = {}  # server -> round
    for index, part in enumerate(parts(folder, servers)):
        try:
            cut = finished_cut(part)
        except PeerError as error:
            raise PeerError(
                f"server {index} of {servers.num_servers} has not finished its part of the checkpoint: {error}. Do all "
                "servers reach the folder of the checkpoints, by the same path?"
            ) from error
        if cut.index != index:
            raise PeerError(f"{part} was written by server {cut.index}: which servers does each trainer name?")
        if cut.mode == "sync":
            rounds[index] = cut.round
        files = sorted(path for path in part.iterdir() if path.is_file())
        found += [StoredFile(p.relative_to(folder).as_posix(), p.stat().st_size, digest_of(p)) for p in files]
    flush((folder / servers.folder).parent)  # the names in between; servers have brought their own to the disk
    if len(set(rounds.values())) > 1:
        said = ", ".join(f"server {index} after round {number}" for index, number in rounds.items())
        raise PeerError(f"the servers' parts are not of one step: {said}. Was one of them started again without state?")
    return found


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
