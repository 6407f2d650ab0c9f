"""Conditional random fields in Programs: ragged, padded and on replicas, by the operators that an oracle has tested."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import OperatorError, ProgramError

LENGTHS = [3, 0, 1, 4]
OPS: Any = torch.ops.penstock


def field(*, decodes: bool = True) -> tuple[fluid.Program, fluid.Scope, list[Any]]:
    main, startup, scope = fluid.Program(), fluid.Program(), fluid.Scope()
    with fluid.program_guard(main, startup):
        x = fluid.layers.data("x", [3], dtype="float64", lod_level=1, stop_gradient=False)
        label = fluid.layers.data("label", [1], dtype="int64", lod_level=1)
        cost = fluid.layers.linear_chain_crf(x, label, fluid.ParamAttr("way"))
        fluid.append_backward(fluid.layers.mean(cost))
        fetches = [cost, fluid.layers.crf_decoding(x, fluid.ParamAttr("way"))] if decodes else [cost]
        fetches += [fluid.layers.crf_decoding(x, fluid.ParamAttr("way"), label)] if decodes else []
    fluid.Executor().run(startup, scope=scope)
    return main, scope, fetches


def batch() -> dict[str, Any]:
    rows = np.random.default_rng(1).normal(size=(sum(LENGTHS), 3))
    tags = np.arange(sum(LENGTHS))[:, None] % 3
    return {name: fluid.create_lod_tensor(part, [LENGTHS]) for name, part in (("x", rows), ("label", tags))}


def test_a_field_over_ragged_rows_is_trained_and_decoded() -> None:
    main, scope, fetches = field()
    feed = batch()
    wanted = [torch.from_numpy(np.array(feed[name])) for name in ("x", "label")]
    way = torch.tensor(np.array(scope.find_var("way")), requires_grad=True)
    cost, _ = OPS.linear_chain_crf(wanted[0], way, wanted[1], torch.tensor(LENGTHS))
    cost.mean().backward()
    path = OPS.crf_decoding(wanted[0], way.detach(), torch.tensor(LENGTHS))
    got = fluid.Executor().run(main, feed, [*fetches, "way@GRAD"], scope=scope, return_numpy=False)
    np.testing.assert_allclose(got[0], cost.detach(), rtol=1e-12)
    np.testing.assert_array_equal(got[1], path)
    np.testing.assert_array_equal(got[2], (path == wanted[1]).long())
    assert way.grad is not None
    np.testing.assert_allclose(got[3], way.grad, rtol=1e-12)
    assert got[1].recursive_sequence_lengths() == [LENGTHS]


def test_replicas_share_the_sequences_of_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    main, scope, fetches = field()
    compiled = fluid.CompiledProgram(main.clone(for_test=True)).with_data_parallel()
    alone = fluid.Executor().run(main, batch(), fetches, scope=scope)
    shared = fluid.Executor().run(compiled, batch(), fetches, scope=scope)
    for one, other in zip(alone, shared, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def test_a_padded_field_costs_what_its_rows_do() -> None:
    main, scope, fetches = field(decodes=False)
    (ragged,) = fluid.Executor().run(main, batch(), fetches, scope=scope)
    padded, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(padded, startup):
        x, label = fluid.data("x", [None, 5, 3], "float64"), fluid.data("label", [None, 5], "int64")
        length = fluid.data("length", [None, 1], "int64")
        cost = fluid.layers.linear_chain_crf(x, label, fluid.ParamAttr("way"), length)
        path = fluid.layers.crf_decoding(x, fluid.ParamAttr("way"), length=length)
    rows, tags = np.zeros((4, 5, 3)), np.full((4, 5), -1)
    for value, name in ((rows, "x"), (tags, "label")):
        parts = np.split(np.array(batch()[name]), np.cumsum(LENGTHS)[:-1])
        for row, part in enumerate(parts):
            value[row, : len(part)] = part.reshape(len(part), *value.shape[2:])
    feed = {"x": rows, "label": tags, "length": np.array(LENGTHS)[:, None]}
    got = fluid.Executor().run(padded, feed, [cost, path], scope=scope)
    np.testing.assert_allclose(got[0], ragged, rtol=1e-12)
    assert got[1].shape == (4, 5, 1)


def test_what_is_no_tag_or_no_field_is_refused() -> None:
    main, scope, fetches = field(decodes=False)
    wrong = batch()
    wrong["label"].rows[2] = 3
    with pytest.raises(OperatorError, match="labels are 0 to 3; expected 0 to 2"):
        fluid.Executor().run(main, wrong, fetches, scope=scope)
    with fluid.program_guard(main):
        x = main.global_block().var("x")
        with pytest.raises(ProgramError, match="'other', which no linear_chain_crf has made"):
            fluid.layers.crf_decoding(x, fluid.ParamAttr("other"))
        with pytest.raises(ProgramError, match="needs ragged rows"):
            fluid.layers.linear_chain_crf(fluid.data("y", [None, 3]), fluid.data("t", [None, 1], "int64"))
