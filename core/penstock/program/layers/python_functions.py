"""`py_func`: functions of Python as operators of a Program.

    py_func(Tensor[] x, SymInt[] sizes, int[] ranks, str[] dtypes, str function, str backward, int[] used) -> Tensor[]
    py_func_grad(Tensor?[] operands, Tensor[] x, str function) -> Tensor[]

`sizes`, `ranks`, `dtypes`: of the results, one after another. `used`: which of x and the results, in this order, the
backward function gets before the gradients of the results. Functions are known by a key that only their process has.
It keeps them until it ends, as in Fluid, since a Program's text may name them. They run on a thread of the engine, with
the interpreter's lock; those of several replicas take turns.
Source: python/paddle/fluid/layers/nn.py, paddle/fluid/operators/py_func_op.cc (Fluid 1.8).
"""

from __future__ import annotations

import secrets
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.errors import ArgumentError, ProgramError
from penstock.lod_tensor import LoDTensor
from penstock.program.layers.sequences import is_sequence
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.declared import written
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable, recording_modes, wrap

_LIBRARY: Any = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch
_LIBRARY.define(
    "py_func(Tensor[] x, SymInt[] sizes, int[] ranks, str[] dtypes, str function, str backward, int[] used) -> Tensor[]"
)
_LIBRARY.define("py_func_grad(Tensor?[] operands, Tensor[] x, str function) -> Tensor[]")
_functions: dict[str, Callable[..., Any]] = {}


def py_func(
    func: Callable[..., Any],
    x: Any,
    out: Any,
    backward_func: Callable[..., Any] | None = None,
    skip_vars_in_backward_input: Any = None,
) -> Any:
    """Return `out`, one or several variables, with what `func` returns in each run for the values of `x`.

    `func` gets a LoDTensor for each variable of `x` (`numpy.array(value)`) and returns an array or a LoDTensor for each
    of `out`, of its dtype and sizes, else the run ends with an OperatorError; -1 in the sizes of `out` is that of the
    same dimension of the first of `x`. Without `out` it is called, and what it returns is dropped.
    `backward_func` gets those of `x` and `out` that are not in `skip_vars_in_backward_input`, then the gradients of
    `out`, None for one that has none, and returns a gradient, or None, for each of `x`. Without it gradients end here.
    Both run in each replica, with its rows. A Program that calls Python runs in the process that recorded it alone.

    Raises ArgumentError for what is no variable, or a ragged one; ProgramError for sizes that nothing says.
    """
    given, outs = _variables("x", x), _variables("out", out)
    skipped = {one.name for one in _variables("skip_vars_in_backward_input", skip_vars_in_backward_input)}
    names = [one.name for one in (*given, *outs)]
    if unknown := skipped - {*names}:
        raise ProgramError(
            f"{user_line()}: py_func: skip_vars_in_backward_input has {sorted(unknown)}; expected some of {names}"
        )
    sizes = [_sizes(one, given) for one in outs]
    dtypes = [str(one.dtype).removeprefix("torch.") for one in outs]
    forward, backward = key_of(func), "" if backward_func is None else key_of(backward_func)
    used = [i for i, name in enumerate(names) if name not in skipped]
    recording = recording_of(default_main_program())
    with (
        name_scope(default_main_program().unique("py_func")),
        torch.set_grad_enabled(backward_func is not None and torch.is_grad_enabled()),
        recording_modes(recording),
    ):
        made = torch.ops.penstock.py_func(
            [recording.own(one).fake for one in given], [size for own in sizes for size in own],
            [len(own) for own in sizes], dtypes, forward, backward, used,
        )  # fmt: skip
        values = wrap(recording, list(made))
    for variable, value in zip(outs, values, strict=True):
        written(variable, value)
    return out


def _variables(what: str, given: Any) -> list[Any]:
    found = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    for one in found:
        if not isinstance(one, Variable):
            raise ArgumentError(f"{user_line()}: py_func: {what} holds {one!r}; expected variables")
        if is_sequence(one):
            raise ArgumentError(
                f"{user_line()}: py_func: {one.name!r} is ragged (lod_level {one.lod_level}); pad it first "
                "(sequence_pad), and give the lengths as another variable"
            )
    return found


def _sizes(out: Any, given: Sequence[Any]) -> list[Any]:
    """The sizes of a result as the recorder has them."""
    first = given[0].fake.shape if given else ()
    sizes = [size if isinstance(size, torch.SymInt) or size >= 0 else None for size in out.shape]
    if not sizes or any(size is None and axis >= len(first) for axis, size in enumerate(sizes)):
        raise ProgramError(
            f"{user_line()}: py_func: {out.name!r} has the sizes {list(out.shape)}; give them by create_var(shape=…), "
            "with -1 only where the first of x has a dimension"
        )
    return [first[axis] if size is None else size for axis, size in enumerate(sizes)]


def key_of(function: Callable[..., Any]) -> str:
    """Return a new key under which operators of this process call a function. Raises ArgumentError for none."""
    if not callable(function):
        raise ArgumentError(f"{user_line()}: py_func: {function!r} is no function")
    key = f"{getattr(function, '__name__', type(function).__name__)}:{secrets.token_hex(8)}"
    _functions[key] = function
    return key


# ---------------------------------------------------------------- operators


def _called(key: str, values: Sequence[Tensor | None]) -> list[Any]:
    function = _functions.get(key)
    if function is None:
        raise RuntimeError(
            f"the function {key.partition(':')[0]!r} of py_func is in the process that recorded it alone; record the "
            "Program again here"
        )
    try:
        found = function(*(None if value is None else _given(value) for value in values))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise RuntimeError(
            f"the function {key.partition(':')[0]!r} of py_func has raised {type(error).__name__}: {error} "
            f"({last.filename}:{last.lineno})"
        ) from error
    return list(found) if isinstance(found, (list, tuple)) else [] if found is None else [found]


def _given(value: Tensor) -> LoDTensor:
    tensor = LoDTensor()
    tensor.set(value.cpu())
    return tensor


def _result(key: str, number: int, value: Any, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    array = np.ascontiguousarray(np.asarray(value))
    wanted = str(dtype).removeprefix("torch.")
    if list(array.shape) != list(sizes) or array.dtype.name != wanted:
        raise ValueError(
            f"the function {key.partition(':')[0]!r} of py_func returns {array.dtype.name}{list(array.shape)}; value "
            f"{number} is expected to be {wanted}{list(sizes)}"
        )
    return torch.from_numpy(array.copy())


def _split(sizes: Sequence[int], ranks: Sequence[int]) -> Iterator[Sequence[int]]:
    begin = 0
    for rank in ranks:
        yield sizes[begin : begin + rank]
        begin += rank


def _py_func(
    x: Sequence[Tensor], sizes: Sequence[int], ranks: Sequence[int], dtypes: Sequence[str], function: str,
    backward: str, used: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    found = _called(function, x)
    if dtypes and len(found) != len(dtypes):
        name = function.partition(":")[0]
        raise ValueError(f"the function {name!r} of py_func returns {len(found)} values for {len(dtypes)} variables")
    kinds = [getattr(torch, dtype) for dtype in dtypes]
    declared = zip(found, _split(sizes, ranks), kinds, strict=False)
    return [_result(function, i, *one).to(x[0].device if x else "cpu") for i, one in enumerate(declared)]


def _py_func_grad(operands: Sequence[Tensor | None], x: Sequence[Tensor], function: str) -> list[Tensor]:
    found = _called(function, operands)
    if len(found) != len(x):
        name = function.partition(":")[0]
        raise ValueError(f"the backward function {name!r} of py_func returns {len(found)} values for {len(x)} of x")
    return [
        torch.zeros_like(own) if value is None else _result(function, i, value, own.shape, own.dtype).to(own.device)
        for i, (own, value) in enumerate(zip(x, found, strict=True))
    ]


def _shapes(
    x: Sequence[Tensor], sizes: Sequence[int], ranks: Sequence[int], dtypes: Sequence[str], *rest: Any
) -> list[Tensor]:
    place = x[0].device if x else torch.device("meta")
    kinds = [getattr(torch, dtype) for dtype in dtypes]
    return [torch.empty(own, dtype=kind, device=place) for own, kind in zip(_split(sizes, ranks), kinds, strict=True)]


def _grad_shapes(operands: Any, x: Sequence[Tensor], function: str) -> list[Tensor]:
    return [torch.empty(own.shape, dtype=own.dtype, device=own.device) for own in x]


def _context(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    tensors, ctx.sizes, ctx.ranks, ctx.dtypes, _, ctx.backward_key, ctx.used = inputs
    ctx.num_x = len(tensors)
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _derivative(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    values = ctx.saved_tensors
    x, found = list(values[: ctx.num_x]), [None] * ctx.num_x
    if ctx.backward_key and any(grad is not None for grad in grads):
        operands = [*(values[i] for i in ctx.used), *grads]
        made = torch.ops.penstock.py_func_grad(operands, x, ctx.backward_key)
        found = [grad if needed else None for grad, needed in zip(made, ctx.needs_input_grad[0], strict=True)]
    # An empty list is a nest of no leaves to torch, which asks for the same one back.
    settings: list[Any] = [[] if list(one) == [] else None for one in (ctx.sizes, ctx.ranks, ctx.dtypes)]
    return found, *settings, None, None, [] if list(ctx.used) == [] else None


_LIBRARY.impl("py_func", _py_func, "CompositeExplicitAutograd")
_LIBRARY.impl("py_func_grad", _py_func_grad, "CompositeExplicitAutograd")
torch.library.register_fake("penstock::py_func", _shapes, lib=_LIBRARY)
torch.library.register_fake("penstock::py_func_grad", _grad_shapes, lib=_LIBRARY)
torch.library.register_autograd("penstock::py_func", _derivative, setup_context=_context, lib=_LIBRARY)

__all__ = ["py_func"]
