"""Readers within a program, under Fluid 1.8's names: the inputs of a program, and the DataLoader that feeds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import ProgramError
from penstock.program.layers.inputs import fluid_data
from penstock.program.record.context import default_main_program
from penstock.program.record.source import user_line

if TYPE_CHECKING:
    from penstock.dataset.generator_loader import PyReader


def py_reader(
    capacity: int,
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[str],
    lod_levels: Sequence[int] | None = None,
    name: str | None = None,
    use_double_buffer: bool = True,
) -> PyReader:
    """Declare inputs of these whole shapes (-1: the batch), and return the reader that the program takes them from.

    Give it a reader (`decorate_paddle_reader`, `decorate_tensor_provider`), `start()` it before a pass and `reset()` it
    at fluid.core.EOFException.
    """
    levels = lod_levels or [0] * len(shapes)
    if not len(shapes) == len(dtypes) == len(levels):
        raise ProgramError(
            f"{user_line()}: py_reader is given {len(shapes)} shapes, {len(dtypes)} dtypes and {len(levels)} "
            "lod_levels; expected one of each for every input"
        )
    prefix = name or default_main_program().unique("py_reader")
    described = zip(shapes, dtypes, levels, strict=True)
    inputs = [fluid_data(f"{prefix}.slot_{i}", shape, dtype, lod) for i, (shape, dtype, lod) in enumerate(described)]
    return create_py_reader_by_data(capacity, inputs, prefix, use_double_buffer)


def create_py_reader_by_data(
    capacity: int, feed_list: Sequence[Any], name: str | None = None, use_double_buffer: bool = True
) -> PyReader:
    """Return a reader of inputs that exist, see `py_reader`."""
    from penstock.dataset.generator_loader import PyReader  # with its threads, of programs that have such a reader

    return PyReader(feed_list, capacity, use_double_buffer, iterable=False)


def read_file(reader: PyReader) -> Any:
    """Return the inputs that a reader feeds: a list, or the only one."""
    inputs = reader.inputs
    return inputs[0] if len(inputs) == 1 else inputs


def double_buffer(reader: PyReader, place: object = None, name: str | None = None) -> PyReader:
    """Return the reader: its batches are always made ahead."""
    return reader
