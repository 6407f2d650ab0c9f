"""Ragged inputs of a step: what a user feeds as rows and lengths, shares of replicas by sequences, fetches with a LoD.

A ragged input (program/sequences.py) is fed as a LoDTensor, as a list of sequences, or as rows with `<name>@LENGTHS`
beside them, which is what data sets give. Rows without lengths are sequences of one row each, unless an operator reads
the lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from penstock.errors import FeedError
from penstock.lod_tensor import LoDTensor, of_sequences
from penstock.program.control import arrays
from penstock.program.ir import VarDesc
from penstock.program.program import Program
from penstock.program.sequences import LENGTHS, ROWS, STEPS, lengths_of, levels_of, ragged_feeds, steps_of


class RaggedInputs:
    """The ragged inputs of `program`, looked up once for each revision."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.variables = ragged_feeds(program)
        levels = {v.name: levels_of(program, v.name) for v in self.variables}
        self._levels = {name: own for name, own in levels.items() if not name.endswith(LENGTHS)}
        self._rows = [name for name in self._levels if name.endswith(ROWS)]
        self._steps = [v.name for v in steps_of(program)]
        self.names = {*levels, *self._steps}

    def with_lengths(self, feed: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a feed of rows and lengths for one of LoDTensors and sequences. Raises FeedError."""
        if self._rows:
            feed = {**feed, **self._rows_of(feed)}
        if all(levels[-1] in feed for levels in self._levels.values()) and not _has_lod(feed):
            return {**feed, **self._longest(feed)} if self._steps else feed
        given: dict[str, Any] = {}
        for name, value in feed.items():
            levels = self._levels.get(name)
            if levels is not None and not all(level in feed for level in levels):
                given |= self._parts(self._program.variables[name], levels, value)
            else:
                given[name] = value.rows if isinstance(value, LoDTensor) else value
        return {**given, **self._longest(given)}

    def _rows_of(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        """The rows of the sequences of which a script feeds the lengths alone."""
        lengths = {name: feed.get(name.removesuffix(ROWS)) for name in self._rows}
        made: dict[str, Any] = {}
        for name, own in lengths.items():
            if own is not None:
                own = torch.as_tensor(own.rows if isinstance(own, LoDTensor) else own).reshape(-1, 1)
                made |= {name: torch.arange(max(0, int(own.sum())))[:, None], name + LENGTHS: own}
        return made

    def _longest(self, feed: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The steps of the longest sequence of each input that the program pads."""
        lengths = {name: feed.get(name.removesuffix(STEPS) + LENGTHS) for name in self._steps}
        return {name: _steps_to(torch.as_tensor(own)) for name, own in lengths.items() if own is not None}

    def _parts(self, var: VarDesc, levels: Sequence[str], value: Any) -> dict[str, Any]:
        if isinstance(value, (list, tuple)):
            value = _of_list(var, len(levels), value)
        if isinstance(value, LoDTensor) and value.lengths:
            self._check(var, levels, value)
            return {var.name: value.rows, **{n: one[:, None] for n, one in zip(levels, value.lengths, strict=True)}}
        rows = value.rows if isinstance(value, LoDTensor) else value
        if len(levels) > 1 or any(levels[0] in op.input_names() for op in self._program.operators):
            raise FeedError(
                f"feed {var.name!r} has no lengths of its sequences, which the program reads (declared at "
                f"{var.source}). Feed a fluid.LoDTensor, fluid.create_lod_tensor(rows, [lengths], place), a list of "
                f"sequences, or the lengths beside it as {levels[-1]!r} int64[n, 1]",
                variable=var.name,
            )
        return {var.name: rows, levels[0]: np.ones((len(rows), 1), np.int64)}

    def _check(self, var: VarDesc, levels: Sequence[str], value: LoDTensor) -> None:
        if len(levels) != len(value.lengths) or not value.has_valid_recursive_sequence_lengths():
            raise FeedError(
                f"feed {var.name!r} is {value!r}; expected {len(levels)} level(s) of lengths (lod_level at "
                f"{var.source}) that add up to its rows",
                variable=var.name,
            )

    def split(self, tensors: Mapping[str, torch.Tensor], shares: Sequence[dict[str, torch.Tensor]]) -> None:
        """Put into each share the rows of its sequences; the batch's own inputs are there. Raises FeedError."""
        for var in self.variables:  # lengths come before what they are of
            if var.name not in tensors:
                continue
            whole = tensors[var.name]
            if len(shares) == 1:
                shares[0][var.name] = whole
                continue
            lengths = [share[var.name + LENGTHS] for share in shares]
            if any(bool((own < 0).any()) for own in lengths):
                raise FeedError(
                    f"feed {var.name!r} has a length below 0 among {torch.cat(lengths).reshape(-1)[:8].tolist()}",
                    variable=var.name,
                )
            sizes = [int(own.sum()) for own in lengths]
            if sum(sizes) != whole.shape[0]:
                raise FeedError(
                    f"feed {var.name!r} has {whole.shape[0]} rows, but its lengths add up to {sum(sizes)}",
                    variable=var.name,
                )
            for share, part in zip(shares, whole.split_with_sizes(sizes), strict=True):
                share[var.name] = part
        for share in shares:
            share.update(self._longest(share))


def _steps_to(lengths: torch.Tensor) -> torch.Tensor:
    """Return 0, 1, … below the largest length; one step at least."""
    return torch.arange(max(1, int(lengths.max())) if lengths.numel() else 1)


def _has_lod(feed: Mapping[str, Any]) -> bool:
    return any(isinstance(value, LoDTensor) for value in feed.values())


def _of_list(var: VarDesc, num_levels: int, value: Sequence[Any]) -> LoDTensor:
    sizes = [int(str(size)) for size in var.shape[1:]]
    try:
        return of_sequences(value, num_levels, sizes, var.dtype)
    except (TypeError, ValueError) as error:
        raise FeedError(
            f"feed {var.name!r} is a list that is no {num_levels}-fold nest of sequences of {var.dtype}{sizes} "
            f"({error}); declared at {var.source}",
            variable=var.name,
        ) from error


def element_of(var: VarDesc, value: torch.Tensor) -> torch.Tensor:
    """Return a fetched value; of one whose sizes follow from data, which is an array of one element, that element."""
    if var.kind != "unsized":
        return value
    (element,) = arrays.unpacked(value)
    assert element is not None  # its operator has made it
    return element


def elements_of(value: torch.Tensor) -> list[torch.Tensor]:
    """Return copies of the elements of a fetched array; [0] stands for one that was not written."""
    found = (torch.empty(0, dtype=value.dtype) if one is None else one for one in arrays.unpacked(value))
    return [one.reshape(1).clone() if one.dim() == 0 else one.clone() for one in found]


def with_their_lengths(program: Program, names: Sequence[str]) -> list[str]:
    """Return what to fetch so that the LoD of ragged variables is known: the names, then their lengths."""
    lengths = [level for name in names for level in _levels(program, name)]
    return [*names, *dict.fromkeys(lengths)]


def as_lod_tensors(program: Program, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
    """Return the values of `names` among those of `with_their_lengths` as LoDTensors, of arrays as lists of them."""
    known = dict(zip(with_their_lengths(program, names), values, strict=True))
    found: list[Any] = []
    for name, value in zip(names, values, strict=False):
        if isinstance(value, list):  # of an array
            value = [LoDTensor(one) for one in value]
        elif isinstance(value, torch.Tensor):
            value = LoDTensor(value, [np.asarray(known[level]) for level in _levels(program, name)])
        found.append(value)
    return found


def _levels(program: Program, name: str) -> list[str]:
    var = program.variables[name]
    if var.kind == "unsized":
        inner = name + LENGTHS
        return [*_levels(program, inner), inner] if inner in program.variables else []
    return lengths_of(program, var.shape[0]) if var.shape and var.kind == "dense" else []
