"""Models of paddlepaddle 2.6.2 whose operators run blocks: `while`, `conditional_block` and `recurrent`.

`written` builds them for `paddle_saves`. Runs in the peer's own environment, which has no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
from paddle import base, static
from paddle.static import nn

from bench.peers.fluid_models import FEEDS

Written = tuple[str, Any, Any, dict[str, np.ndarray], Any]
_HIDDEN = 3


def written() -> Iterator[Written]:
    """Iterate over (name, program, startup program, feeds, what is fetched)."""
    for name, build, inputs in _MODELS:
        main, startup = static.Program(), static.Program()
        with base.unique_name.guard(), static.program_guard(main, startup):
            fed = [static.data(n, [-1, *FEEDS[n].shape[1:]], str(FEEDS[n].dtype)) for n in inputs]
            fetch = build(*fed)
        yield name, main, startup, {n: FEEDS[n] for n in inputs}, fetch


def _weight(*shape: int) -> Any:
    first = paddle.nn.initializer.Normal(0.0, 0.5)
    return static.create_parameter(list(shape), "float32", default_initializer=first)


def _looped(x: Any) -> Any:
    """Three layers of one weight, by a `while` over a counter."""
    weight, last = _weight(4, 4), paddle.full([1], 3, "int64")

    def body(i: Any, h: Any) -> list[Any]:
        return [i + 1, paddle.tanh(paddle.matmul(h, weight))]

    return static.nn.while_loop(lambda i, h: i < last, body, [paddle.zeros([1], "int64"), x])[1]


def _nested(x: Any) -> Any:
    """A `while` whose block has a condition, which halves or doubles."""

    def body(i: Any, h: Any) -> list[Any]:
        grown = static.nn.cond(paddle.mean(h) > 0.1, lambda: h * 0.5, lambda: h * 2.0 + 0.1)
        return [i + 1, grown]

    start = [paddle.zeros([1], "int64"), x]
    return static.nn.while_loop(lambda i, h: i < paddle.full([1], 4, "int64"), body, start)[1]


def _chosen(x: Any) -> Any:
    """One of two layers, by a condition that follows from data."""
    first, second = _weight(4, 2), _weight(4, 2)
    is_large = paddle.max(x) > 0.5
    return static.nn.cond(is_large, lambda: paddle.matmul(x, first), lambda: paddle.matmul(x, second) - 1.0)


def _cases(x: Any) -> Any:
    """The second of three functions, by `case`."""
    largest = paddle.max(x)
    pairs = [(largest > 5.0, lambda: x + 1.0), (largest > 0.5, lambda: x * 3.0)]
    return static.nn.case(pairs, lambda: x - 1.0)


def _stepped(reverse: bool) -> Callable[[Any], Any]:
    """A recurrence with a state, over steps [time, batch, width], as StaticRNN of 1.8 writes it."""

    def build(x: Any) -> Any:
        main = static.default_main_program()
        weight, own = _weight(3, _HIDDEN), _weight(_HIDDEN, _HIDDEN)
        state = paddle.full([4, _HIDDEN], 0.25, "float32")
        outer = main.current_block()
        inner = main._create_block()
        step = inner.create_var(name=x.name, shape=list(x.shape[1:]), dtype="float32")
        before = inner.create_var(name="state@before", shape=[-1, _HIDDEN], dtype="float32")
        after = paddle.tanh(paddle.matmul(step, weight) + paddle.matmul(before, own))
        main._rollback()
        out = outer.create_var(name=after.name, shape=[-1, *after.shape], dtype="float32")
        scopes = outer.create_var(name="scopes", type=base.core.VarDesc.VarType.STEP_SCOPES)
        outer.append_op(
            type="recurrent",
            inputs={"inputs": [x], "initial_states": [state], "parameters": [weight, own]},
            outputs={"outputs": [out], "step_scopes": [scopes]},
            attrs={
                "has_states": True, "ex_states": [before.name], "states": [after.name], "sub_block": inner,
                "reverse": reverse, "is_train": False,
            },
        )  # fmt: skip
        return out

    return build


def _collected(x: Any) -> Any:
    """An array that a loop fills, and of which one element is read."""
    array, i = paddle.tensor.create_array("float32"), paddle.zeros([1], "int64")
    array = paddle.tensor.array_write(x, i, array)
    last = paddle.full([1], 2, "int64")
    going = paddle.less_than(i, last)
    loop = nn.control_flow.While(going)
    with loop.block():
        doubled = paddle.tensor.array_read(array, i) * 2.0
        paddle.increment(i)
        paddle.tensor.array_write(doubled, i, array)
        paddle.assign(paddle.less_than(i, last), going)
    return paddle.tensor.array_read(array, i) + paddle.cast(paddle.tensor.array_length(array), "float32")


_MODELS: list[tuple[str, Callable[..., Any], list[str]]] = [
    ("while", _looped, ["dense"]), ("while and cond", _nested, ["dense"]), ("cond", _chosen, ["dense"]),
    ("case", _cases, ["dense"]), ("recurrent", _stepped(False), ["steps"]), ("backwards", _stepped(True), ["steps"]),
    ("arrays", _collected, ["dense"]),
]  # fmt: skip
