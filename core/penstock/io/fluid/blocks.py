"""Operators of models that run blocks, or work on arrays of tensors, as the control flow of layers.

A block is recorded as it is run: in a While, in a case of a Switch, or as the step of a StaticRNN. Variables of blocks
around it that it writes first begin before it.
Source: while_op.cc, conditional_block_op.cc, select_input_op.cc, recurrent_op.cc, tensor_array_read_write_op.cc,
lod_tensor_to_array_op.cc, array_to_lod_tensor_op.cc, beam_search_decode_op.cc (1.8).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.io.fluid import schema
from penstock.io.fluid.recording import Reader, Runs, arguments, attributes
from penstock.io.fluid.scopes import Names
from penstock.program import layers
from penstock.program.record.context import default_main_program


def _block(reader: Reader, op: Any, names: Names) -> tuple[Any, Names]:
    """The block that an operator runs, and its names; what it writes outside is declared there."""
    index = attributes(op).get("sub_block")
    if not isinstance(index, int) or not 0 < index < len(reader.blocks):
        raise ProgramError(f"operator {op.type!r} runs block {index!r}; the model has {len(reader.blocks)} blocks")
    block, inner = reader.blocks[index], reader.names(index, names)
    written = [name for one in _all_operators(reader, block) for own in arguments(one.outputs).values() for name in own]
    for name in inner.of_others(written):
        _declare(reader, name, names)
    return block, inner


def _all_operators(reader: Reader, block: Any) -> list[Any]:
    """The operators of a block and of those that it runs."""
    found = list(block.ops)
    for op in block.ops:
        index = attributes(op).get("sub_block")
        if isinstance(index, int) and block.idx < index < len(reader.blocks):
            found += _all_operators(reader, reader.blocks[index])
    return found


def _declare(reader: Reader, name: str, names: Names) -> None:
    """Declare a variable of a block around, unless it is there."""
    owner = names.owner(name)
    if name in owner.own or name not in owner.described:
        return
    described = _described(reader, name)
    block = default_main_program().global_block()
    own = default_main_program().unique(name) if block.has_var(name) else name
    if described.type == schema.LOD_TENSOR_ARRAY:
        dtype = schema.DTYPES[described.tensor_array.tensor.data_type]
        owner.own[name] = block.create_var(name=own, dtype=dtype, type="array")
    elif described.type == schema.LOD_TENSOR:
        dtype = schema.DTYPES[described.lod_tensor.tensor.data_type]
        owner.own[name] = block.create_var(name=own, dtype=dtype)


def _described(reader: Reader, name: str) -> Any:
    return next(var.type for block in reader.blocks for var in block.vars if var.name == name)


def _while(reader: Reader, op: Any, names: Names) -> None:
    block, inner = _block(reader, op, names)
    with layers.While(names.read(arguments(op.inputs)["Condition"][0], op.type)).block():
        reader.record(block.ops, inner)


def _conditional(reader: Reader, op: Any, names: Names) -> None:
    block, inner = _block(reader, op, names)
    conditions = arguments(op.inputs).get("Cond", [])
    if len(conditions) != 1:
        raise ProgramError(f"operator {op.type!r} has {len(conditions)} conditions; expected one")
    with layers.Switch() as switch, switch.case(names.read(conditions[0], op.type)):
        reader.record(block.ops, inner)


def _select(reader: Reader, op: Any, names: Names) -> None:
    given = arguments(op.inputs)
    first, second = (names.read(name, op.type) for name in given["X"])
    if first.desc.shape != second.desc.shape or first.desc.dtype != second.desc.dtype:
        raise ProgramError(
            f"operator {op.type!r} chooses between {first!r} and {second!r}; expected variables of one shape and dtype"
        )
    chosen = names.read(given["Mask"][0], op.type).reshape([1] * max(first.ndim, 1)) != 0
    reader.write(arguments(op.outputs)["Out"][0], torch.where(chosen, second, first), names)


def _recurrent(reader: Reader, op: Any, names: Names) -> None:
    attrs, given = attributes(op), arguments(op.inputs)
    block, inner = _block(reader, op, names)
    sequences = [(name, names.read(name, op.type)) for name in given.get("inputs", [])]
    if attrs.get("reverse"):
        sequences = [(name, torch.flip(x, [0])) for name, x in sequences]
    first = [names.read(name, op.type) for name in given.get("initial_states", [])]
    outputs = arguments(op.outputs).get("outputs", [])
    rnn = layers.StaticRNN()
    with rnn.step():
        inner.own.update({name: rnn.step_input(x) for name, x in sequences})
        before = {name: rnn.memory(init=init) for name, init in zip(attrs.get("ex_states", []), first, strict=True)}
        inner.own.update(before)
        reader.record(block.ops, inner)
        for memory, name in zip(before.values(), attrs.get("states", []), strict=True):
            rnn.update_memory(memory, inner.read(name, op.type))
        for name in outputs:
            rnn.step_output(inner.read(name, op.type))
    made = rnn()
    for name, value in zip(outputs, made if isinstance(made, (list, tuple)) else [made], strict=True):
        reader.write(name, torch.flip(value, [0]) if attrs.get("reverse") else value, names)


def _array(reader: Reader, op: Any, names: Names) -> None:
    """Write to an array, which begins where it is described."""
    given, (out,) = arguments(op.inputs), arguments(op.outputs)["Out"]
    _declare(reader, out, names)
    x, i = _operands(given, ["X", "I"], op, names)
    layers.array_write(x, i, names.read(out, op.type))


def _element(reader: Reader, op: Any, names: Names) -> None:
    value = layers.array_read(*_operands(arguments(op.inputs), ["X", "I"], op, names))
    reader.write(arguments(op.outputs)["Out"][0], value, names)


def _length(reader: Reader, op: Any, names: Names) -> None:
    value = layers.array_length(*_operands(arguments(op.inputs), ["X"], op, names))
    reader.write(arguments(op.outputs)["Out"][0], value, names)


def _steps(reader: Reader, op: Any, names: Names) -> None:
    """An array of the steps of sequences, which only reads may follow: it takes the place of the one described."""
    x, table = _operands(arguments(op.inputs), ["X", "RankTable"], op, names)
    out = arguments(op.outputs)["Out"][0]
    names.owner(out).own[out] = layers.lod_tensor_to_array(x, table)


def _joined(reader: Reader, op: Any, names: Names) -> None:
    value = layers.array_to_lod_tensor(*_operands(arguments(op.inputs), ["X", "RankTable"], op, names))
    reader.write(arguments(op.outputs)["Out"][0], value, names)


def _sentences(reader: Reader, op: Any, names: Names) -> None:
    attrs, out = attributes(op), arguments(op.outputs)
    ids, scores = _operands(arguments(op.inputs), ["Ids", "Scores"], op, names)
    made = layers.beam_search_decode(ids, scores, attrs["beam_size"], attrs["end_id"])
    for slot, value in zip(("SentenceIds", "SentenceScores"), made, strict=True):
        reader.write(out[slot][0], value, names)


def _operands(given: dict[str, list[str]], slots: Sequence[str], op: Any, names: Names) -> list[Any]:
    return [names.read(given[slot][0], op.type) for slot in slots]


RUNS: dict[str, Runs] = {
    "while": _while, "conditional_block": _conditional, "conditional_block_infer": _conditional,
    "select_input": _select, "recurrent": _recurrent, "write_to_array": _array, "read_from_array": _element,
    "lod_array_length": _length, "lod_tensor_to_array": _steps, "array_to_lod_tensor": _joined,
    "beam_search_decode": _sentences,
}  # fmt: skip
