"""Row 52 of the specification: the manual's comparison of its two kinds of communication, row by row, as it is here.

docs/collective.md has the table; each row is held to what programs of the two kinds are made of, and do.
"""

from __future__ import annotations

import pytest

import penstock as fluid
from penstock.distributed.collective import GEN_ID
from penstock.errors import PenstockError, SpecError
from penstock.graph.across import BEGINS, GATHERS, SUMS, Across
from penstock.graph.build import build_graph
from penstock.graph.ssa import Graph
from penstock.program.program import Program
from penstock.ps.remote import REMOTE_TYPES

TRAINERS = "127.0.0.1:6170,127.0.0.1:6171"


def recorded(*, distributed: bool = False) -> tuple[Program, Program, str]:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        ids = fluid.layers.data(name="ids", shape=[1], dtype="int64")
        rows = fluid.layers.embedding(
            input=ids, size=[100, 4], is_sparse=True, is_distributed=distributed, param_attr=fluid.ParamAttr(name="t")
        )
        loss = fluid.layers.mean(fluid.layers.fc(input=rows.reshape(-1, 4), size=2))
        fluid.optimizer.SGD(0.1).minimize(loss)
    return main, startup, loss.name


def collective(*, sync_mode: bool = True) -> tuple[Program, Program]:
    main, startup, _ = recorded()
    config = fluid.DistributeTranspilerConfig()
    config.mode = "nccl2"
    made = fluid.DistributeTranspiler(config=config)
    made.transpile(
        0, program=main, startup_program=startup, trainers=TRAINERS, current_endpoint="127.0.0.1:6170",
        sync_mode=sync_mode,
    )  # fmt: skip
    return main, startup


def with_servers(*, distributed: bool = False, sync_mode: bool = True) -> tuple[Program, Program]:
    """Return the programs of a trainer, and of the first of two servers."""
    main, startup, _ = recorded(distributed=distributed)
    made = fluid.DistributeTranspiler()
    made.transpile(0, program=main, startup_program=startup, pservers=TRAINERS, trainers=2, sync_mode=sync_mode)
    return made.get_trainer_program(), made.get_pserver_program("127.0.0.1:6170")


def exchanged(main: Program) -> Graph:
    return build_graph(main, num_replicas=1, active=1, mode="all_reduce", across=Across("ring", ("ring",)))


def test_row_52_collective_trainers_exchange_without_servers() -> None:
    main, startup = collective()
    assert not any(op.type in REMOTE_TYPES for op in (*main.operators, *startup.operators))
    assert [op.type for op in startup.operators].count(GEN_ID) == 1
    types = [handle.op.type for handle in exchanged(main).handles]
    assert sum(t in SUMS | GATHERS for t in types) == len(main.parameters())
    trainer, server = with_servers()
    assert any(op.type in REMOTE_TYPES for op in trainer.operators)
    assert not any(op.type in SUMS | GATHERS | BEGINS for op in (*trainer.operators, *server.operators))


def test_row_52_only_training_with_servers_can_be_asynchronous() -> None:
    with pytest.raises(SpecError, match="collective training is synchronous"):
        collective(sync_mode=False)
    for sync_mode in (True, False):
        _, server = with_servers(sync_mode=sync_mode)
        serves = server.operators[0]
        assert serves.type == "penstock.listen_and_serv.default"
        assert serves.args[3] == ("sync" if sync_mode else "async")


def test_row_52_tables_are_on_servers_only_or_whole_on_each_rank() -> None:
    trainer, server = with_servers(distributed=True)
    assert trainer.variables["t"].distributed
    assert "t" in server.variables
    main, _ = collective()
    assert not main.variables["t"].distributed
    assert main.variables["t"].shape == (100, 4)
    _, startup, _ = recorded(distributed=True)
    with pytest.raises(PenstockError, match="DistributeTranspiler"):
        fluid.Executor(fluid.CPUPlace()).run(startup)


def test_row_52_gradients_cross_once_in_collective_else_twice() -> None:
    main, _ = collective()
    handles = exchanged(main).handles
    assert sum(h.op.type in SUMS | GATHERS for h in handles) == len(main.parameters())
    trainer, _ = with_servers()
    kinds = [op.type.split(".")[1] for op in trainer.operators if op.type in REMOTE_TYPES]
    dense = len(main.parameters()) - 1  # all but the table
    assert kinds.count("send") == kinds.count("recv") == dense
    assert {"send_barrier", "fetch_barrier"} <= set(kinds)
