"""What trainers agree on before they exchange anything: settings without a group of processes."""

from __future__ import annotations

import pytest

import penstock as fluid
from penstock.distributed.collective import CollectiveProcess, check_met_so
from penstock.distributed.ranks import Ranks
from penstock.errors import SpecError
from penstock.exec.trainers import signature
from penstock.graph.across import Across
from penstock.graph.build import build_graph
from penstock.settings import COLLECTIVE_TRANSPORT


@pytest.mark.parametrize(("num_rings", "inter"), [(1, 0), (2, 4), (1, 4), (2, 0)])
def test_an_executor_accepts_the_settings_of_the_rendezvous(num_rings: int, inter: int) -> None:
    check_met_so(Ranks(0, 8, "127.0.0.1:1", num_rings=2, inter=4), num_rings, inter)


@pytest.mark.parametrize(
    ("num_rings", "inter", "name"), [(3, 0, "nccl_comm_num = 3"), (1, 2, "hierarchical_allreduce_inter_nranks = 2")]
)
def test_other_settings_are_refused_and_not_ignored(num_rings: int, inter: int, name: str) -> None:
    with pytest.raises(SpecError, match=f"BuildStrategy asks for {name}, but the trainers have met with"):
        check_met_so(Ranks(0, 8, "127.0.0.1:1", num_rings=2, inter=4), num_rings, inter)


def test_more_rings_than_waiting_threads_fail_before_rendezvous() -> None:
    with pytest.raises(SpecError, match="nccl_comm_num is 300; expected at most 64"):
        CollectiveProcess().form(Ranks(0, 2, "127.0.0.1:1", num_rings=300))


def test_an_unknown_transport_is_refused_before_anybody_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COLLECTIVE_TRANSPORT.name, "carrier pigeon")
    with pytest.raises(SpecError, match="'carrier pigeon'; expected one of auto, shared_memory, gloo"):
        CollectiveProcess().form(Ranks(0, 2, "127.0.0.1:1"))


def test_one_trainer_forms_no_group() -> None:
    process = CollectiveProcess()
    assert process.form(Ranks(0, 1, "127.0.0.1:1")) is None
    assert process.group is None


def signature_of(size: int) -> int:
    """Return what trainers of a layer of this size compare."""
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        loss = fluid.layers.mean(fluid.layers.fc(fluid.layers.data("x", [4]), size, name="layer"))
        fluid.optimizer.SGD(0.1).minimize(loss)
    graph = build_graph(main, mode="all_reduce", num_replicas=1, active=1, across=Across("ring", ("0",)))
    return signature(graph, main)


def test_trainers_compare_the_sizes_of_what_they_exchange() -> None:
    assert signature_of(3) == signature_of(3) != signature_of(5)
