"""Variables of given values, and parts of variables by position, under Fluid 1.8's names."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from penstock.errors import ProgramError
from penstock.program.ir import VarDesc
from penstock.program.layers.sizes import sizes_in
from penstock.program.layers.tensor import assign, fill_constant
from penstock.program.record.arrays import counted
from penstock.program.record.context import default_main_program
from penstock.program.record.declared import Declared, written
from penstock.program.record.opening import recording_of
from penstock.program.record.rows_of_positions import open_rows
from penstock.program.record.source import user_line
from penstock.program.record.unsized import read_all, sized_in_block
from penstock.program.record.variable import Variable, dtype_named, recording_modes, recording_now, wrap
from penstock.program.training.parameters import constant_state


def create_tensor(dtype: str, name: str | None = None, persistable: bool = False) -> Variable:
    """Declare a variable that a layer writes later (`assign(x, output)`, `sums(xs, out)`).

    Raises ProgramError for a persistable one: its sizes are not known, so nothing could hold it.
    """
    if persistable:
        raise ProgramError(f"{user_line()}: create_tensor(persistable=True): use create_global_var, which has sizes")
    main = default_main_program()
    text = str(dtype_named(dtype)).removeprefix("torch.")
    return Declared(recording_of(main), VarDesc(name or main.unique("create_tensor"), (), text, source=user_line()))


def _made(function: Callable[[], Any]) -> Any:
    recording = recording_of(default_main_program())
    with recording_modes(recording):
        return wrap(recording, function())


def zeros(shape: Sequence[int], dtype: str, force_cpu: bool = False) -> Any:
    """Return a variable of zeros."""
    return fill_constant(shape, dtype, 0)


def ones(shape: Sequence[int], dtype: str, force_cpu: bool = False) -> Any:
    """Return a variable of ones."""
    return fill_constant(shape, dtype, 1)


def zeros_like(x: Any, out: Any = None) -> Any:
    """Return zeros of the sizes of x; with `out`, write them there and return `out`."""
    found: Any = torch.zeros_like(x)
    return found if out is None else written(out, found)


def ones_like(x: Any, out: Any = None) -> Any:
    """Return ones of the sizes of x; with `out`, write them there and return `out`."""
    found: Any = torch.ones_like(x)
    return found if out is None else written(out, found)


def fill_constant_batch_size_like(
    input: Any,
    shape: Sequence[int],
    dtype: str,
    value: float,
    input_dim_idx: int = 0,
    output_dim_idx: int = 0,
    force_cpu: bool = False,
) -> Any:
    """Return a variable of `value`: sizes `shape`, but `output_dim_idx` has the size of the input's `input_dim_idx`."""
    sizes: list[Any] = list(shape)
    sizes[output_dim_idx] = input.shape[input_dim_idx]
    return input.new_full(sizes, value, dtype=dtype_named(dtype))


def range(start: Any, end: Any, step: Any, dtype: str) -> Any:
    """Return start, start + step, … below end, or above it where the step is below 0.

    Each is a number, or a variable of one element. Of variables, how many there are follows from data: the result is
    unsized, and an end that is never reached is an OperatorError of the run.
    """
    given, kind = (start, end, step), dtype_named(dtype)
    for name, v in zip(("start", "end", "step"), given, strict=True):
        if isinstance(v, Variable) and any(size > 1 for size in v.shape):
            raise ProgramError(f"{user_line()}: range: {name} has the shape {list(v.shape)}; expected one element")
    if any(isinstance(v, Variable) for v in given):
        return _range_of_data(given, kind)
    return _made(lambda: torch.arange(start, end, step, dtype=kind))


def _range_of_data(given: Sequence[Any], kind: torch.dtype) -> Any:
    recording = recording_now(next(v._recording for v in given if isinstance(v, Variable)))

    def build() -> Any:
        bounds = read_all(recording, list(given))
        known = next(v for v in bounds if isinstance(v, Variable))
        start, end, step = (
            v.to(kind).reshape([1]) if isinstance(v, Variable) else known.new_full([1], v, dtype=kind) for v in bounds
        )
        exact = kind if kind.is_floating_point else torch.float64
        count = torch.ceil((end - start).to(exact) / step).to(torch.int64)
        return counted(recording, count).to(kind) * step + start

    return sized_in_block(recording, build)


def linspace(start: float, stop: float, num: int, dtype: str) -> Any:
    """Return `num` numbers from start to stop at equal distances."""
    return _made(lambda: torch.linspace(start, stop, num, dtype=dtype_named(dtype)))


def eye(
    num_rows: int, num_columns: int | None = None, batch_shape: Sequence[int] | None = None, dtype: str = "float32"
) -> Any:
    """Return a matrix with ones on its diagonal; with `batch_shape`, that many of them."""
    made = _made(lambda: torch.eye(num_rows, num_columns or num_rows, dtype=dtype_named(dtype)))
    return made if batch_shape is None else made.repeat([*batch_shape, 1, 1])


def shape(input: Any) -> Any:
    """Return the sizes of a variable, int32 [rank]. The batch is that of the replica."""
    sizes = list(input.shape)
    return torch.cat([input.new_full([1], size, dtype=torch.int32) for size in sizes])


def argmin(x: Any, axis: int = 0) -> Any:
    """Return the int64 position of the smallest along `axis`."""
    return torch.argmin(x, axis)


def argsort(input: Any, axis: int = -1, descending: bool = False, name: str | None = None) -> tuple[Any, Any]:
    """Return (sorted values, their int64 positions) along `axis`."""
    values, positions = torch.sort(input, dim=axis, descending=descending)
    return values, positions


def reverse(x: Any, axis: int | Sequence[int]) -> Any:
    """Return x in the opposite order along `axis`."""
    return torch.flip(x, [axis] if isinstance(axis, int) else list(axis))


def gather(input: Any, index: Any, overwrite: bool = True) -> Any:
    """Return the rows of `input` at the positions `index`, int [n] or [n, 1].

    Positions among the words of a batch, which are an input, are as many as are fed, one row a sample or not.
    """
    if isinstance(input, Variable) and isinstance(index, Variable):
        open_rows(recording_now(input._recording), input, index)
    rows = index.reshape([-1])
    return torch.index_select(input, 0, rows)


def gather_nd(input: Any, index: Any, name: str | None = None) -> Any:
    """Return input[index[.., 0], index[.., 1], …]. Shapes: index [.., k]; result [.., input's dimensions after k]."""
    depth = index.desc.shape[-1]
    if not isinstance(depth, int):
        raise ProgramError(f"{user_line()}: gather_nd: the last size of the index is not known")
    return input[tuple(index.long().unbind(-1))] if depth else input


def scatter(input: Any, index: Any, updates: Any, name: str | None = None, overwrite: bool = True) -> Any:
    """Return `input` with the rows at `index` replaced by those of `updates`; `overwrite=False`: with their sums."""
    rows = index.reshape([-1])
    if overwrite:
        return torch.index_put(input, (rows,), updates)
    return torch.index_add(torch.index_fill(input, 0, rows, 0.0), 0, rows, updates)


def unstack(x: Any, axis: int = 0, num: int | None = None) -> list[Any]:
    """Return the parts of x along `axis`, which then has gone."""
    return list(torch.unbind(x, axis))


def expand_as(x: Any, target_tensor: Any, name: str | None = None) -> Any:
    """Repeat x to the sizes of `target_tensor`, which are multiples of its own."""
    pairs = list(zip(x.shape, target_tensor.shape, strict=False))
    times = [to // of if isinstance(of, int) and isinstance(to, int) and of and to % of == 0 else 1 for of, to in pairs]
    if x.ndim == target_tensor.ndim and any(of != 1 and n != 1 for (of, _), n in zip(pairs, times, strict=True)):
        x = x.repeat(times)
    return x.expand(target_tensor.shape).clone()


def pad(x: Any, paddings: Sequence[int], pad_value: float = 0.0, name: str | None = None) -> Any:
    """Put `paddings[2 i]` elements before and `paddings[2 i + 1]` behind dimension i."""
    pairs = [list(paddings[i : i + 2]) for i in builtins.range(0, len(paddings), 2)]
    return F.pad(x, [n for pair in reversed(pairs) for n in pair], value=pad_value)


def pad2d(
    input: Any,
    paddings: Sequence[int] = (0, 0, 0, 0),
    mode: str = "constant",
    pad_value: float = 0.0,
    data_format: str = "NCHW",
    name: str | None = None,
) -> Any:
    """Put rows above and below, columns left and right (`paddings`) around images [n, channels, h, w].

    `mode`: "constant", "reflect" or "edge".
    """
    if data_format != "NCHW" or mode not in ("constant", "reflect", "edge"):
        raise ProgramError(f"{user_line()}: pad2d(mode={mode!r}, data_format={data_format!r}) is not supported")
    top, bottom, left, right = paddings
    kind = "replicate" if mode == "edge" else mode
    value = pad_value if kind == "constant" else None
    return F.pad(input, [left, right, top, bottom], mode=kind, value=value)


def label_smooth(
    label: Any, prior_dist: Any = None, epsilon: float = 0.1, dtype: str = "float32", name: str | None = None
) -> Any:
    """Return (1 - epsilon) label + epsilon prior; the prior is 1 / classes each by default. Shapes: [.., classes]."""
    # A number where it is known: 1.0 / SymInt is an AttributeError for a SymInt that holds one (torch 2.13).
    known = label.desc.shape[-1] if isinstance(label, Variable) else label.shape[-1]
    classes = known if isinstance(known, int) else label.shape[-1]
    smooth = 1.0 / classes if prior_dist is None else prior_dist
    return (1.0 - epsilon) * label + epsilon * smooth


def clip_by_norm(x: Any, max_norm: float, name: str | None = None) -> Any:
    """Return x, scaled down to the 2-norm `max_norm` if it has a larger one."""
    norm = torch.sqrt(torch.sum(x * x))
    return torch.where(norm > max_norm, x * (max_norm / norm), x)


def full_like(x: Any, fill_value: float, out: Any = None, dtype: str | None = None) -> Any:
    """Return `fill_value` in the sizes of x; with `out`, write it there and return `out`."""
    made: Any = torch.full_like(x, fill_value, dtype=None if dtype is None else dtype_named(dtype))
    return made if out is None else written(out, made)


def diag(diagonal: Any) -> Any:
    """Return a square matrix with the elements of `diagonal` [n] on its diagonal, n a known size."""
    return torch.diag_embed(diagonal if isinstance(diagonal, torch.Tensor) else assign(diagonal))


def tril(input: Any, diagonal: int = 0, name: str | None = None) -> Any:
    """Return the matrices with zeros above the diagonal that is `diagonal` higher than the main one."""
    return torch.tril(input, diagonal)


def triu(input: Any, diagonal: int = 0, name: str | None = None) -> Any:
    """Return the matrices with zeros below the diagonal that is `diagonal` higher than the main one."""
    return torch.triu(input, diagonal)


def strided_slice(input: Any, axes: Sequence[int], starts: Any, ends: Any, strides: Any) -> Any:
    """Return input[starts[i]:ends[i]:strides[i]] along each of `axes`; strides are positive.

    `starts`, `ends`, `strides`: ints and variables of sizes, see `layers.shape`.
    """
    starts, ends, strides = (sizes_in(one) for one in (starts, ends, strides))
    if any(stride < 1 for stride in strides):
        raise ProgramError(f"{user_line()}: strided_slice: strides are {list(strides)}; expected positive ones")
    for axis, start, end, stride in zip(axes, starts, ends, strides, strict=True):
        index: list[Any] = [slice(None)] * input.ndim
        index[axis] = slice(start, end, stride)
        input = input[tuple(index)]
    return input


def autoincreased_step_counter(counter_name: str | None = None, begin: int = 1, step: int = 1) -> Any:
    """Return an int64 counter that is `begin` in the first run and `step` larger in each one after; calls with one name
    share it. Raises ProgramError for the name of another variable."""
    name = counter_name or "@STEP_COUNTER@"
    main = default_main_program()
    if name in main.variables:
        if not main.variables[name].persistable or main.variables[name].dtype != "int64":
            raise ProgramError(f"{user_line()}: {name!r} is no counter", variable=name)
        return main.handle(name)
    counter: Any = constant_state(name, begin - step, "int64", [1])
    with torch.no_grad():
        counter.add_(step)
    return counter
