"""The trainer's program: what stays, what is sent and pulled, in which order. Rows 53 to 55, 58, 69 of the table."""

from __future__ import annotations

import pytest
from tests.transpile.recorded import ENDPOINTS, Recorded, text_of, tower, transpiled, types

import penstock as fluid
from penstock.errors import ProgramError
from penstock.program import legality
from penstock.program.ir import Operator, Ref, Role
from penstock.program.kernels import check_writes
from penstock.ps.remote import PREFETCH
from penstock.transpiler import HashName

CASES: dict[str, tuple[dict[str, object], int, int]] = {
    "sync": ({}, 1, 2),
    "sync_whole": ({"slice_var_up": False}, 0, 1),
    "sync_hash_name": ({"split_method": HashName}, 1, 2),
    "async": ({"sync_mode": False}, 1, 2),
    "half_async": ({"sync_mode": False, "half_async": True}, 1, 2),
    "geo": ({"sync_mode": False, "geo_sgd_mode": True, "geo_sgd_need_push_nums": 20}, 0, 2),
}
REMOTE = {"send", "send_rows", "send_barrier", "recv", "fetch_barrier"}


def scheduled() -> object:
    """An optimizer with state, a schedule and decay: all of that is the servers'."""
    rate = fluid.layers.exponential_decay(0.1, 100, 0.5)
    return fluid.optimizer.Momentum(rate, 0.9, regularization=fluid.regularizer.L2Decay(1e-4))


def model() -> Recorded:
    return tower(scheduled, clip=fluid.clip.GradientClipByValue(0.5))


def placed(
    made: fluid.DistributeTranspiler, parameter: str
) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]:
    """What an operator says of a parameter's blocks: their names, the numbers of their servers, their rows."""
    blocks = made.placement.of_parameter(parameter)
    servers = tuple(ENDPOINTS.index(one.endpoint) for one in blocks)
    return tuple(one.name for one in blocks), servers, tuple(one.block.num_rows for one in blocks)


def by_parameter(program: fluid.Program, *kinds: str) -> dict[str, Operator]:
    """The one operator of these kinds for each parameter, in order."""
    found = [op for op in program.operators if op.type.split(".")[1] in kinds]
    assert len({op.role_vars[0][0] for op in found}) == len(found)
    return {op.role_vars[0][0]: op for op in found}


def maker(program: fluid.Program, name: str) -> Operator:
    found: Operator = next(op for op in program.operators if name in op.output_names())
    return found


@pytest.mark.parametrize("case", [case for case in CASES if case != "geo"])
def test_row_53_gradients_go_to_the_servers_of_their_blocks(case: str) -> None:
    settings, trainer, trainers = CASES[case]
    recorded = model()
    made = transpiled(recorded, trainer, trainers, **settings)
    main = made.get_trainer_program()
    assert main is recorded.main
    sends = by_parameter(main, "send", "send_rows")
    assert sends.keys() == set(made.placement.parameters())
    of_trainer = f".trainer_{trainer}" if case.startswith("sync") and trainers > 1 else ""
    for parameter, op in sends.items():
        names, servers, rows = placed(made, parameter)
        asked = (str(made.descriptor), parameter, names, servers)
        assert op.output_names() == (f"{parameter}@GRAD@SENT",)
        if parameter == "table":
            gradient = Ref("table@GRAD@ROWS"), Ref("table@GRAD@VALUES")
            assert op.args == (*gradient, *asked, rows)
        elif len(names) > 1:
            parts = tuple(f"{parameter}@GRAD.block{i}{of_trainer}" for i in range(len(names)))
            assert op.args == (tuple(map(Ref, parts)), *asked)
            cut = maker(main, parts[0])
            assert (cut.output_names(), cut.args[1]) == (parts, rows)
            assert maker(main, cut.input_names()[0]).type == "aten.clamp.default"  # clipped before it is cut
        else:
            clipped = maker(main, op.input_names()[0]).type == "aten.clamp.default"
            assert (op.args[1:], clipped) == (asked, parameter == "w")
    names, servers, rows = placed(made, "table")
    lookup = next(op for op in main.operators if op.type == PREFETCH)
    assert lookup.args[1:7] == (str(made.descriptor), "table", names, servers, rows, 16)


@pytest.mark.parametrize("case", [case for case in CASES if case != "geo"])
@pytest.mark.parametrize("program", ["main", "startup"])
def test_row_53_parameters_are_pulled_after_what_they_wait_for(case: str, program: str) -> None:
    settings, trainer, trainers = CASES[case]
    recorded = model()
    made = transpiled(recorded, trainer, trainers, **settings)
    of = recorded.main if program == "main" else recorded.startup
    pulls = by_parameter(of, "recv")
    assert list(pulls) == [name for name in made.placement.parameters() if name != "table"]
    is_sync, sent = case.startswith("sync"), "{}@GRAD@SENT"
    for parameter, op in pulls.items():
        names, servers, rows = placed(made, parameter)
        after = () if program == "startup" else ("@SEND_BARRIER@",) if is_sync else (sent.format(parameter),)
        assert op.args == (
            tuple(map(Ref, names)),
            tuple(map(Ref, after)),
            str(made.descriptor),
            parameter,
            names,
            servers,
        )
        assert (op.writes, {of.variables[name].storage for name in names}) == (names, {parameter})
        if len(names) > 1:
            assert maker(of, names[0]).args == (Ref(parameter), rows)
    barriers = [op for op in of.operators if op.type.endswith("_barrier.default")]
    received = tuple(f"{name}@RECEIVED" for name in pulls)
    every = tuple(sent.format(name) for name in made.placement.parameters())
    expected = [every] * (program == "main" and is_sync) + [received] * (program == "startup" or is_sync)
    assert [op.input_names() for op in barriers] == expected
    if expected:
        assert barriers[-1] is of.operators[-1]


@pytest.mark.parametrize("case", [case for case in CASES if case != "geo"])
def test_row_53_a_trainer_updates_nothing_itself(case: str) -> None:
    settings, trainer, trainers = CASES[case]
    before, recorded = model().main, model()
    transpiled(recorded, trainer, trainers, **settings)
    own = [op for op in recorded.main.operators if not op.role & (Role.RPC | Role.DIST) and op.type != PREFETCH]
    gone = {"penstock.lookup_table.default"}
    kept = [op.name for op in before.operators if op.role & (Role.FORWARD | Role.BACKWARD) and op.type not in gone]
    names = [op.name for op in own]
    assert [name for name in names if name in kept] == kept
    assert {op.type for op in own if op.name not in kept} == {"aten.clamp.default"}


def test_row_53_in_geo_a_parameter_is_exchanged_after_its_update() -> None:
    settings, trainer, trainers = CASES["geo"]
    recorded = model()
    made = transpiled(recorded, trainer, trainers, **settings)
    main = made.get_trainer_program()
    exchanges = by_parameter(main, "geo")
    assert list(exchanges) == made.placement.parameters()
    for parameter, op in exchanges.items():
        rows = Ref("table@GRAD@ROWS") if parameter == "table" else None
        names, servers, heights = placed(made, parameter)
        assert op.args == (Ref(parameter), rows, str(made.descriptor), parameter, names, servers, heights)
        assert op.writes == (parameter,)
        at = main.operators.index(op)
        writers = [i for i, other in enumerate(main.operators) if parameter in other.writes and other is not op]
        assert max(writers) < at
    assert list(by_parameter(recorded.startup, "recv")) == made.placement.parameters()


@pytest.mark.parametrize("case", CASES)
def test_programs_of_all_processes_are_legal_and_read_back_equal(case: str) -> None:
    settings, trainer, trainers = CASES[case]
    recorded = model()
    made = transpiled(recorded, trainer, trainers, **settings)
    programs = [recorded.main, recorded.startup]
    for endpoint in ENDPOINTS:
        programs += made.get_pserver_programs(endpoint)
    for program in programs:
        legality.check(program)
        check_writes(program)
        assert fluid.Program.parse(str(program)) == program


def test_row_54_one_script_gives_the_program_of_each_role() -> None:
    made = transpiled(model(), 0, 2)
    assert types(made.get_trainer_program())[-1] == "fetch_barrier"
    assert types(made.get_pserver_program(ENDPOINTS[0]))[0] == "listen_and_serv"


def test_row_55_a_server_program_is_the_same_for_every_trainer() -> None:
    texts = set()
    for trainer in range(2):
        made = transpiled(model(), trainer, 2)
        program = made.get_pserver_program(ENDPOINTS[1])
        texts.add(text_of(program) + text_of(made.get_startup_program(ENDPOINTS[1], program)))
    assert len(texts) == 1


def test_row_58_training_is_synchronous_by_default() -> None:
    assert transpiled(model()).descriptor.mode == "sync"
    made = transpiled(model(), sync_mode=False)
    assert made.descriptor.mode == "async"
    assert not {"send_barrier", "fetch_barrier"} & set(types(made.get_trainer_program()))


def test_an_asynchronous_pull_waits_for_its_own_send_alone() -> None:
    program = transpiled(model(), sync_mode=False).get_trainer_program()
    pulls = [op for op in program.operators if op.type.startswith("penstock.recv")]
    assert pulls
    for op in pulls:
        assert {n for n in op.input_names() if n.endswith("@SENT")} == {f"{op.role_vars[0][1]}@SENT"}


def test_every_gradient_leaves_right_after_it_is_made() -> None:
    program = transpiled(model()).get_trainer_program()
    sends = [i for i, op in enumerate(program.operators) if op.type.split(".")[1] in ("send", "send_rows")]
    assert len(sends) == 7
    for at in sends:
        before = program.operators[at - 1]
        assert set(before.output_names()) & set(program.operators[at].input_names())


@pytest.mark.parametrize("how", ["argument", "config"])
def test_row_69_whole_variables_are_neither_cut_nor_joined(how: str) -> None:
    recorded = model()
    if how == "argument":
        made = transpiled(recorded, slice_var_up=False)
    else:
        config = fluid.DistributeTranspilerConfig()
        config.slice_var_up = False
        made = fluid.DistributeTranspiler(config)
        made.transpile(0, recorded.main, ",".join(ENDPOINTS), 1, startup_program=recorded.startup)
    assert not any("split" in t or "cat" in t for t in types(recorded.main))
    assert all(p.block.whole for p in made.placement.blocks)


def test_a_copy_for_test_only_looks_up_on_the_servers() -> None:
    program = transpiled(model()).get_trainer_program().clone(for_test=True)
    assert "prefetch" in types(program)
    assert not REMOTE & set(types(program))
    legality.check(program)


def test_a_trainer_creates_no_tables_and_no_server_state() -> None:
    recorded = model()
    transpiled(recorded)
    assert "table" not in recorded.startup.variables
    kept = {v.name for v in recorded.main.variables.values() if v.persistable}
    assert kept == {"table", "w", "out", "fc_0.b_0", "fc_1.b_0", "fc_2.w_0", "fc_2.b_0"}
    assert recorded.main.variables["table"].distributed
    assert not any("momentum" in n for n in recorded.startup.variables)


def test_in_geo_mode_a_trainer_trains_by_itself() -> None:
    recorded = model()
    before = text_of(recorded.main)
    program = transpiled(recorded, sync_mode=False, geo_sgd_mode=True).get_trainer_program()
    kept = fluid.Program.parse(str(program))
    kept.operators[:] = [op for op in kept.operators if not op.role & Role.RPC]
    for name in [n for n in kept.variables if n.endswith("@EXCHANGED")]:
        del kept.variables[name]
    assert text_of(kept) == before
    exchanged = [op.role_vars[0][0] for op in program.operators if op.role & Role.RPC]
    assert sorted(exchanged) == sorted(v.name for v in program.parameters())


def test_a_clipped_sparse_gradient_is_refused() -> None:
    recorded = tower(lambda: fluid.optimizer.SGD(0.1, grad_clip=fluid.clip.GradientClipByGlobalNorm(1.0)))
    before = str(recorded.main)
    with pytest.raises(ProgramError, match=r"clips the sparse gradient of table 'table'.*param_list"):
        transpiled(recorded)
    assert str(recorded.main) == before


def test_dense_gradients_are_clipped_by_global_norm_before_send() -> None:
    clip = fluid.clip.GradientClipByGlobalNorm(1.0)
    recorded = tower(lambda: fluid.optimizer.SGD(0.1, grad_clip=clip), is_sparse=False)
    program = transpiled(recorded).get_trainer_program()
    sends = [op for op in program.operators if op.type == "penstock.send.default"]
    assert len(sends) == 7
    raw = {f"{p.name}@GRAD" for p in program.parameters()}
    assert not raw & {program.variables[n].storage for op in sends for n in op.input_names()}


def test_a_table_that_is_used_other_than_by_lookups_is_refused() -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        ids = fluid.layers.data("ids", [1], dtype="int64")
        rows = fluid.layers.embedding(ids, [100, 8], is_sparse=True, param_attr="table")
        loss = fluid.layers.mean(rows)
        fluid.layers.reduce_sum(main.global_block().var("table").detach())
        fluid.optimizer.SGD(0.1).minimize(loss)
    with pytest.raises(ProgramError, match=r"uses table 'table', whose rows are on parameter servers"):
        fluid.DistributeTranspiler().transpile(0, main, ENDPOINTS[0], 1, startup_program=startup)
