"""A damaged, truncated or foreign save is an error that says what is wrong, and changes nothing in the scope."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.property.networks import Network, fit_a_line
from tests.property.oracle import copy_of, same_bits, started, value
from tests.support.nursery import Forked, Nursery

import penstock as fluid
from penstock.errors import UserError
from penstock.io.saves.manifest import Manifest, StoredFile, StoredVariable, parse, render
from penstock.scope import Scope


class Save:
    """A save of a small network beside a scope with other values."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.network = folder, fit_a_line("adam")
        scope = started(self.network.startup)
        fluid.io.save_persistables(None, folder, self.network.main, scope=scope)
        self.scope = copy_of(scope)
        for name in self.scope.names():
            self.scope.set(name, value(self.scope, name) + 1)

    @property
    def files(self) -> list[Path]:
        """Manifest and values."""
        return sorted(self.folder.iterdir())

    def refused(self, match: str | None = None, network: Network | None = None) -> UserError:
        """Load and return the error; the scope must be as before."""
        before, revision, steps = copy_of(self.scope), self.scope.revision, self.scope.steps(self.network.main)
        with pytest.raises(UserError, match=match) as raised:
            fluid.io.load_persistables(None, self.folder, (network or self.network).main, scope=self.scope)
        assert self.scope.revision == revision
        assert self.scope.steps(self.network.main) == steps
        assert all(same_bits(value(self.scope, n), value(before, n)) for n in before.names())
        return raised.value


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    return Save(tmp_path_factory.mktemp("save"))


def test_every_truncation_is_refused(save: Save) -> None:
    assert len(save.files) == 2
    for path in save.files:
        whole = path.read_bytes()
        try:
            for length in range(0, len(whole), 3):
                path.write_bytes(whole[:length])
                assert path.name in str(save.refused())
            path.write_bytes(whole[:-1])
            save.refused()
            path.write_bytes(whole + b"\0")
            save.refused()
        finally:
            path.write_bytes(whole)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(which=st.integers(0, 1), position=st.integers(0, 1 << 16), bit=st.integers(0, 7))
def test_every_flipped_bit_is_refused_or_harmless(save: Save, which: int, position: int, bit: int) -> None:
    path = save.files[which]
    whole = path.read_bytes()
    broken = bytearray(whole)
    broken[position % len(whole)] ^= 1 << bit
    if path.suffix == ".json" and _same_content(bytes(broken), whole):
        return  # white space of JSON
    try:
        path.write_bytes(broken)
        save.refused(re.escape(path.name))
    finally:
        path.write_bytes(whole)


def _same_content(left: bytes, right: bytes) -> bool:
    try:
        return bool(json.loads(left) == json.loads(right))
    except ValueError:
        return False


def test_a_missing_file_is_named(save: Save, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none/variables\.json cannot be read: No such file"):
        fluid.io.load_persistables(None, tmp_path / "none", save.network.main, scope=save.scope)
    values = next(p for p in save.files if p.suffix == ".safetensors")
    moved = values.rename(tmp_path / "elsewhere")
    try:
        save.refused(re.escape(values.name))
    finally:
        moved.rename(values)


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": "onnx"}', "\x80", "penstock"])
def test_a_foreign_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "variables.json").write_text(text)
    with pytest.raises(UserError, match=r"variables\.json"):
        fluid.io.load_persistables(None, tmp_path, fit_a_line().main, scope=Scope())


def test_a_later_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has version 2; this Penstock reads version 1"):
        parse('{"format": "penstock-save", "version": 2}', "m.json")


def _with(program_shape: list[int], dtype: str = "float32") -> Network:
    return fit_a_line("sgd", dtype) if program_shape == [13, 1] else _wide(program_shape)


def _wide(shape: list[int]) -> Network:
    network = fit_a_line("sgd")
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[shape[0]])
        loss = fluid.layers.mean(fluid.layers.fc(x, shape[1]))
    return Network("wide", main, startup, loss.name, network.feed)


def test_another_shape_names_variable_got_and_expected(save: Save) -> None:
    error = save.refused(r"'fc_0\.w_0' is float32\[13, 1\].*expects float32\[13, 2\]", _with([13, 2]))
    assert (error.variable, error.got, error.expected) == ("fc_0.w_0", "float32[13, 1]", "float32[13, 2]")
    assert error.file.endswith("variables.json")


def test_another_dtype_is_refused(save: Save) -> None:
    save.refused(r"'fc_0\.w_0' is float32\[13, 1\].*expects float64\[13, 1\]", _with([13, 1], "float64"))


def test_a_missing_variable_is_named(tmp_path: Path) -> None:
    network = fit_a_line("adam")
    fluid.io.save_params(None, tmp_path, network.main, scope=started(network.startup))
    scope = Scope()
    with pytest.raises(UserError, match=r"has no variable 'adam_0.*created at networks.py:\d+.*It holds 'fc_0"):
        fluid.io.load_persistables(None, tmp_path, network.main, scope=scope)
    assert not scope.names()


def test_a_manifest_that_says_otherwise_than_its_file_is_refused(tmp_path: Path) -> None:
    from penstock.io.saves.files import read_tensors  # the check behind the digests, which only a wrong writer reaches

    path = tmp_path / "values.safetensors"
    safetensors.torch.save_file({"w": torch.zeros(2)}, path)
    with pytest.raises(UserError, match=r"variable 'w' is float32\[2\], but the manifest says float32\[3\]"):
        read_tensors(path, {"w": StoredVariable("w", "float32", (3,))})
    with pytest.raises(UserError, match="variable 'b' is nothing"):
        read_tensors(path, {"b": StoredVariable("b", "float32", (3,))})


@pytest.mark.parametrize("name", ["../secrets", "/etc/passwd", "a\\b", "..", ""])
def test_a_manifest_names_files_of_its_own_folder_alone(name: str) -> None:
    text = render(Manifest(StoredFile(name, 1, "0" * 64), ()))
    with pytest.raises(UserError, match="expected a name in its own folder"):
        parse(text, "m.json")


KILLED = """
import os, signal, sys
import torch
import penstock as fluid
from tests.property.networks import fit_a_line
from tests.property.oracle import started

network = fit_a_line("adam")
scope = started(network.startup)

def save(value):
    for name in scope.names():
        scope.set(name, torch.full_like(scope.find(name), value))
    fluid.io.save_persistables(None, sys.argv[1], network.main, scope=scope)

def dying(call, state):
    def wrapped(*args, **kwargs):
        if state[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        state[0] -= 1
        return call(*args, **kwargs)
    return wrapped

save(1.0)
for point in range(100):
    child = os.fork()
    if child == 0:
        state = [point]
        for name in ("open", "fsync", "replace", "unlink", "scandir", "listdir"):
            setattr(os, name, dying(getattr(os, name), state))
        save(2.0 + point)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    other = fluid.Scope()
    fluid.io.load_persistables(None, sys.argv[1], network.main, scope=other)
    values = {float(v) for n in other.names() for v in other.find(n).unique()}
    print(point, os.waitstatus_to_exitcode(status), sorted(values), flush=True)
    if status == 0:
        break
"""


def test_a_save_that_is_killed_anywhere_leaves_a_whole_one(nursery: Nursery, tmp_path: Path) -> None:
    """At each call that a save makes of the system in turn, the process dies; a load finds the old save or the new."""
    folder = tmp_path / "saved"
    process = Forked(nursery, tmp_path / "process", ["-c", KILLED, str(folder)], {})
    try:
        assert process.end() == 0, process.errors
    finally:
        process.close()
    lines = [line.split(maxsplit=2) for line in process.output.splitlines()]
    assert len(lines) >= 8, process.output
    previous = 1.0
    for point, status, values in lines:
        found = json.loads(values)
        assert found in ([previous], [2.0 + int(point)]), f"killed at call {point}: {values}"
        assert status == ("0" if point == lines[-1][0] else "-9")
        previous = found[0]
    assert previous == 2.0 + int(lines[-1][0])
    assert len(list(folder.iterdir())) == 2, os.listdir(folder)
