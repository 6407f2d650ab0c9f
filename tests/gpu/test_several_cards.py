"""On two GPUs: replicas train as on CPU, hold equal parameters, and exchange over NCCL. Run where two are visible."""

from __future__ import annotations

import pytest
import torch
from tests.property.networks import conv_net, ctr_dnn
from tests.property.oracle import copy_of, started, value

from penstock.exec.data_parallel import DataParallel
from penstock.exec.devices import devices_of
from penstock.exec.memory import ReplicaMemory
from penstock.exec.places import cuda_places
from penstock.graph.passes import PLAIN, PassChoice
from penstock.graph.ssa import Mode
from penstock.native.collectives import fits_nccl

pytestmark = pytest.mark.gpu(cards=2)


@pytest.mark.parametrize("fuse_broadcast", [False, True])
@pytest.mark.parametrize("mode", ["all_reduce", "reduce"])
@pytest.mark.parametrize("make", [conv_net, lambda: ctr_dnn("adam")])
def test_two_cards_train_as_two_replicas_on_cpu(make: object, mode: Mode, fuse_broadcast: bool) -> None:
    network = make()  # type: ignore[operator]  # a factory
    start = started(network.startup)
    scopes = []
    choice = PassChoice(fuse_all_reduce=False, fuse_broadcast=fuse_broadcast)
    for devices in ((), devices_of(cuda_places([0, 1]))):
        scopes.append(copy_of(start))
        core = DataParallel(
            network.main, ReplicaMemory(scopes[-1], devices), mode=mode, num_replicas=2, loss_name=network.loss,
            choice=choice if devices else PLAIN,
        )  # fmt: skip
        try:
            for number, rows in enumerate((6, 7, 1, 6)):
                core.run(network.feed(rows, number), [network.loss])
            for parameter in network.main.parameters() if devices else ():
                variables = core.graph(2).variables
                copies = [core.memory.tensor(network.main, variables[f"{parameter.name}#{r}"]).cpu() for r in (0, 1)]
                assert torch.equal(*copies), parameter.name
        finally:
            core.close()
    for name in scopes[0].names():
        wanted, got = value(scopes[0], name).double(), value(scopes[1], name).cpu().double()
        assert float((wanted - got).abs().max()) <= 1e-4 * max(float(wanted.abs().max()), 1e-30), name


def test_exchanges_over_nccl_equal_those_by_copies() -> None:
    devices_of(cuda_places([0, 1]))
    tensors = [torch.randn(1000, device=f"cuda:{i}") for i in range(2)]
    assert fits_nccl(tensors)
    total = tensors[0].cpu() + tensors[1].cpu()
    for operator, wanted in (("all_reduce_", [total, total]), ("reduce_", [tensors[0].cpu(), total])):
        got = [t.clone() for t in tensors]
        getattr(torch.ops.penstock, operator)(got, *([1] if operator == "reduce_" else []))
        assert all(torch.allclose(g.cpu(), w) for g, w in zip(got, wanted, strict=True)), operator
    for root in (0, 1):
        source, target = tensors[root], torch.zeros(1000, device=f"cuda:{1 - root}")
        torch.ops.penstock.broadcast_([target], source)
        assert torch.equal(target.cpu(), source.cpu())


def test_rows_are_gathered_on_the_owners_card() -> None:
    parts = [torch.ones(2, 3, device="cuda:0"), torch.full((1, 3), 2.0, device="cuda:1")]
    gathered = torch.ops.penstock.gather_rows(parts, 1)
    assert gathered.device == torch.device("cuda", 1)
    assert gathered[:, 0].tolist() == [1.0, 1.0, 2.0]
