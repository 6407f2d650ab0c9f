"""The program of one server as text, against the algorithm of spec 3.3 done by hand, and what it must not be."""

from __future__ import annotations

import re
from typing import Any

import pytest

import penstock as fluid
from penstock.errors import SpecError
from penstock.program import legality
from penstock.program.kernels import check_writes
from penstock.program.memory_optimize import releases
from penstock.transpile.config import DistributeTranspilerConfig
from penstock.transpile.partition import Partition
from penstock.transpile.placement import place
from penstock.transpile.pserver import describe, pserver_program, pserver_startup

ENDPOINTS = ["ps0:1", "ps1:2"]

# w [128, 200] has 25600 elements: two blocks of 64 rows. b [200] is below 2 * 8192: whole, on the first server again.
SYNC = """\
program version=1 seed=4 symbols=[]
var exponential_decay_0.learning_rate : float32[] persistable
var @LR_DECAY_COUNTER@ : int64[] persistable
var to_copy_0.tmp_0 : float64[]
var div_0.tmp_0 : float64[]
var pow_0.tmp_0 : float64[]
var mul_0.tmp_0 : float64[]
var w.block1 : float32[64, 200] persistable parameter
var momentum_0.velocity.w.block1 : float32[64, 200] persistable
var w@GRAD.block1 : float32[64, 200] feed
var mul_N.tmp_0.block1 : float32[64, 200]
var add_N.tmp_0.block1 : float32[64, 200]
var mul_N.tmp_0.block1 : float32[64, 200]
op listen_and_serv_0 penstock.listen_and_serv.default("ps1:2", ["ps0:1", "ps1:2"], 2, "sync", ["w.block1:2"], ["w"], \
[64], 1) -> none role=RPC
op add_0 aten.add_.Tensor(%@LR_DECAY_COUNTER@, 1) -> none writes=[@LR_DECAY_COUNTER@] role=LR_SCHED block=1
op to_copy_0 aten._to_copy.default(%@LR_DECAY_COUNTER@, dtype=dtype:float64) -> %to_copy_0.tmp_0 role=LR_SCHED block=1
op div_0 aten.div.Tensor(%to_copy_0.tmp_0, 10) -> %div_0.tmp_0 role=LR_SCHED block=1
op pow_0 aten.pow.Scalar(0.5, %div_0.tmp_0) -> %pow_0.tmp_0 role=LR_SCHED block=1
op mul_0 aten.mul.Tensor(%pow_0.tmp_0, 0.1) -> %mul_0.tmp_0 role=LR_SCHED block=1
op copy_0 aten.copy_.default(%exponential_decay_0.learning_rate, %mul_0.tmp_0) -> none \
writes=[exponential_decay_0.learning_rate] role=LR_SCHED block=1
op mul_N.block1 aten.mul.Tensor(%w.block1, 0.25) -> %mul_N.tmp_0.block1 role=OPTIMIZE of=[w.block1, w@GRAD.block1] \
block=2
op add_N.block1 aten.add.Tensor(%w@GRAD.block1, %mul_N.tmp_0.block1) -> %add_N.tmp_0.block1 role=OPTIMIZE \
of=[w.block1, w@GRAD.block1] block=2
op mul_N.block1 aten.mul_.Tensor(%momentum_0.velocity.w.block1, 0.5) -> none writes=[momentum_0.velocity.w.block1] \
role=OPTIMIZE of=[w.block1, w@GRAD.block1] block=2
op add_N.block1 aten.add_.Tensor(%momentum_0.velocity.w.block1, %add_N.tmp_0.block1) -> none \
writes=[momentum_0.velocity.w.block1] role=OPTIMIZE of=[w.block1, w@GRAD.block1] block=2
op mul_N.block1 aten.mul.Tensor(%momentum_0.velocity.w.block1, %exponential_decay_0.learning_rate) -> \
%mul_N.tmp_0.block1 role=OPTIMIZE of=[w.block1, w@GRAD.block1] block=2
op sub_N.block1 aten.sub_.Tensor(%w.block1, %mul_N.tmp_0.block1) -> none writes=[w.block1] role=OPTIMIZE \
of=[w.block1, w@GRAD.block1] block=2
"""

STARTUP = """\
program version=1 seed=4 symbols=[]
var w : float32[128, 200]
var w.block1@VIEW : float32[64, 200] view=w
var w.block1 : float32[64, 200] persistable parameter
var momentum_0.velocity.w.block1 : float32[64, 200] persistable
var exponential_decay_0.learning_rate : float32[] persistable
var @LR_DECAY_COUNTER@ : int64[] persistable
op uniform_N penstock.uniform.default([128, 200], -0.5, 0.5, (seed * 1000003) + 1, dtype:float32) -> %w role=FORWARD
op slice.w.block1 aten.slice.Tensor(%w, 0, 64, 128) -> %w.block1@VIEW role=FORWARD
op clone.w.block1 aten.clone.default(%w.block1@VIEW) -> %w.block1 role=FORWARD
op full_N aten.full.default([64, 200], 0.0, dtype=dtype:float32) -> %momentum_0.velocity.w.block1 role=FORWARD
op full_N aten.full.default([], 0.0, dtype=dtype:float32) -> %exponential_decay_0.learning_rate role=FORWARD
op full_N aten.full.default([], -1, dtype=dtype:int64) -> %@LR_DECAY_COUNTER@ role=FORWARD
"""


def minimised() -> tuple[Any, Any]:
    """Return (main, startup) of one layer, trained by momentum with a schedule and decay."""
    main, startup = fluid.Program(), fluid.Program()
    startup.random_seed = 4
    with fluid.program_guard(main, startup):
        L: Any = fluid.layers
        x, y = fluid.data("x", [-1, 128]), fluid.data("y", [-1, 200])
        weight = fluid.ParamAttr("w", initializer=fluid.initializer.Uniform(-0.5, 0.5))
        loss = L.mean(L.square_error_cost(L.fc(x, 200, param_attr=weight, bias_attr="b"), y))
        rate = L.exponential_decay(0.1, 10, 0.5)
        fluid.optimizer.Momentum(rate, 0.5, regularization=fluid.regularizer.L2Decay(0.25)).minimize(loss)
    return main, startup


def server(endpoint: str, mode: Any = "sync", endpoints: list[str] = ENDPOINTS, **more: Any) -> tuple[Any, Any]:
    """Return (program, startup program) of a server."""
    main, startup = minimised()
    partition = Partition(main)
    placement = place(partition, endpoints, DistributeTranspilerConfig())
    program = pserver_program(partition, placement, endpoint, startup=startup, mode=mode, num_trainers=2, **more)
    return program, pserver_startup(program, startup)


def told(program: Any) -> str:
    """The text without lines of this file and name scopes; numbers of a layer's operators are the recorder's affair."""
    text = re.sub(r' (at|module)="[^"]*"', "", str(program))
    text = re.sub(r"\baten_", "", text)
    text = re.sub(r"\b(mul|add|sub)_\d+(?=\.block1|\.tmp_0\.block1)", r"\1_N", text)
    return re.sub(r"\b(full|uniform)_\d+", r"\1_N", text)


def test_the_sync_program_is_a_round_block_and_updates_by_block() -> None:
    program, startup = server("ps1:2")
    assert told(program) == SYNC
    assert told(startup) == STARTUP


def test_the_async_program_begins_each_update_with_its_counters() -> None:
    program, _ = server("ps0:1", "async")
    said = describe(program)
    assert said is not None
    assert [(s.name, s.parameter, s.first_row, s.block) for s in said.served] == [
        ("w.block0", "w", 0, 1), ("b", "b", 0, 2),
    ]  # fmt: skip
    assert (said.mode, said.round_block, said.index, said.fanin) == ("async", 0, 0, 2)
    schedule = ["add_0", "to_copy_0", "div_0", "aten_pow_0", "aten_mul_0", "copy_0"]
    for number, owner in ((1, "w.block0"), (2, "b")):
        ops = program.block(number).ops
        assert [op.name for op in ops[:6]] == [f"{name}@{owner}" for name in schedule]
        assert ops[0].writes == (f"@LR_DECAY_COUNTER@@{owner}",)
        assert any(f"exponential_decay_0.learning_rate@{owner}" in op.input_arg_names for op in ops[6:])
    shared = {n for op in program.block(1).ops for n in op.writes} & {
        n for op in program.block(2).ops for n in op.writes
    }
    assert not shared


@pytest.mark.parametrize("mode", ["sync", "half_async", "async", "geo"])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_programs_are_legal_and_travel_as_text(endpoint: str, mode: Any) -> None:
    for program in server(endpoint, mode):
        legality.check(program)
        check_writes(program)
        assert fluid.Program.parse(str(program)) == program
        assert not [v for v in program.variables.values() if v.persistable and v.shape == (128, 200)]


def test_the_startup_keeps_one_whole_parameter_at_a_time() -> None:
    _, startup = server("ps1:2")
    over = dict(zip((op.name for op in startup.operators), releases(startup, []), strict=True))
    assert over["slice.w.block1"] == ("w",)  # of which a view is left, until it is copied
    assert over["clone.w.block1"] == ("w.block1@VIEW",)


def test_delay_compensation_comes_before_regulariser_and_update() -> None:
    program, _ = server("ps1:2", "async", dc_asgd=True)
    assert program.variables["w.block1@PULLED"].feed
    names = [op.name for op in program.block(1).ops if op.module == "dc_asgd"]
    assert names == [f"{n}.w.block1" for n in ("delay", "square", "change", "compensated")]
    readers = [op.name for op in program.block(1).ops if "w@GRAD.block1" in op.input_arg_names]
    assert readers == ["square.w.block1", "compensated.w.block1"]


def test_delay_compensation_is_for_async_alone() -> None:
    with pytest.raises(SpecError, match="enable_dc_asgd"):
        server("ps1:2", "sync", dc_asgd=True)


def test_an_endpoint_that_is_no_server_is_refused() -> None:
    with pytest.raises(SpecError, match="ps7:1"):
        server("ps7:1")


def test_a_server_without_blocks_serves_none_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    endpoints = ["a:1", "b:1", "c:1", "d:1", "e:1", "empty:1"]
    for _ in range(2):
        program, startup = server("empty:1", "async", endpoints=endpoints)
        assert [op.block for op in program.operators] == [0]
        assert not startup.operators
    assert caplog.text.count("server empty:1 gets no parameter block") == 1
