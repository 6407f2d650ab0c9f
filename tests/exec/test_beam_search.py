"""Beam search in a While over arrays: its kernels by hand, and a whole decoder against a search over lists."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import ProgramError
from penstock.program.control import beam_search

L = fluid.layers
END, WORDS, BEAMS = 2, 6, 2


def column(values: Sequence[float], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).reshape(-1, 1)


def chosen(found: tuple[torch.Tensor, ...]) -> list[list[Any]]:
    return [part.reshape(-1).tolist() for part in found]


def step(pre: list[int], scores: list[list[float]], levels: list[list[int]], **changes: Any) -> list[list[Any]]:
    settings: dict[str, Any] = {"level": 0, "beam_size": 2, "end_id": END, "is_accumulated": True} | changes
    before = column([0.5] * len(pre), torch.float64)
    given = (column(pre), before, None, torch.tensor(scores, dtype=torch.float64), [column(level) for level in levels])
    return chosen(beam_search.step(*given, **settings))


def test_each_source_takes_its_best_whatever_they_continue() -> None:
    scores = [[0.1, 0.9, 0.2], [0.8, 0.3, 0.0], [0.4, 0.5, 0.6]]
    ids, values, rows, sources, inner = step([5, 6, 7], scores, [[2, 1], [1, 1, 1]])
    assert (ids, values, rows) == ([1, 0, 2, 1], [0.9, 0.8, 0.6, 0.5], [0, 1, 2, 2])
    assert (sources, inner) == ([2, 1], [1, 1, 2])


def test_a_prefix_that_has_ended_is_continued_by_its_end_alone() -> None:
    ids, values, rows, _, inner = step([END, 6], [[0.9, 0.9, 0.9], [0.2, 0.1, 0.7]], [[2], [1, 1]])
    assert (ids, values, rows, inner) == ([END, END], [0.5, 0.7], [0, 1], [1, 1])
    ids, _, _, sources, inner = step([END, END, 4], [[1.0, 0.0]] * 3, [[2, 1], [1, 1, 1]])
    assert (ids, sources, inner) == ([0, 1], [2, 1], [0, 0, 2])  # the first source is over


def test_levels_ties_and_probabilities() -> None:
    scores = [[0.5, 0.5], [0.5, 0.1]]
    assert step([5, 6], scores, [[1, 1], [1, 1]], level=1)[0] == [0, 1, 0, 1]  # each prefix for itself
    assert step([5, 6], scores, [[2], [1, 1]])[2] == [0, 1]  # of equal scores the later row is better
    _, values, *_ = step([5], [[0.25, 0.75]], [[1]], beam_size=1, is_accumulated=False)
    np.testing.assert_allclose(values, [0.5 + math.log(0.75)], rtol=1e-12)
    with pytest.raises(ValueError, match="sequences have 3 rows, scores 2"):
        step([5, 6], scores, [[3]])


def test_sentences_are_traced_back_and_sorted() -> None:
    parts = [  # ids, scores, prefixes of each source, candidates of each prefix
        ([3, 4], [0.0, 0.0], [1, 1], [1, 1]),
        ([5, 6, END, 7], [0.1, 0.4, 0.3, 0.2], [1, 1], [2, 2]),
        ([8, END, END, 9], [0.9, 0.5, 0.3, 0.8], [2, 2], [1, 1, 1, 1]),
    ]
    ids, values, outer, inner = (
        [column(p[i], torch.float64 if i == 1 else torch.int64) for p in parts] for i in range(4)
    )
    words, scores, sources, lengths = chosen(beam_search.sentences(ids, values, outer, inner, 2, END))
    assert words == [3, 5, 8, 3, 6, END, 4, 7, 9, 4, END]
    assert scores == [0.0, 0.1, 0.9, 0.0, 0.4, 0.5, 0.0, 0.2, 0.8, 0.0, 0.3]
    assert (sources, lengths) == ([2, 2], [3, 3, 3, 2])


# ---------------------------------------------------------------- a decoder in a While


def attr(name: str, seed: int) -> Any:
    return fluid.ParamAttr(name=name, initializer=fluid.initializer.Normal(0.0, 1.5, seed=seed))


def decoder(most: int) -> list[Any]:
    state = L.data("state", [4], dtype="float64")
    ids = L.data("ids", [1], dtype="int64", lod_level=2)
    scores = L.data("scores", [1], dtype="float64", lod_level=2)
    i, n = L.zeros([1], "int64"), L.fill_constant([1], "int64", most)
    states, all_ids, all_scores = (L.array_write(one, i) for one in (state, ids, scores))
    going = L.less_than(i, n)
    with L.While(going).block():
        pre_ids, pre_state, pre_scores = (L.array_read(one, i) for one in (all_ids, states, all_scores))
        word = L.embedding(pre_ids, [WORDS, 3], param_attr=attr("table", 1), dtype="float64")
        own = L.sequence_expand(pre_state, pre_scores)
        new = L.fc([own, word], 4, act="tanh", param_attr=[attr("w", 2), attr("v", 3)], bias_attr=False)
        shares = L.fc(L.lod_reset(new, pre_scores), WORDS, act="softmax", param_attr=attr("u", 11), bias_attr=False)
        best, at = L.topk(shares, BEAMS)
        total = L.elementwise_add(L.log(best), L.reshape(pre_scores, [-1]), axis=0)
        chosen, values = L.beam_search(pre_ids, pre_scores, at, total, BEAMS, END)
        L.increment(i)
        for one, array in ((new, states), (chosen, all_ids), (values, all_scores)):
            L.array_write(one, i, array)
        L.logical_and(L.less_than(i, n), L.logical_not(L.is_empty(chosen)), out=going)
    return [*L.beam_search_decode(all_ids, all_scores, BEAMS, END), L.array_length(all_ids)]


class Built:
    def __init__(self, build: Callable[[], list[Any]]) -> None:
        self.main, startup, self.scope = fluid.Program(), fluid.Program(), fluid.Scope()
        with fluid.program_guard(self.main, startup):
            self.fetches = build()
        self.exe = fluid.Executor(fluid.CPUPlace())
        self.exe.run(startup, scope=self.scope)
        self.value = {v.name: torch.tensor(np.array(self.scope.find_var(v.name))) for v in self.main.parameters()}

    def run(self, states: np.ndarray, program: Any = None, **kwargs: Any) -> list[Any]:
        ones = [[1] * len(states)] * 2
        feed = {
            "state": states,
            "ids": fluid.create_lod_tensor(np.zeros((len(states), 1), np.int64), ones),
            "scores": fluid.create_lod_tensor(np.zeros((len(states), 1)), ones),
        }
        return list(self.exe.run(program or self.main, feed, self.fetches, scope=self.scope, **kwargs))


def searched(value: dict[str, torch.Tensor], state: torch.Tensor, most: int) -> list[tuple[list[int], float]]:
    """The sentences of one source, best first."""
    beams = [([0], 0.0, state)]
    for _ in range(most):
        if all(words[-1] == END and words[-2:-1] == [END] for words, *_ in beams):
            break
        grown = []
        for words, score, old in beams:
            if words[-1] == END:
                grown.append(([*words, END], score, old))
                continue
            new = torch.tanh(old @ value["w"] + value["table"][words[-1]] @ value["v"])
            logs = torch.log_softmax(new @ value["u"], -1)
            grown += [([*words, w], score + float(logs[w]), new) for w in range(WORDS)]
        beams = sorted(grown, key=lambda beam: -beam[1])[:BEAMS]
    return [(words[: words.index(END) + 1] if END in words else words, score) for words, score, _ in beams]


def test_a_decoder_in_a_while_equals_a_search_over_lists() -> None:
    most = 8
    built = Built(lambda: decoder(most))
    assert fluid.Program.parse(str(built.main)) == built.main
    states = np.random.default_rng(2).normal(size=(5, 4))
    ids, scores, steps = built.run(states, return_numpy=False)
    sources, lengths = ids.recursive_sequence_lengths()
    assert sources == [BEAMS] * len(states)
    assert scores.recursive_sequence_lengths() == [sources, lengths]
    assert 2 < int(np.array(steps)[0]) <= most + 1
    wanted = [found for state in states for found in searched(built.value, torch.tensor(state), most)]
    assert [part.tolist() for part in np.split(np.array(ids), np.cumsum(lengths)[:-1])] == [w for w, _ in wanted]
    last = np.array(scores)[np.cumsum(lengths) - 1]
    np.testing.assert_allclose(last, [score for _, score in wanted], rtol=1e-9)
    assert len({len(words) for words, _ in wanted}) > 1


def test_replicas_decode_their_own_sources() -> None:
    built = Built(lambda: decoder(4))
    states = np.random.default_rng(3).normal(size=(4, 4))
    whole = built.run(states)
    places = [fluid.CPUPlace()] * 2
    shared = fluid.CompiledProgram(built.main).with_data_parallel(places=places)
    for one, other in zip(built.run(states, program=shared), whole, strict=True):
        np.testing.assert_array_equal(one[: len(other)], other)


def test_refusals_say_what_to_use() -> None:
    def outside() -> list[Any]:
        x = L.data("x", [1], dtype="float64", lod_level=2)
        return [L.beam_search(x, x, None, x, BEAMS, END)]

    def without_levels() -> list[Any]:
        x, i = L.data("x", [1], dtype="float64"), L.zeros([1], "int64")
        return list(L.beam_search_decode(L.array_write(x, i), L.array_write(x, i), BEAMS, END))

    with pytest.raises(ProgramError, match="beam_search stands in a block, such as a While's"):
        Built(outside)
    with pytest.raises(ProgramError, match=r"beam_search_decode needs arrays .* lod_level=2"):
        Built(without_levels)
