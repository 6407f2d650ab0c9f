"""Chunks: counted by the letters of their tags (an oracle of its own), ragged, padded and over the runs of a pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import OperatorError, ProgramError
from penstock.native.chunks import SCHEMES, chunks_of

L: Any = fluid.layers
LENGTHS = [4, 0, 1, 5]
LETTERS = {"IOB": "BI", "IOE": "IE", "IOBES": "BIES", "plain": "I"}


def spelled(tags: Sequence[int], scheme: str, num_types: int) -> set[tuple[int, int, int]]:
    """The chunks of tags by a reading of their letters: maximal runs of one type that no letter cuts."""
    letters = LETTERS[scheme]
    words = [
        ("O", -1) if t == num_types * len(letters) else (letters[t % len(letters)], t // len(letters)) for t in tags
    ]
    found, start = set(), None
    for i, (letter, type_) in enumerate(words):
        before, old = words[i - 1] if i else ("O", -1)
        cut = letter in "BS" or before in "ES"
        if start is not None and (type_ != old or cut):
            found.add((start, i - 1, old))
            start = None
        if letter != "O" and start is None:
            start = i
    return found if start is None else found | {(start, len(words) - 1, words[-1][1])}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_chunks_are_those_that_the_letters_spell(scheme: str) -> None:
    kinds = SCHEMES[scheme]
    for tags in itertools.product(range(2 * kinds.number + 1), repeat=4 if kinds.number < 4 else 3):
        assert chunks_of(tags, kinds, 2) == spelled(tags, scheme, 2), tags


def batch(seed: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    label = draw.integers(0, 7, (sum(LENGTHS), 1))
    return np.where(draw.random(label.shape) < 0.7, label, draw.integers(0, 7, label.shape)), label


def counts(input: np.ndarray, label: np.ndarray, excluded: Sequence[int] = ()) -> list[int]:
    parts = [np.split(x.reshape(-1), np.cumsum(LENGTHS)[:-1]) for x in (input, label)]
    found = [[spelled(p.tolist(), "IOB", 3) for p in each] for each in parts]
    kept = [[{c for c in chunks if c[2] not in excluded} for chunks in each] for each in found]
    both = sum(len(a & b) for a, b in zip(*kept, strict=True))
    return [sum(map(len, kept[0])), sum(map(len, kept[1])), both]


def expected(found: int, there: int, both: int) -> list[float]:
    precision, recall = both / found, both / there
    return [precision, recall, 2 * precision * recall / (precision + recall), found, there, both]


@pytest.mark.parametrize("excluded", [None, [1]])
def test_ragged_chunks_are_counted(excluded: list[int] | None) -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        tags = [L.data(name, [1], dtype="int64", lod_level=1) for name in ("input", "label")]
        results = list(L.chunk_eval(*tags, "IOB", 3, excluded))
    input, label = batch(1)
    feed = {name: fluid.create_lod_tensor(x, [LENGTHS]) for name, x in (("input", input), ("label", label))}
    got = fluid.Executor().run(main, feed, results)
    np.testing.assert_allclose(np.concatenate(got), expected(*counts(input, label, excluded or ())), rtol=1e-6)
    assert [str(v.dtype) for v in got] == ["float32"] * 3 + ["int64"] * 3
    assert [v.shape for v in got] == [(1,)] * 6


def test_padded_chunks_are_counted_up_to_their_lengths() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        tags = [fluid.data(name, [None, 5, 1], "int64") for name in ("input", "label")]
        results = list(L.chunk_eval(*tags, "IOB", 3, seq_length=fluid.data("length", [None], "int64")))
    input, label = batch(2)
    feed = {name: np.zeros((4, 5, 1), np.int64) for name in ("input", "label")}
    for name, x in (("input", input), ("label", label)):
        for row, part in zip(feed[name], np.split(x, np.cumsum(LENGTHS)[:-1]), strict=True):
            row[: len(part)] = part
    got = fluid.Executor().run(main, {**feed, "length": np.array(LENGTHS)}, results)
    np.testing.assert_allclose(np.concatenate(got), expected(*counts(input, label)), rtol=1e-6)


def test_nothing_found_is_zero() -> None:
    call = torch.ops.penstock.chunk_eval
    outside, length = torch.full((3, 1), 6), torch.tensor([3])
    assert call(outside, outside, length, "IOB", 3, []).tolist() == [0, 0, 0]
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        tags = [L.data(name, [1], dtype="int64", lod_level=1) for name in ("input", "label")]
        results = list(L.chunk_eval(*tags, "IOB", 3))
    feed = dict.fromkeys(("input", "label"), fluid.create_lod_tensor(outside.numpy(), [[3]]))
    assert [float(v[0]) for v in fluid.Executor().run(main, feed, results)] == [0.0] * 6


def test_an_evaluator_sums_the_runs_of_a_pass() -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        tags = [L.data(name, [1], dtype="int64", lod_level=1) for name in ("input", "label")]
        evaluator = fluid.evaluator.ChunkEvaluator(*tags, "IOB", 3)
    with fluid.scope_guard(fluid.Scope()):
        exe = fluid.Executor()
        with pytest.raises(ProgramError, match="run the startup program first"):
            evaluator.reset(exe)
        exe.run(startup)
        for seeds in ((1,), (2, 3)):
            evaluator.reset(exe)
            for seed in seeds:
                feed = {
                    n: fluid.create_lod_tensor(x, [LENGTHS])
                    for n, x in zip(("input", "label"), batch(seed), strict=True)
                }
                run = exe.run(main, feed, evaluator.metrics)
            total = np.sum([counts(*batch(seed)) for seed in seeds], 0).tolist()
            np.testing.assert_allclose(np.concatenate(evaluator.eval(exe)), expected(*total)[:3], rtol=1e-6)
        np.testing.assert_allclose(np.concatenate(run), expected(*counts(*batch(3)))[:3], rtol=1e-6)


def test_tags_that_are_none_are_refused() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        tags = [L.data(name, [1], dtype="int64", lod_level=1) for name in ("input", "label")]
        dense = L.data("dense", [1], dtype="int64")
        results = list(L.chunk_eval(*tags, "IOB", 3))
        with pytest.raises(ProgramError, match="chunk_scheme is 'BIO'; expected one of IOB, IOE, IOBES, plain"):
            L.chunk_eval(*tags, "BIO", 3)
        with pytest.raises(ProgramError, match="needs ragged rows"):
            L.chunk_eval(dense, dense, "IOB", 3)
        with pytest.raises(ProgramError, match="chunk_eval needs ids"):
            L.chunk_eval(L.cast(dense, "float32"), dense, "IOB", 3)
    feed = dict.fromkeys(("input", "label"), fluid.create_lod_tensor(np.full((2, 1), 7), [[2]]))
    with pytest.raises(OperatorError, match="expected 0 to 6"):
        fluid.Executor().run(main, {**feed, "dense": np.zeros((1, 1), np.int64)}, results)


def test_edit_distances_are_summed_over_runs() -> None:
    with fluid.program_guard(main := fluid.Program(), startup := fluid.Program()):
        found, label = (fluid.layers.data(name, [1], dtype="int64", lod_level=1) for name in ("found", "label"))
        evaluator = fluid.evaluator.EditDistance(found, label)
    exe, scope = fluid.Executor(fluid.CPUPlace()), fluid.Scope()
    with fluid.scope_guard(scope):
        exe.run(startup)
        for last in (3, 4, 3):
            rows = [np.array([[1], [2], [last]]), np.array([[1], [2], [3]])]
            feed = {
                name: fluid.create_lod_tensor(x, [[2, 1]]) for name, x in zip(("found", "label"), rows, strict=True)
            }
            total, wrong = exe.run(main, feed, evaluator.metrics)
            assert (float(total[0]), int(wrong[0])) == ((1.0, 1) if last == 4 else (0.0, 0))
        distance, share = evaluator.eval(exe)
        np.testing.assert_allclose([distance[0], share[0]], [1 / 6, 1 / 6])
        evaluator.reset(exe)
        assert np.isnan(evaluator.eval(exe)[0][0])
