"""Exchange through torch.distributed: ranks on several hosts (Gloo), or with GPUs (NCCL).

The operators `group_*` call it. A gradient bucket travels as one flat tensor. Gloo cannot be cancelled, so a waiting
exchange polls every tenth of a millisecond whether a rank has been lost. A hierarchical exchange sums within groups
of `inter` ranks, then among their first ranks, then hands the result back.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, but torch does not list it

from penstock.compat.torch import abort_group, set_group_timeout
from penstock.distributed import interfaces
from penstock.distributed.exchange_ops import ENDED, HAS_ENDED, exchangers
from penstock.distributed.ranks import Ranks
from penstock.distributed.rendezvous import Rendezvous
from penstock.errors import SpecError, Unavailable

_GPU = torch.device("cuda")
_LOOK_S = 1e-4
_TIMEOUT = timedelta(minutes=30)  # ours is the failure detector
_pause = threading.Event()  # never set


class ProcessGroups:
    """One process group for each ring, and two more where the exchange is hierarchical."""

    kind = "group"

    def __init__(self, meeting: Rendezvous, label: str, backend: str) -> None:
        self._ranks = ranks = meeting.ranks
        self._why = ""
        if backend == "gloo":
            interfaces.choose_for_gloo(
                ranks.endpoints[ranks.rank].rpartition(":")[0] if ranks.endpoints else "localhost"
            )
        if dist.is_initialized():
            _check_default(ranks)
        timeout = timedelta(seconds=meeting.left_s())  # a rank that ends now would be waited for
        try:
            self._made_default = not dist.is_initialized()
            if self._made_default:
                store = PrefixStore("torch", meeting.store)
                dist.init_process_group(
                    backend, store=store, rank=ranks.rank, world_size=ranks.num_ranks, timeout=timeout
                )
            all_ranks = list(range(ranks.num_ranks))
            self._groups = [dist.new_group(all_ranks, timeout=timeout, backend=backend) for _ in range(ranks.num_rings)]
            self._levels = [_levels(ranks, backend, timeout) for _ in range(ranks.num_rings)] if ranks.inter else []
        except (RuntimeError, ValueError) as error:
            raise Unavailable(f"the trainers cannot connect by {backend}: {str(error).splitlines()[0]}") from error
        for group in self.groups():
            set_group_timeout(group, _TIMEOUT)  # from now on exchanges may take any time
        self.names = [f"{label}.{number}" for number in range(ranks.num_rings)]
        for number, name in enumerate(self.names):
            exchangers.register(name, self, number)

    def groups(self) -> list[Any]:
        """Return all groups that this rank is in."""
        made = [*self._groups, *(group for pair in self._levels for group in pair)]
        return [group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER]

    # -- what the operators call -----------------------------------------------------------------------

    def step(self, mine: Tensor, ring: int) -> Tensor:
        """See `Exchanger.step`. Raises RuntimeError naming a rank that begins a step of another program."""
        step = self._all(mine, ring)
        for rank in range(self._ranks.num_ranks):
            if step[rank, ENDED] != HAS_ENDED and not torch.equal(step[rank, ENDED:], mine[ENDED:]):
                raise RuntimeError(
                    f"rank {rank} begins a step of another program: its parameters, or their order, differ from those "
                    f"of rank {self._ranks.rank}"
                )
        return step

    def all_reduce(self, tensors: list[Tensor], replicas: int, step: Tensor, ring: int, *, mean: bool) -> None:
        """See `Exchanger.all_reduce`."""
        sums = [_summed(tensors[at : at + replicas]) for at in range(0, len(tensors), replicas)]
        weight = self._weight(step, mean=mean)
        flat = torch.cat([s.reshape(-1) for s in sums])
        flat = torch.zeros_like(flat) if weight == 0 else flat.mul_(weight)
        self._reduce(flat, ring)
        for position, part in enumerate(torch.split(flat, [s.numel() for s in sums])):
            for tensor in tensors[position * replicas : (position + 1) * replicas]:
                tensor.copy_(part.view(tensor.shape))

    def gather(self, rows: Tensor, values: Tensor, step: Tensor, ring: int, *, mean: bool) -> tuple[Tensor, Tensor]:
        """See `Exchanger.gather`."""
        counts = [int(n) for n in self._all(torch.tensor([len(rows)]), ring)]
        weighted = values * self._weight(step, mean=mean)
        return self._all_rows(rows, counts, ring), self._all_rows(weighted, counts, ring)

    # -- what a job calls between steps ----------------------------------------------------------------

    def meet(self, mine: Tensor, ring: int = 0) -> Tensor:
        """Return what every rank gave, int64[ranks, n]."""
        return self._all(mine, ring)

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Copy rank 0's tensors to every rank."""
        for tensor in tensors:
            self._wait(dist.broadcast(tensor, src=0, group=self._groups[0], async_op=True))

    def fail(self, why: str) -> None:
        """End whatever waits in an exchange with this message. Any thread."""
        self._why = why

    def close(self) -> None:
        """End the groups, after the last exchange of all ranks.

        A worker of Gloo lets go of an exchange after its end has been seen, and takes the interpreter's lock to do so;
        in an interpreter that ends it would abort the process. What ends a group waits for its workers.
        """
        for name in self.names:
            exchangers.forget(name)
        if dist.is_initialized():  # else the script has destroyed them all
            for group in self.groups():
                with contextlib.suppress(ValueError):  # or this one
                    dist.destroy_process_group(group)
            if self._made_default:
                dist.destroy_process_group()
        self._groups, self._levels = [], []

    # -- parts -------------------------------------------------------------------------------------------

    def _weight(self, step: Tensor, *, mean: bool) -> float:
        mine, total = int(step[self._ranks.rank, 0]), int(step[:, 0].sum())
        return mine / total if mean and total else float(mine > 0)

    def _all(self, mine: Tensor, ring: int) -> Tensor:
        out = [torch.empty_like(mine) for _ in range(self._ranks.num_ranks)]
        self._wait(dist.all_gather(out, mine, group=self._groups[ring], async_op=True))
        return torch.stack(out)

    def _all_rows(self, mine: Tensor, counts: Sequence[int], ring: int) -> Tensor:
        """Ranks have different numbers of rows: each gives as many as the one with the most."""
        padded = mine.new_zeros((max(counts), *mine.shape[1:]))
        padded[: len(mine)] = mine
        out = [torch.empty_like(padded) for _ in counts]
        self._wait(dist.all_gather(out, padded, group=self._groups[ring], async_op=True))
        return torch.cat([part[:n] for part, n in zip(out, counts, strict=True)])

    def _reduce(self, flat: Tensor, ring: int) -> None:
        if not self._levels:
            self._wait(dist.all_reduce(flat, group=self._groups[ring], async_op=True))
            return
        inner, leaders = self._levels[ring]
        first = self._ranks.rank - self._ranks.rank % self._ranks.inter
        self._wait(dist.all_reduce(flat, group=inner, async_op=True))
        if first == self._ranks.rank:
            self._wait(dist.all_reduce(flat, group=leaders, async_op=True))
        self._wait(dist.broadcast(flat, src=first, group=inner, async_op=True))

    def _wait(self, work: Any) -> None:
        while not self._why and not work.is_completed():
            _pause.wait(_LOOK_S)
        if self._why:
            raise Unavailable(self._why)
        try:
            work.wait()
        except RuntimeError as error:
            raise Unavailable(f"the exchange failed: {str(error).splitlines()[0]}") from error


def _summed(replicas: Sequence[Tensor]) -> Tensor:
    total = replicas[0].clone() if len(replicas) > 1 else replicas[0]
    for other in replicas[1:]:
        total += other
    return total


def _check_default(ranks: Ranks) -> None:
    """Raise SpecError if the script has made torch's default group of other ranks: new groups count by it."""
    found = dist.get_rank(), dist.get_world_size()
    if found != (ranks.rank, ranks.num_ranks):
        raise SpecError(
            f"this process is rank {found[0]} of {found[1]} for torch.distributed, but "
            f"{ranks.name(ranks.rank)} of {ranks.num_ranks} here; give both the same numbers"
        )


def _levels(ranks: Ranks, backend: str, timeout: timedelta) -> tuple[Any, Any]:
    """This rank's inner group and the group of first ranks. Every rank makes every group, in the same order."""
    mine = None
    for first in range(0, ranks.num_ranks, ranks.inter):
        group = dist.new_group(list(range(first, first + ranks.inter)), timeout=timeout, backend=backend)
        if first <= ranks.rank < first + ranks.inter:
            mine = group
    leaders = dist.new_group(list(range(0, ranks.num_ranks, ranks.inter)), timeout=timeout, backend=backend)
    return mine, leaders


class OnCpu(Protocol):
    """What the trainers have met by."""

    def meet(self, mine: Tensor, ring: int = 0) -> Tensor: ...

    def broadcast(self, tensors: list[Tensor]) -> None: ...


class NcclGroups(ProcessGroups):
    """NCCL groups of the trainers, one GPU each. All make them at once. Raises SpecError without a GPU, Unavailable.

    Numbers that the processor needs (what a step is, counts of rows) are met through what the trainers have on CPU,
    shared memory or Gloo. NCCL's work is enqueued behind the current stream, and the processor does not wait for it;
    `fail` aborts it, so that a GPU does not wait for a rank that is lost. NCCL's own variables are neither read nor
    written here. Has not been run on a GPU so far: docs/gpu.md.
    """

    def __init__(self, meeting: Rendezvous, label: str, on_cpu: OnCpu) -> None:
        if not torch.cuda.is_available():
            raise SpecError("trainers with GPUs: torch sees no GPU here; use use_cuda=False", got="no GPU")
        self._on_cpu = on_cpu
        super().__init__(meeting, label, "nccl")

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Copy rank 0's tensors to every rank, wherever they lie."""
        here = [tensor.cpu() for tensor in tensors]
        self._on_cpu.broadcast(here)
        for tensor, copy in zip(tensors, here, strict=True):
            if tensor is not copy:  # `cpu()` of what lies there already is the tensor itself
                tensor.copy_(copy)

    def fail(self, why: str) -> None:
        """End what waits on a GPU, now and later. Any thread."""
        super().fail(why)
        for group in self.groups():
            abort_group(group, _GPU)

    def _all(self, mine: Tensor, ring: int) -> Tensor:
        return self._on_cpu.meet(mine, ring)

    def _wait(self, work: Any) -> None:
        if self._why:
            raise Unavailable(self._why)
        work.wait()  # the current stream waits
