"""Train a small model by DistributedDataParallel, each rank on its rows; rank 0 prints the parameters."""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train(model: torch.nn.Module, rows: slice, *, steps: int = 5) -> list[float]:
    """Return the parameters after some steps of SGD on some rows of the data."""
    draw = torch.Generator().manual_seed(3)
    x, y = (torch.randn(8, n, generator=draw, dtype=torch.float64) for n in (4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        loss = torch.nn.functional.mse_loss(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if "PENSTOCK_TELEMETRY_SOCKET" in os.environ:
            from penstock import telemetry

            telemetry.log(loss=loss.item(), step=step)
    return [v for p in model.parameters() for v in p.detach().flatten().tolist()]


def model() -> torch.nn.Module:
    """Return the model with the same first parameters everywhere."""
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = slice(8 // size * rank, 8 // size * (rank + 1))
    found = train(DistributedDataParallel(model()), mine)
    if rank == 0:
        print(json.dumps(found))
    dist.barrier()  # Gloo may abort a process whose peer has closed its connection first
    dist.destroy_process_group()
    # DDP keeps Gloo's workers alive. One that lets go of the barrier late takes the interpreter's lock, and aborts a
    # process whose interpreter ends (pytorch/pytorch#179291): this one ends without the interpreter's end.
    if "PENSTOCK_TELEMETRY_SOCKET" in os.environ:
        from penstock import telemetry

        telemetry.close()
    sys.stdout.flush()
    os._exit(0)
