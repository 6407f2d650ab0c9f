"""Models of paddlepaddle 2.6.2 whose operators run blocks: `while`, `conditional_block` and `recurrent`.

`written` builds them for `paddle_saves`. Runs in the peer's own environment, which has no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import paddle
from paddle import base, static
from paddle.static import nn

from bench.peers.fluid_models import FEEDS, LEVELS

Written = tuple[str, Any, Any, list[str], Any]
_HIDDEN = 3


def written() -> Iterator[Written]:
    """Iterate over (name, program, startup program, names of feeds, what is fetched)."""
    for name, build, inputs in _MODELS:
        main, startup = static.Program(), static.Program()
        with base.unique_name.guard(), static.program_guard(main, startup):
            fed = [
                static.data(n, [-1, *FEEDS[n].shape[1:]], str(FEEDS[n].dtype), len(LEVELS.get(n, ()))) for n in inputs
            ]
            fetch = build(*fed)
        yield name, main, startup, list(inputs), fetch


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


def _of(type_: str, name: str, dtype: str = "float32", width: int = 1) -> Any:
    """A variable of the block that is written: rows, or an array or a rank table, which belong to the first block."""
    main, kinds = static.default_main_program(), base.core.VarDesc.VarType
    named, kind = base.unique_name.generate(name), getattr(kinds, type_)
    if kind == kinds.LOD_TENSOR:
        return main.current_block().create_var(name=named, dtype=dtype, shape=[-1, width], lod_level=1)
    if kind == kinds.LOD_RANK_TABLE:
        return main.global_block().create_var(name=named, type=kind)
    return main.global_block().create_var(name=named, dtype=dtype, type=kind)


def _op(type_: str, inputs: dict[str, Any], outputs: dict[str, Any], **attrs: Any) -> Any:
    """Append an operator; return its first output."""
    static.default_main_program().current_block().append_op(type=type_, inputs=inputs, outputs=outputs, attrs=attrs)
    return next(iter(outputs.values()))


def _dynamic(words: Any, dense: Any) -> Any:
    """A recurrence over ragged steps as DynamicRNN of 1.8 writes it: a memory from outside, a ragged static input."""
    weight, own = _weight(3, _HIDDEN), _weight(_HIDDEN, _HIDDEN)
    table = _op("lod_rank_table", {"X": words}, {"Out": _of("LOD_RANK_TABLE", "table")}, level=0)
    ranked = {"RankTable": table}
    last = _op("max_sequence_len", ranked, {"Out": _of("LOD_TENSOR", "longest", "int64")})
    steps = _op("lod_tensor_to_array", {"X": words, **ranked}, {"Out": _of("LOD_TENSOR_ARRAY", "steps")})
    first, static_rows = (
        _op("reorder_lod_tensor_by_rank", {"X": x, **ranked}, {"Out": _of("LOD_TENSOR", "ranked", "float32", width)})
        for x, width in ((paddle.matmul(dense, _weight(4, _HIDDEN)), _HIDDEN), (words, 3))
    )
    i = paddle.zeros([1], "int64")
    memory = paddle.tensor.array_write(first, i, _of("LOD_TENSOR_ARRAY", "memory"))
    out, going = _of("LOD_TENSOR_ARRAY", "out"), paddle.less_than(i, last)
    with nn.control_flow.While(going).block():
        now = _op("read_from_array", {"X": steps, "I": i}, {"Out": _of("LOD_TENSOR", "now", "float32", 3)})
        before = _op("read_from_array", {"X": memory, "I": i}, {"Out": _of("LOD_TENSOR", "before", "float32", _HIDDEN)})
        own_rows, before = (
            _op("shrink_rnn_memory", {"X": x, "I": i, **ranked}, {"Out": _of("LOD_TENSOR", "left", "float32", width)})
            for x, width in ((static_rows, 3), (before, _HIDDEN))
        )
        pooled = _of("LOD_TENSOR", "pooled", "float32", 3)
        _op("sequence_pool", {"X": own_rows}, {"Out": pooled, "MaxIndex": _of("LOD_TENSOR", "at", "int32", 3)},
            pooltype="SUM")  # fmt: skip
        h = paddle.tanh(paddle.matmul(now + pooled, weight) + paddle.matmul(before, own))
        paddle.tensor.array_write(h, i, out)
        paddle.increment(i)
        paddle.tensor.array_write(h, i, memory)
        paddle.assign(paddle.less_than(i, last), going)
    return _op("array_to_lod_tensor", {"X": out, **ranked}, {"Out": _of("LOD_TENSOR", "rows", "float32", _HIDDEN)})


def _searched(dense: Any, starts: Any, start_scores: Any) -> Any:
    """Three steps of a beam search of width 2 over 5 words, as the decoders of 1.8 write it."""
    table, own, words = _weight(5, 4), _weight(4, 4), _weight(4, 5)
    i, last = paddle.zeros([1], "int64"), paddle.full([1], 3, "int64")
    ids, scores, states = (_of("LOD_TENSOR_ARRAY", n, d) for n, d in (
        ("ids", "int64"), ("scores", "float32"), ("states", "float32"),
    ))  # fmt: skip
    for x, array in ((starts, ids), (start_scores, scores), (dense, states)):
        paddle.tensor.array_write(x, i, array)
    going = paddle.less_than(i, last)
    with nn.control_flow.While(going).block():
        pre_ids, pre_scores, state = (
            _op("read_from_array", {"X": array, "I": i}, {"Out": _of("LOD_TENSOR", "pre", dtype, width)})
            for array, dtype, width in ((ids, "int64", 1), (scores, "float32", 1), (states, "float32", 4))
        )
        grown = _op("sequence_expand", {"X": state, "Y": pre_scores}, {"Out": _of("LOD_TENSOR", "grown", width=4)},
                    ref_level=-1)  # fmt: skip
        word = _op("lookup_table", {"W": table, "Ids": pre_ids}, {"Out": _of("LOD_TENSOR", "word", width=4)})
        state = paddle.tanh(paddle.matmul(grown, own) + word)
        likely = paddle.nn.functional.softmax(paddle.matmul(state, words))
        best, places = _of("LOD_TENSOR", "best", width=3), _of("LOD_TENSOR", "places", "int64", 3)
        _op("top_k", {"X": likely}, {"Out": best, "Indices": places}, k=3)
        total = paddle.log(best) + pre_scores
        total = _op("lod_reset", {"X": total, "Y": pre_scores}, {"Out": _of("LOD_TENSOR", "total", width=3)})
        chosen, their = _of("LOD_TENSOR", "chosen", "int64"), _of("LOD_TENSOR", "their")
        given = {"pre_ids": pre_ids, "pre_scores": pre_scores, "ids": places, "scores": total}
        _op("beam_search", given, {"selected_ids": chosen, "selected_scores": their,
                                   "parent_idx": _of("LOD_TENSOR", "parent", "int32")},
            level=0, beam_size=2, end_id=1, is_accumulated=True)  # fmt: skip
        paddle.increment(i)
        for x, array in ((chosen, ids), (their, scores), (state, states)):
            paddle.tensor.array_write(x, i, array)
        paddle.assign(paddle.less_than(i, last), going)
    found = _of("LOD_TENSOR", "sentences", "int64"), _of("LOD_TENSOR", "sentence_scores")
    _op("beam_search_decode", {"Ids": ids, "Scores": scores}, {"SentenceIds": found[0], "SentenceScores": found[1]},
        beam_size=2, end_id=1)  # fmt: skip
    return found[1]


_MODELS: list[tuple[str, Callable[..., Any], list[str]]] = [
    ("while", _looped, ["dense"]), ("while and cond", _nested, ["dense"]), ("cond", _chosen, ["dense"]),
    ("case", _cases, ["dense"]), ("recurrent", _stepped(False), ["steps"]), ("backwards", _stepped(True), ["steps"]),
    ("arrays", _collected, ["dense"]), ("dynamic rnn", _dynamic, ["words", "dense"]),
    ("beam search", _searched, ["dense", "starts", "start_scores"]),
]  # fmt: skip
