"""A call that torch refuses while it is recorded: one error that names the user's line, the operands and their shapes.

Torch's own text speaks of symbols and of no variable, and its shape functions log a traceback of their own, which is
left out here. What a user's forward raises itself goes through as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from penstock.errors import RecordError
from penstock.program.record.source import line_of_frame, user_line

_REFUSALS = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError)
_SYMBOL = re.compile(r"\bs\d+\b")


@contextmanager
def telling(what: Callable[[], str], operands: Callable[[], Iterable[tuple[str, str]]]) -> Iterator[None]:
    """Turn what torch raises in the block into RecordError.

    `what`: the call, `operands`: (name, 'float32[-1, 4]'); both are asked for only then. Penstock's own errors, and
    those that a line of the user's raises, go through.
    """
    try:
        yield
    except _REFUSALS as error:
        last = _last(error.__traceback__)
        if isinstance(error, RecordError) or _raised_by_user(error, last):
            raise
        shapes = dict(operands())
        listed = ", ".join(f"{name!r} {shape}" for name, shape in shapes.items()) or "no variables"
        text = _SYMBOL.sub("-1", (str(error).strip() or type(error).__name__).splitlines()[0])
        source = _user_frame(error.__traceback__) or user_line()
        raise RecordError(
            f"{source}: {what()} cannot be recorded: {text}\n  its operands: {listed}",
            operator=what(), source=source, shapes=shapes,
        ) from error  # fmt: skip


def described(tensor: torch.Tensor) -> str:
    """Return 'float32[-1, 4]'; -1 stands for every size that follows from the batch."""
    shape: Iterable[Any] = tensor.shape  # int or torch.SymInt
    numbers = (s if type(s) is int else s.node.maybe_as_int() for s in shape)
    sizes = ", ".join("-1" if n is None else str(n) for n in numbers)
    return f"{str(tensor.dtype).removeprefix('torch.')}[{sizes}]"


def called(func: Any, within: str) -> str:
    """Return "torch.matmul in 'fc_0'" or 'Tensor.__add__' for a torch function, called in a layer."""
    return _name(func) + (f" in {within!r}" if within else "")


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    owner = getattr(func, "__objclass__", None)
    if owner is not None:
        return f"Tensor.{name}"
    parts = (getattr(func, "__module__", None) or "").split(".")
    return ".".join([*(part for part in parts if part and not part.startswith("_")), str(name)])  # torch._C._nn.linear


def _last(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _raised_by_user(error: BaseException, last: TracebackType | None) -> bool:
    """Whether the last frame is the user's and torch's words are not in the error.

    Torch raises RuntimeError and IndexError from C++ at a line of the user's; ValueError and TypeError only from its
    Python, except for wrong arguments, which are the user's to read as they are.
    """
    if last is None or isinstance(error, (RuntimeError, IndexError)):
        return False
    return bool(line_of_frame(last.tb_frame.f_code.co_filename, last.tb_lineno))


def _user_frame(trace: TracebackType | None) -> str:
    """The innermost line of the user's on the way to the error."""
    found = ""
    while trace is not None:
        found = line_of_frame(trace.tb_frame.f_code.co_filename, trace.tb_lineno) or found
        trace = trace.tb_next
    return found
