"""Feeds on their way to the cards: what a plan was fed on the CPU is replaced by tensors of its replicas' GPUs.

The feeds of a replica travel as one block, by one asynchronous copy from locked memory: a copy for each input costs as
much as the operators of a small model (28 inputs of CTR-DNN). The block goes over the bus on a stream of its own, while
the step before computes, to one of two landing places in turn; from there the compute stream copies it, at the speed of
the card's memory, to where a plan's feeds lie in every step, as a CUDA graph wants them. Inputs whose rows differ from
step to step within one plan (ragged ones) are copied one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.native.engine import TorchPlan

_ALIGNED = 256  # bytes, as cudaMalloc aligns
_PINNED_BYTES = 64 << 10  # smaller inputs that travel alone are copied as they are: locking a page costs more


class FeedBlock:
    """The feeds of one replica in one block on its device; on CPU, for tests, without locked memory and streams."""

    def __init__(self, like: Sequence[torch.Tensor], device: torch.device) -> None:
        self._like = [(t.shape, t.dtype) for t in like]
        starts, total = [], 0
        for tensor in like:
            starts.append(total)
            total += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        on_card = device.type == "cuda"
        self._block = torch.empty(total, dtype=torch.uint8, device=device)
        self.tensors = self._parts(self._block, starts)
        self._host = [torch.empty(total, dtype=torch.uint8, pin_memory=on_card) for _ in range(2)]
        self._given = [self._parts(host, starts) for host in self._host]
        self._bus = _Bus(total, device) if on_card else None
        self._turn = 0

    def _parts(self, block: torch.Tensor, starts: Sequence[int]) -> list[torch.Tensor]:
        found = []
        for (shape, dtype), start in zip(self._like, starts, strict=True):
            size = shape.numel() * dtype.itemsize
            found.append(block[start : start + size].view(dtype).view(shape))
        return found

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these have the shapes and dtypes of the block."""
        return self._like == [(t.shape, t.dtype) for t in tensors]

    def send(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the block's tensors with these values, once the device comes to it. `tensors`: of any device."""
        self._turn = turn = 1 - self._turn
        if self._bus is not None:
            self._bus.wait(turn)
        for part, tensor in zip(self._given[turn], tensors, strict=True):
            if tensor.device.type == "cpu":
                part.copy_(tensor)
        if self._bus is None:
            self._block.copy_(self._host[turn])
        else:
            self._bus.copy(self._host[turn], self._block, turn)
        for part, tensor in zip(self.tensors, tensors, strict=True):
            if tensor.device.type != "cpu":
                part.copy_(tensor)
        return self.tensors


class _Bus:
    """Copies blocks of locked memory to a card beside what it computes, by two landing places."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch: no types
        self._landing = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._arrived, self._left = _events(), _events()
        self._stream.wait_stream(torch.cuda.current_stream(device))  # who had that memory before may still use it

    def wait(self, turn: int) -> None:
        """Wait until the copy before last has read the locked memory."""
        self._arrived[turn].synchronize()

    def copy(self, host: torch.Tensor, block: torch.Tensor, turn: int) -> None:
        """Bring `host` into `block`, in the order of the device's current stream."""
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._left[turn])  # what was brought there two steps ago
            self._landing[turn].copy_(host, non_blocking=True)
            self._arrived[turn].record(self._stream)
        computing.wait_event(self._arrived[turn])
        block.copy_(self._landing[turn])
        self._left[turn].record(computing)


def _events() -> list[torch.cuda.Event]:
    return [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]  # torch has not typed it


class CardFeeds:
    """Of one plan. `slots`: of the inputs of each active replica; `vary`: their sizes differ from step to step."""

    def __init__(self, slots: Sequence[Sequence[int]], devices: Sequence[torch.device], *, vary: bool) -> None:
        self._slots = [sorted(own) for own in slots]
        self._devices, self.vary = devices, vary
        self._blocks: list[FeedBlock | None] = [None] * len(slots)
        self.num_blocks = 0  # made so far: another block is at another address

    def send(self, plan: TorchPlan) -> None:
        """Replace what the slots were fed with tensors on the cards. After each feed, before the run."""
        for replica, slots in enumerate(self._slots):
            found = [(slot, tensor) for slot in slots if (tensor := plan.get(slot)) is not None]
            tensors, device = [tensor for _, tensor in found], self._devices[replica]
            if self.vary:
                sent = [_sent(tensor, device) for tensor in tensors]
            else:
                sent = self._block(replica, tensors).send(tensors) if tensors else []
            plan.set_all([slot for slot, _ in found], sent)

    def _block(self, replica: int, tensors: Sequence[torch.Tensor]) -> FeedBlock:
        block = self._blocks[replica]
        if block is None or not block.fits(tensors):
            block = self._blocks[replica] = FeedBlock(tensors, self._devices[replica])
            self.num_blocks += 1
        return block


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.device.type != "cpu" or tensor.nbytes < _PINNED_BYTES:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
