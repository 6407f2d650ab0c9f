"""What a step is asked for and gives: names that are checked, and values as users get them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.errors import FetchError
from penstock.program.eager import advice, words
from penstock.program.ir import unknown_variable
from penstock.program.program import Program
from penstock.ps.remote import SEND, SEND_ROWS


@dataclass(frozen=True, slots=True)
class SelectedRowsValue:
    """A fetched sparse gradient: `rows` int64[n] (may repeat), `values` [n, d], of a table with `height` rows."""

    rows: Any
    values: Any
    height: int


class Fetched(np.ndarray):
    """A fetched array. With one element it is taken for a number (`float(loss)`, `"%.4f" % loss`), whatever its shape,
    as numpy did until 2.4 and scripts of Fluid rely on: a mean is fetched as [1]. Else it is numpy's own array."""

    def __float__(self) -> float:
        return float(self.item() if self.size == 1 else np.asarray(self))

    def __int__(self) -> int:
        return int(self.item() if self.size == 1 else np.asarray(self))

    def __format__(self, spec: str) -> str:
        return format(self.item() if spec and self.size == 1 else np.asarray(self), spec)

    def __repr__(self) -> str:
        return repr(np.asarray(self))

    def __reduce__(self) -> Any:
        return np.asarray(self).__reduce__()


def as_array(tensor: torch.Tensor) -> Fetched:
    """Return what a user gets of a fetched tensor, on the same memory."""
    return tensor.numpy().view(Fetched)


def fetch_names(program: Program, fetch_list: Sequence[Any] | None) -> list[str]:
    """Return the names to fetch; a variable or a name alone stands for a list of one, a list of one for what it holds.
    Raises FetchError for what is not in the program."""
    names: list[str] = []
    if isinstance(fetch_list, str) or hasattr(fetch_list, "name"):
        fetch_list = [fetch_list]
    for given in () if fetch_list is None else fetch_list:
        item = given[0] if isinstance(given, list) and len(given) == 1 else given
        name = item if isinstance(item, str) else getattr(item, "name", None)
        if not isinstance(name, str):
            raise FetchError(f"fetch_list holds {words(item)}; expected a variable or its name{advice(item)}")
        name = program.own_name(name) or name
        if name not in program.variables:
            raise FetchError(f"fetch {name!r}: {_why_unknown(program, name)}", variable=name)
        names.append(name)
    return names


def _why_unknown(program: Program, name: str) -> str:
    if program.recording is not None and program.recording.is_ambiguous(name):
        return "several layers were given one name=, so it may be of each. Fetch the variable that the layer returned"
    text = f"{unknown_variable(name, program.variables)} Fetch what an operator of this program makes, or a parameter"
    if any(op.type in (SEND, SEND_ROWS) for op in program.operators):
        text += ". Learning rates and their counters are computed by the parameter servers; a trainer has none"
    return text
