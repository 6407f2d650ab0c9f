"""DistributeTranspiler's arguments and settings: what is taken, what is refused, and by which words."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.transpile.recorded import ENDPOINTS, SERVERS, Recorded, tower, transpiled

import penstock as fluid
from penstock.errors import ProgramError, SpecError
from penstock.program.ir import Operator, VarDesc
from penstock.transpile.dispatch import PSDispatcher
from penstock.transpile.pserver import describe
from penstock.transpiler import HashName, RoundRobin
from penstock.transpiler.distribute_transpiler import DistributeTranspilerConfig

DEFAULTS = {
    "slice_var_up": True, "split_method": RoundRobin, "min_block_size": 8192, "enable_dc_asgd": False,
    "mode": "pserver", "collective_mode": None, "print_log": False, "wait_port": True, "sync_mode": True,
    "runtime_split_send_recv": False, "half_async": False, "completely_not_async": False, "geo_sgd_mode": False,
    "geo_sgd_need_push_nums": 100, "nccl_comm_num": 1, "use_hierarchical_allreduce": False,
    "hierarchical_allreduce_inter_nranks": 0, "wire_dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Recorded:
    """A program that tests only try to distribute."""
    return tower()


def config(**fields: Any) -> DistributeTranspilerConfig:
    made = DistributeTranspilerConfig()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_the_fields_have_the_documented_defaults() -> None:
    made = DistributeTranspilerConfig()
    assert {name: getattr(made, name) for name in DEFAULTS} == DEFAULTS
    assert set(DEFAULTS) == set(DistributeTranspilerConfig._defaults)


def test_fluid_has_the_names_of_the_documents() -> None:
    assert fluid.DistributeTranspilerConfig is DistributeTranspilerConfig
    assert fluid.transpiler.HashName is HashName
    assert fluid.transpiler.RoundRobin is RoundRobin


def test_a_transpiler_for_geo_needs_no_setting_of_the_mode() -> None:
    given = config(geo_sgd_need_push_nums=7)
    for settings, every in ((given, 7), (None, 100)):
        model, made = tower(), fluid.transpiler.GeoSgdTranspiler(settings)
        made.transpile(1, model.main, SERVERS, 2, startup_program=model.startup)
        assert (made.descriptor.mode, made.descriptor.push_every) == ("geo", every)
        served = describe(made.get_pserver_program(ENDPOINTS[0]))
        assert served is not None
        assert served.mode == "geo"
    assert not given.geo_sgd_mode, "the config is the caller's"
    with pytest.raises(SpecError, match="expected a DistributeTranspilerConfig"):
        fluid.transpiler.GeoSgdTranspiler({})  # type: ignore[arg-type]  # refused here


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("slice_var_upp", True, r"no field 'slice_var_upp' \(did you mean 'slice_var_up'"),
        ("slice_var_up", 1, "slice_var_up is 1; expected bool"),
        ("min_block_size", 8191, "min_block_size is 8191"),
        ("min_block_size", "8192", "expected int"),
        ("split_method", RoundRobin(["a:1"]), "the class, no instance"),
        ("split_method", dict, "expected a subclass of PSDispatcher"),
        ("mode", "nccl", "expected one of pserver, nccl2, collective"),
        ("collective_mode", "ring", "expected one of grad_allreduce, local_sgd, single_process_multi_thread"),
        ("geo_sgd_need_push_nums", 0, "expected int from 1 on"),
        ("sync_mode", None, "sync_mode is None; expected True or False"),
        ("runtime_split_send_recv", None, "runtime_split_send_recv is None; expected True or False"),
    ],
)
def test_what_a_field_cannot_be_is_refused_by_name(field: str, value: object, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        setattr(DistributeTranspilerConfig(), field, value)


def test_merging_at_runtime_excludes_synchronous_training() -> None:
    with pytest.raises(SpecError, match="runtime_split_send_recv = True while sync_mode is True"):
        config(runtime_split_send_recv=True)
    merging = config(sync_mode=False, runtime_split_send_recv=True)
    with pytest.raises(SpecError, match="sync_mode = True while runtime_split_send_recv is True"):
        merging.sync_mode = True


def test_a_copy_has_the_same_fields_and_is_another_one() -> None:
    made = config(sync_mode=False, half_async=True, split_method=HashName)
    copied = copy.deepcopy(made)
    assert (copied.sync_mode, copied.half_async, copied.split_method) == (False, True, HashName)
    copied.half_async = False
    assert made.half_async


@pytest.mark.parametrize(
    ("fields", "sync_mode", "mode"),
    [
        ({}, True, "sync"),
        ({}, False, "async"),
        ({"sync_mode": False}, True, "async"),
        ({"half_async": True}, False, "half_async"),
        ({"sync_mode": False, "runtime_split_send_recv": True}, True, "async"),
        ({"sync_mode": False, "runtime_split_send_recv": True, "half_async": True}, True, "half_async"),
        ({"sync_mode": False, "half_async": True, "completely_not_async": True}, True, "sync"),
        ({"geo_sgd_mode": True}, False, "geo"),
        ({"enable_dc_asgd": True}, False, "async"),
    ],
)
def test_settings_and_argument_together_choose_the_mode(fields: dict[str, Any], sync_mode: bool, mode: str) -> None:
    assert transpiled(tower(width=8), **_without_sync(fields), **_sync(fields, sync_mode)).descriptor.mode == mode


def _without_sync(fields: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in fields.items() if k not in ("sync_mode", "runtime_split_send_recv")}


def _sync(fields: dict[str, Any], sync_mode: bool) -> dict[str, Any]:
    """`sync_mode` of the config, or of the call: each is enough."""
    return {"sync_mode": sync_mode and fields.get("sync_mode", True)}


def test_sync_mode_of_the_config_is_enough() -> None:
    recorded = tower(width=8)
    made = fluid.DistributeTranspiler(config(sync_mode=False, runtime_split_send_recv=True))
    made.transpile(0, recorded.main, SERVERS, 1, startup_program=recorded.startup)
    assert made.descriptor.mode == "async"


@pytest.mark.parametrize(
    ("fields", "arguments", "words"),
    [
        ({}, {"trainer_id": 2}, "trainer_id is 2, but there are 2 trainers; expected a number from 0 to 1"),
        ({}, {"trainer_id": -1}, "trainer_id is -1"),
        ({}, {"trainers": 0}, "trainers is 0; expected a number from 1 on"),
        ({}, {"trainers": "10.0.0.1:1,10.0.0.2:1"}, "collective training"),
        ({}, {"pservers": "10.0.0.1:1,10.0.0.1:1"}, "'10.0.0.1:1' is listed twice"),
        ({}, {"pservers": "10.0.0.1"}, "pservers: '10.0.0.1' is no host:port"),
        ({}, {"pservers": ["10.0.0.1:1"]}, "expected text"),
        ({}, {"pservers": "10.0.0.1:65536"}, "'10.0.0.1:65536' is no host:port with a port from 1 to 65535"),
        ({}, {"pservers": "10.0.0.1:1,"}, "'' is no host:port"),
        ({}, {"trainers": True}, "trainers is True; expected a number from 1 on"),
        ({}, {"program": "main"}, "program is given a str; expected a fluid.Program"),
        ({}, {"startup_program": []}, "startup_program is given a list; expected a fluid.Program"),
        ({}, {"sync_mode": None}, "sync_mode is None"),
        ({"geo_sgd_mode": True}, {}, "geo_sgd_mode is True, but training is synchronous"),
        ({"enable_dc_asgd": True}, {}, "enable_dc_asgd is True, but training is synchronous"),
        ({"enable_dc_asgd": True, "half_async": True}, {"sync_mode": False}, "plain asynchronous training"),
        ({"mode": "nccl2"}, {}, "trainers is 2; with mode 'nccl2' it is the endpoints of all trainers"),
        (
            {"mode": "collective", "collective_mode": "local_sgd"},
            {},
            "trainers is 2; with mode 'collective' it is the endpoints",
        ),
    ],
)
def test_what_cannot_be_distributed_fails_without_a_change(
    model: Recorded, fields: dict[str, Any], arguments: dict[str, Any], words: str
) -> None:
    before = str(model.main), str(model.startup)
    programs = {"program": model.main, "startup_program": model.startup}
    call: dict[str, Any] = {"trainer_id": 0, "pservers": SERVERS, "trainers": 2, **programs, **arguments}
    with pytest.raises(SpecError, match=words):
        fluid.DistributeTranspiler(config(**fields)).transpile(**call)
    assert (str(model.main), str(model.startup)) == before


def test_an_endpoint_that_is_no_server_is_named_with_those_known() -> None:
    made = transpiled(tower(width=8))
    for ask in (made.get_pserver_program, made.get_startup_program):
        with pytest.raises(SpecError, match=f"'10.0.0.9:6170' is no parameter server.*{', '.join(ENDPOINTS)}"):
            ask("10.0.0.9:6170")


def test_a_startup_program_needs_its_own_servers_program() -> None:
    made = transpiled(tower(width=8))
    other = made.get_pserver_program(ENDPOINTS[1])
    with pytest.raises(SpecError, match=rf"{ENDPOINTS[0]}.*is given the program of the server at '{ENDPOINTS[1]}'"):
        made.get_startup_program(ENDPOINTS[0], other)


class Zeros:
    """An initialiser of the user's."""

    def operator(self, var: VarDesc, startup: fluid.Program) -> Operator:
        return Operator(startup.unique_operator("zeros"), "aten.zeros.default", (var.shape,), (var.name,))


@pytest.mark.parametrize(
    ("optimizer", "first", "words"),
    [
        (lambda: fluid.optimizer.LarsMomentum(0.1, 0.9), fluid.initializer.Xavier(), "takes all rows together"),
        (lambda: fluid.optimizer.SGD(0.1), Zeros(), "begins with aten.zeros.default"),
    ],
    ids=["an update of the whole table", "first values that are neither drawn nor constant"],
)
def test_a_table_that_no_server_can_hold_fails_in_every_process(
    optimizer: Callable[[], Any], first: Any, words: str
) -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        ids, attr = fluid.layers.data("ids", [1], dtype="int64"), fluid.ParamAttr("table", initializer=first)
        rows: Any = fluid.layers.embedding(ids, [100, 2], is_sparse=True, is_distributed=True, param_attr=attr)
        optimizer().minimize(fluid.layers.mean(rows))
    before = str(main), str(startup)
    with pytest.raises(ProgramError, match=f"distributed table 'table'.*{words}"):
        fluid.DistributeTranspiler().transpile(0, main, SERVERS, 1, startup_program=startup)
    assert (str(main), str(startup)) == before


def test_a_program_without_updates_is_refused() -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        fluid.layers.fc(fluid.layers.data("x", [4]), 2)
    with pytest.raises(ProgramError, match=r"Call optimizer\.minimize\(loss\) before transpile"):
        fluid.DistributeTranspiler().transpile(0, main, SERVERS, 1, startup_program=startup)


def test_the_startup_program_of_another_program_is_refused(model: Recorded) -> None:
    before = str(model.main)
    with pytest.raises(ProgramError, match="'table' is not initialised by the startup program"):
        fluid.DistributeTranspiler().transpile(0, model.main, SERVERS, 1, startup_program=fluid.Program())
    assert str(model.main) == before


def test_nothing_is_distributed_twice() -> None:
    recorded = tower(width=8)
    made = transpiled(recorded)
    with pytest.raises(SpecError, match="has distributed a program already"):
        made.transpile(0, tower(width=8).main, SERVERS)
    with pytest.raises(ProgramError, match="was transpiled before"):
        transpiled(recorded)


def test_asking_before_transpile_is_refused() -> None:
    with pytest.raises(SpecError, match="call transpile"):
        fluid.DistributeTranspiler().get_trainer_program()


def test_the_default_programs_are_distributed_if_none_are_given() -> None:
    recorded = tower(width=8)
    made = fluid.DistributeTranspiler()
    with fluid.program_guard(recorded.main, recorded.startup):
        made.transpile(0, pservers=SERVERS)
    assert made.get_trainer_program() is recorded.main
    assert made.get_startup_program(ENDPOINTS[0], startup_program=recorded.startup) == made.get_startup_program(
        ENDPOINTS[0]
    )


def test_row_67_a_class_of_the_users_places_the_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    class Last(PSDispatcher):
        def dispatch(self, varlist: Sequence[Any]) -> list[str]:
            return [self.eps[-1]] * len(varlist)

    made = transpiled(tower(width=8), split_method=Last, print_log=True)
    assert made.placement.on(ENDPOINTS[0]) == []
    said = capsys.readouterr().err
    assert f"penstock: server {ENDPOINTS[0]} has nothing" in said
    assert f"penstock: server {ENDPOINTS[1]} has table.block0 (16000), table.block1 (16000)" in said
