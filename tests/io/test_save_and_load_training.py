"""A training that is saved, loaded elsewhere and continued equals one that was never interrupted, to the bit."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.property.networks import Network, conv_net, ctr_dnn, fit_a_line
from tests.property.oracle import copy_of, intra_op_threads, same_bits, started, value
from tests.support.nursery import Forked, Nursery

import penstock as fluid
from penstock.errors import UserError
from penstock.scope import Scope

NETWORKS: dict[str, Callable[[], Network]] = {"ctr_dnn": ctr_dnn, "conv_net": lambda: conv_net("adam")}


def train(network: Network, scope: Scope, batches: range) -> None:
    exe = fluid.Executor(fluid.CPUPlace())
    with intra_op_threads(1):
        for number in batches:
            exe.run(network.main, network.feed(6, number), [network.loss], scope=scope)


def assert_same(got: Scope, wanted: Scope, network: Network) -> None:
    names = [v.name for v in network.main.variables.values() if v.persistable]
    assert names
    for name in names:
        assert same_bits(value(got, name), value(wanted, name)), name


@pytest.mark.parametrize("name", NETWORKS)
def test_a_continued_training_equals_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    network = NETWORKS[name]()
    whole = started(network.startup)
    saved = copy_of(whole)
    train(network, whole, range(6))
    train(network, saved, range(3))
    fluid.io.save_persistables(fluid.Executor(), tmp_path, network.main, scope=saved)

    again, scope = NETWORKS[name](), Scope()  # recorded anew, and never started
    fluid.io.load_persistables(fluid.Executor(), tmp_path, again.main, scope=scope)
    train(again, scope, range(3, 6))
    assert_same(scope, whole, network)


CONTINUE = """
import sys
import penstock as fluid
from tests.io.test_save_and_load_training import train
from tests.property.networks import ctr_dnn
network = ctr_dnn()
fluid.load(network.main, sys.argv[1])
train(network, fluid.global_scope(), range(2, 4))
fluid.save(network.main, sys.argv[1])
"""


def test_another_process_continues_a_training(nursery: Nursery, tmp_path: Path) -> None:
    network = ctr_dnn()
    whole = started(network.startup)
    train(network, whole, range(2))
    fluid.save(network.main, tmp_path / "model", scope=whole)
    process = Forked(nursery, tmp_path / "process", ["-c", CONTINUE, str(tmp_path / "model")], {})
    try:
        assert process.end() == 0, process.errors
    finally:
        process.close()
    train(network, whole, range(2, 4))
    scope = Scope()
    fluid.load(network.main, tmp_path / "model", scope=scope)
    assert_same(scope, whole, network)


def test_a_program_without_a_seed_keeps_the_one_that_it_drew(tmp_path: Path) -> None:
    network = ctr_dnn()
    network.main.random_seed = 0
    whole = started(network.startup)
    train(network, whole, range(1))
    fluid.save(network.main, tmp_path / "model", scope=whole)
    again, scope = ctr_dnn(), Scope()
    again.main.random_seed = 0
    fluid.load(again.main, tmp_path / "model", scope=scope)
    train(network, whole, range(1, 3))
    train(again, scope, range(1, 3))
    assert_same(scope, whole, network)


@pytest.mark.parametrize("mode", list(fluid.BuildStrategy.ReduceStrategy))
def test_replicas_follow_a_load(mode: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    network = conv_net("adam")
    build = fluid.BuildStrategy()
    build.reduce_strategy = mode
    scope = started(network.startup)
    with fluid.scope_guard(scope):
        engine = fluid.ParallelExecutor(False, network.loss, network.main, build_strategy=build, scope=scope)
        try:
            engine.run([network.loss], network.feed(6, 0))
            fluid.io.save_persistables(engine, tmp_path, network.main)
            first = engine.run([network.loss], network.feed(6, 1))[0]
            after = copy_of(scope)
            engine.run([network.loss], network.feed(6, 2))
            fluid.io.load_persistables(engine, tmp_path, network.main)
            second = engine.run([network.loss], network.feed(6, 1))[0]
        finally:
            engine.close()
    assert first.shape == (2,)
    assert first.tobytes() == second.tobytes()
    assert_same(scope, after, network)


def test_parameters_load_from_a_save_of_all_persistables(tmp_path: Path) -> None:
    network = fit_a_line("adam")
    scope, exe = started(network.startup), fluid.Executor()
    train(network, scope, range(2))
    fluid.io.save_persistables(exe, tmp_path, network.main, scope=scope)
    other = started(network.startup)
    moments = {n: value(other, n).clone() for n in other.names() if "moment" in n}
    fluid.io.load_params(exe, tmp_path, network.main, scope=other)
    for var in network.main.parameters():
        assert same_bits(value(other, var.name), value(scope, var.name))
    assert moments
    assert all(same_bits(value(other, name), moment) for name, moment in moments.items())


def test_saves_of_two_names_live_in_one_folder(tmp_path: Path) -> None:
    network = fit_a_line()
    scope, exe = started(network.startup), fluid.Executor()
    before = copy_of(scope)
    fluid.io.save_params(exe, tmp_path, network.main, filename="first", scope=scope)
    train(network, scope, range(1))
    for _ in range(2):
        fluid.io.save_params(exe, tmp_path, network.main, filename="second", scope=scope)
    other = Scope()
    fluid.io.load_params(exe, tmp_path, network.main, filename="first", scope=other)
    assert all(same_bits(value(other, v.name), value(before, v.name)) for v in network.main.parameters())
    assert len(list(tmp_path.iterdir())) == 4


def test_no_other_save_comes_between_the_files_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network, replace, refused = fit_a_line(), os.replace, []

    def replace_alone(source: Path, target: Path) -> None:
        descriptor = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
        refused.append(target.suffix)
        replace(source, target)

    scope, exe = started(network.startup), fluid.Executor()
    monkeypatch.setattr(os, "replace", replace_alone)
    for _ in range(2):
        fluid.io.save_persistables(exe, tmp_path, network.main, scope=scope)
    assert refused == [".safetensors", ".json"] * 2


def test_chosen_variables_are_saved_by_name_and_by_predicate(tmp_path: Path) -> None:
    network = fit_a_line()
    scope, exe = started(network.startup), fluid.Executor()
    weight, bias = (v.name for v in network.main.parameters())
    fluid.io.save_vars(exe, tmp_path, network.main, vars=[weight], filename="w", scope=scope)
    fluid.io.save_vars(exe, tmp_path, network.main, predicate=lambda v: v.name == bias, filename="b", scope=scope)
    other = Scope()
    fluid.io.load_vars(exe, tmp_path, network.main, vars=[weight], filename="w", scope=other)
    assert other.names() == [weight]
    fluid.io.load_vars(exe, tmp_path, network.main, predicate=lambda v: v.name == bias, filename="b", scope=other)
    assert sorted(other.names()) == sorted([weight, bias])


def test_captured_values_are_saved_before_any_run(tmp_path: Path) -> None:
    network = conv_net()
    names = list(network.main.captured)
    assert any("running_mean" in name for name in names)
    fluid.io.save_vars(None, tmp_path, network.main, vars=names, scope=Scope())
    scope = Scope()
    fluid.io.load_vars(None, tmp_path, network.main, vars=names, scope=scope)
    for name, wanted in network.main.captured.items():
        assert same_bits(value(scope, name), wanted)


def test_what_has_no_value_or_lives_for_one_step_is_refused(tmp_path: Path) -> None:
    network = fit_a_line()
    with pytest.raises(UserError, match=r"fc_0\.w_0.*has no value to save.*startup"):
        fluid.io.save_params(fluid.Executor(), tmp_path / "new", network.main, scope=Scope())
    assert not (tmp_path / "new").exists()
    with pytest.raises(UserError, match="lives for one step"):
        fluid.io.save_vars(fluid.Executor(), tmp_path, network.main, vars=[network.loss], scope=Scope())
    with pytest.raises(UserError, match="without folders"):
        fluid.io.save_params(fluid.Executor(), tmp_path, network.main, "../out", scope=started(network.startup))


def test_a_dtype_that_the_format_lacks_leaves_the_previous_save(tmp_path: Path) -> None:
    network = fit_a_line()
    scope = started(network.startup)
    fluid.io.save_params(None, tmp_path, network.main, scope=scope)
    before = sorted(tmp_path.iterdir())
    scope.set("fc_0.w_0", torch.zeros(13, 1, dtype=torch.complex128))
    with pytest.raises(UserError, match=r"cannot be written.*complex128"):
        fluid.io.save_params(None, tmp_path, network.main, scope=scope)
    assert sorted(tmp_path.iterdir()) == before
    fluid.io.load_params(None, tmp_path, network.main, scope=scope)
    assert value(scope, "fc_0.w_0").dtype == torch.float32
