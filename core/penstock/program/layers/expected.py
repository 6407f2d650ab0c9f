"""What layers expect of their inputs: checked when they are recorded, so that the error names the user's line.

Torch would say the same later and without names, or broadcast a label of another shape in silence.
"""

from __future__ import annotations

from typing import Any, NoReturn

from penstock.errors import ProgramError
from penstock.program.eager import advice, words
from penstock.program.record.failures import described
from penstock.program.record.multiples import multiply_rows
from penstock.program.record.ragged import join_rows
from penstock.program.record.rows_of_positions import fix_unequal_rows
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable, recording_now


def shown(x: Any) -> str:
    """Return "'label' float32[-1, 1] (made at train.py:12)" for a variable, the repr of anything else."""
    if not isinstance(x, Variable):
        return words(x)
    return f"{x.name!r} {described(x.fake)} (made at {x.desc.source or 'an unknown line'})"


def refuse(layer: str, needs: str, got: Any, instead: str) -> NoReturn:
    """Raise the ProgramError of a layer that got something else than it needs."""
    name = got.name if isinstance(got, Variable) else None
    text = f"{user_line()}: {layer} needs {needs}; got {shown(got)}. {instead}{advice(got)}"
    raise ProgramError(text, variable=name)


def expect_features(layer: str, x: Any, num_flatten_dims: int) -> None:
    """Refuse what a fully connected layer cannot multiply."""
    if not isinstance(x, Variable):
        refuse(layer, "a variable, or a list of them", x, "Declare an input by layers.data and feed the array to run()")
    if not x.fake.is_floating_point():
        refuse(layer, "floating numbers", x, "Cast it (layers.cast), or look ids up in layers.embedding")
    if not 1 <= num_flatten_dims < x.ndim:
        instead = f"num_flatten_dims is {num_flatten_dims}: the dimensions from there on are multiplied"
        refuse(layer, f"an input of more than {max(num_flatten_dims, 1)} dimensions", x, instead)


def expect_ids(layer: str, ids: Any) -> None:
    """Refuse what is no variable of whole numbers."""
    if not isinstance(ids, Variable) or str(ids.fake.dtype) not in ("torch.int64", "torch.int32"):
        refuse(layer, "ids, int64[-1, 1]", ids, "Declare them by layers.data(name, [1], dtype='int64')")


def expect_labels(layer: str, input: Any, label: Any, *, soft: bool, axis: int = -1) -> None:
    """Refuse labels that are no class indices (1 along `axis`), or with `soft` no distribution of the input's shape."""
    if not isinstance(input, Variable) or not isinstance(label, Variable):
        return
    join_rows(input._recording, [input, label])
    multiply_rows(input._recording, [input, label])
    fix_unequal_rows(recording_now(input._recording), input, label)
    if soft:
        expect_same_shape(layer, input, label)
        return
    if label.fake.dtype.is_floating_point or label.ndim != input.ndim or label.desc.shape[axis] != 1:
        expected = ["-1"] * input.ndim
        expected[axis] = "1"
        sizes = ", ".join(expected)
        instead = "Declare it by layers.data(name, [1], dtype='int64'), or pass soft_label=True for probabilities"
        refuse(layer, f"a label int64[{sizes}] for {shown(input)}", label, instead)


def expect_same_shape(layer: str, left: Any, right: Any) -> None:
    """Refuse two variables of different shapes, which torch would broadcast or refuse without names."""
    if not isinstance(left, Variable) or not isinstance(right, Variable):
        return
    pairs = zip(left.desc.shape, right.desc.shape, strict=False)
    if left.ndim != right.ndim or any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs):
        refuse(layer, f"two inputs of one shape; the first is {shown(left)}", right, "Reshape one of them")


def expect_rank(layer: str, x: Any, *ranks: int) -> None:
    """Refuse what is no variable of so many dimensions."""
    if not isinstance(x, Variable) or x.ndim not in ranks:
        wanted = " or ".join(map(str, ranks))
        refuse(layer, f"a variable of {wanted} dimension{'s' if ranks != (1,) else ''}", x, "Reshape it")


def expect_known(layer: str, x: Any, axis: int) -> int:
    """Return the size of x along `axis`; refuse a size that is not known before a run."""
    size = x.desc.shape[axis] if isinstance(x, Variable) and -x.ndim <= axis < x.ndim else None
    if not isinstance(size, int):
        refuse(layer, f"a known size along dimension {axis}", x, "Declare the input with a number there")
    return size


def expect_broadcast(layer: str, input: Any, label: Any) -> None:
    """Refuse a label whose sizes are neither the input's nor 1. The input is never broadcast to the label's shape."""
    if isinstance(input, Variable) and isinstance(label, Variable) and input.ndim == label.ndim:
        sizes = zip(input.desc.shape, label.desc.shape, strict=True)
        if all(b == 1 or not (isinstance(a, int) and isinstance(b, int)) or a == b for a, b in sizes):
            return
    expect_same_shape(layer, input, label)
