"""What `transpile` does to programs that are trained by collectives, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

import penstock as fluid
from penstock.errors import ProgramError, SpecError
from penstock.program.program import Program

TRAINERS = "10.0.0.1:6170,10.0.0.2:6170"


def recorded() -> tuple[Program, Program]:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[4], dtype="float32")
        fluid.optimizer.SGD(0.1).minimize(fluid.layers.mean(fluid.layers.fc(input=x, size=2)))
    return main, startup


def transpile(main: Program, startup: Program, *, mode: str = "nccl2", kind: str | None = None, **more: Any) -> Any:
    config = fluid.DistributeTranspilerConfig()
    config.mode, config.collective_mode = mode, kind
    for name in ("nccl_comm_num", "half_async"):
        if name in more:
            setattr(config, name, more.pop(name))
    made = fluid.DistributeTranspiler(config=config)
    given = {"trainer_id": 1, "trainers": TRAINERS, "current_endpoint": "10.0.0.2:6170", **more}
    made.transpile(program=main, startup_program=startup, **given)
    return made


def test_row_72_nccl2_adds_only_a_rendezvous_to_startup() -> None:
    main, startup = recorded()
    before, made = str(main), [op.name for op in startup.operators]
    transpiler = transpile(main, startup, nccl_comm_num=2)
    assert str(main) == before
    assert [op.name for op in startup.operators] == [*made, "gen_nccl_id"]
    assert startup.operators[-1].output_names() == ("NCCLID", "NCCLID_1")
    assert startup.operators[-1].args == (1, ("10.0.0.1:6170", "10.0.0.2:6170"), 2, 0)
    assert Program.parse(str(startup)).operators == startup.operators
    assert transpiler.get_trainer_program() is main


def test_mode_collective_marks_the_main_program_but_no_clone() -> None:
    main, startup = recorded()
    transpile(main, startup, mode="collective", kind="grad_allreduce")
    assert main.operators[0].name == "collective"
    assert "collective" not in [op.name for op in main.clone(for_test=True).operators]
    assert Program.parse(str(main)).operators == main.operators


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sync_mode": False}, "sync_mode=False with mode 'nccl2': collective training is synchronous"),
        ({"half_async": True}, "half_async with mode 'nccl2': collective training is synchronous"),
        ({"current_endpoint": "10.0.0.3:6170"}, "current_endpoint is '10.0.0.3:6170', which is none of the trainers"),
        ({"current_endpoint": "10.0.0.1:6170"}, "trainer_id is 1, whose endpoint is 10.0.0.2:6170, but"),
        ({"trainer_id": 2}, "trainer_id is 2, but trainers names 2; expected 0 to 1"),
        ({"trainers": 2}, "trainers is 2; with mode 'nccl2' it is the endpoints"),
        ({"trainers": "10.0.0.2"}, "trainers: '10.0.0.2' is no host:port"),
        ({"mode": "collective"}, "collective_mode is None; mode 'collective' takes 'grad_allreduce' or 'local_sgd'"),
    ],
)
def test_rows_73_and_75_unsupported_modes_fail_without_a_change(arguments: dict[str, Any], words: str) -> None:
    main, startup = recorded()
    before = str(main), str(startup)
    with pytest.raises(SpecError, match=words):
        transpile(main, startup, **arguments)
    assert (str(main), str(startup)) == before


@pytest.mark.parametrize("mode", ["nccl2", "collective"])
def test_a_distributed_table_is_refused_by_name_without_a_change(mode: str) -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        ids = fluid.layers.data(name="ids", shape=[1], dtype="int64")
        rows = fluid.layers.embedding(ids, [10, 2], is_sparse=True, is_distributed=True, param_attr="table")
        fluid.optimizer.SGD(0.1).minimize(fluid.layers.mean(rows))
    before = str(main), str(startup)
    with pytest.raises(ProgramError, match=f"table 'table' .* is distributed, .* and mode '{mode}' has none"):
        transpile(main, startup, mode=mode, kind="grad_allreduce")
    assert (str(main), str(startup)) == before


def test_row_82_a_setting_that_rendezvous_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth77")
    main, startup = recorded()
    transpile(main, startup)
    with pytest.raises(
        SpecError, match=r"^NCCL_SOCKET_IFNAME asks for the network interface 'eth77', but this machine"
    ):
        fluid.Executor(fluid.CPUPlace()).run(startup, scope=fluid.Scope())
