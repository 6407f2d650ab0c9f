"""How many cores a thread of a server uses for one piece of work.

Little work is done on the thread that has it: torch's own threads spin when their part is done, each thread that calls
operators has a set of them, and on one host it is the trainers' cores that they spin on.
"""

from __future__ import annotations

import torch

from penstock.native.intra_op import use_intra_op_threads_here

LARGE = 8 << 20
"""Bytes from which handing work to other threads costs less than they save."""

_ALL = torch.get_num_threads()  # of the thread that imports this, whose number nobody has changed yet


def use_cores_for(num_bytes: int) -> None:
    """Let operators of the calling thread use one core for work on so many bytes, or as many as torch would if large.

    It stays so on this thread until the next call.
    """
    use_intra_op_threads_here(_ALL if num_bytes >= LARGE else 1)
