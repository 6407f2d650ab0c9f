"""`python -m bench.peers.fluid_written`: check that paddlepaddle 2.6.2 runs the models that Penstock writes.

Each of `written_models` is saved by Penstock, converted to `__model__` with a file for each parameter and with one for
all, and run by 2.6.2, which has to give what Penstock does. What 2.6.2 wrote itself (tests/io/fluid_saves.zip) is read,
written and run again. `--write` keeps what 2.6.2 gives as tests/io/written_models.npz, with which tests compare where
no peer is installed. Needs the peer `paddle` (`make peers`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import penstock as fluid
from bench.peers import ROOT, PeerMissing, environment
from bench.peers.fluid_models import LEVELS, OPERATORS
from bench.peers.fluid_saves import SAVES
from bench.peers.written_models import MODELS, fed, stored
from penstock.io.converting import Options, convert
from penstock.io.fluid.folders import MODEL
from penstock.io.fluid.models import read_model
from penstock.scope import Scope

GIVEN = ROOT / "tests" / "io" / "written_models.npz"
TOLERANCE = 1e-6
"""Of float32 results near 1: sums of some tens of products in another order."""


RESULTS: dict[str, list[str]] = {"network": ["network"], "operators": list(OPERATORS)}
"""Models of 2.6.2 that are written again, with names of their results, in order."""
NOT_WRITTEN = frozenset([
    "bmm", "bpr_loss", "cross_entropy", "diag_embed", "gather_nd", "huber_loss", "index_sample", "kldiv_loss",
    "multiplex", "rnn of GRU", "rnn of LSTM", "roll", "scatter", "scatter_nd_add", "sequence_concat",
    "sequence_enumerate", "sequence_pad", "sequence_reverse", "softmax_with_cross_entropy", "unfold",
])  # fmt: skip
"""Results of 2.6.2's operators that are recorded with calls for which no rule is there."""


def run_paddle(folder: Path) -> None:
    """Let 2.6.2 run each model in a folder. Raises PeerMissing, CalledProcessError."""
    command = [str(environment("paddle")), "-m", "bench.peers.paddle_models", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)


def given(folder: Path) -> dict[str, np.ndarray]:
    """Return what 2.6.2 made of a model: by name of what was fetched."""
    with np.load(folder / "fetched.npz") as found:
        return {name: found[name] for name in found.files}


def keep_feeds(folder: Path, names: Sequence[str]) -> None:
    """Write what a model is fed, with the lengths of sequences."""
    feeds: dict[str, Any] = {name: np.asarray(fed(name)) for name in names}
    feeds |= {
        f"{name}@{level}": np.array(lengths) for name in names for level, lengths in enumerate(LEVELS.get(name, ()))
    }
    np.savez(folder / "feeds.npz", **feeds)


def different(name: str, wanted: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> list[str]:
    """Say where results differ in sizes, dtype or by more than the tolerance."""
    lines = []
    for target, want in wanted.items():
        have = found[target]
        same = have.dtype == want.dtype and have.size == want.size
        if not same or not np.allclose(have.reshape(-1), want.reshape(-1), rtol=TOLERANCE, atol=TOLERANCE):
            lines.append(f"{name}: {target} is {have.dtype}{list(have.shape)}, {want.dtype}{list(want.shape)} here")
    return lines


def again(model: Path, folder: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Read a model that 2.6.2 wrote, save it with the results that can be written, and return those, by target.

    `names`: of its results, in their order; those of NOT_WRITTEN are left out.
    """
    scope, executor = Scope(), fluid.Executor(fluid.CPUPlace())
    with fluid.scope_guard(scope):
        program, feeds, fetches = fluid.io.load_inference_model(model, executor, params_filename="__params__")
        targets = [var.name for name, var in zip(names, fetches, strict=True) if name not in NOT_WRITTEN]
        fluid.io.save_inference_model(folder, feeds, targets, executor, program)
        found = executor.run(program, {name: fed(name) for name in feeds}, targets, return_numpy=False)
    return dict(zip(targets, map(np.asarray, found), strict=True))


def differences(folder: Path) -> tuple[list[str], dict[str, np.ndarray], int]:
    """Return what differs, what 2.6.2 gives by "model/target", and the number of targets that went round."""
    wanted: dict[str, dict[str, np.ndarray]] = {}
    for name in MODELS:
        one = stored(name, folder / "ours" / name)
        for suffix, filename in (("", None), (".combined", "__params__")):
            wanted[name + suffix] = dict(one.fetched)
            convert(one.folder, folder / "theirs" / (name + suffix), Options(filename=filename))
            keep_feeds(folder / "theirs" / (name + suffix), list(one.feeds))
    with zipfile.ZipFile(SAVES) as archive:
        archive.extractall(folder / "saves")
    for name, results in RESULTS.items():
        place = folder / "theirs" / f"written_again.{name}"
        wanted[place.name] = again(folder / "saves" / name, folder / "ours" / place.name, results)
        convert(folder / "ours" / place.name, place, Options())
        keep_feeds(place, read_model(place / MODEL).feeds)
    run_paddle(folder / "theirs")
    found = {name: given(folder / "theirs" / name) for name in wanted}
    lines = [line for name in wanted for line in different(name, wanted[name], found[name])]
    values = {f"{name}/{target}": value for name in MODELS for target, value in found[name].items()}
    return lines, values, sum(len(wanted[f"written_again.{name}"]) for name in RESULTS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, or write what 2.6.2 gives anew."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers.fluid_written", description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep what 2.6.2 gives for the tests")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        try:
            lines, values, count = differences(Path(name))
        except PeerMissing as error:
            print(error, file=sys.stderr)
            return 1
    print(
        "\n".join(lines) or f"2.6.2 runs {len(MODELS)} models of Penstock, and {count} results of its own models again"
    )
    if options.write and not lines:
        np.savez_compressed(GIVEN, **values)  # type: ignore[arg-type]  # the stubs take them for allow_pickle
        print(f"{GIVEN}: {GIVEN.stat().st_size} bytes")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
