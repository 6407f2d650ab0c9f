"""`sequence_pad` and `sequence_unpad` where no input has the sequences, against a loop over them in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import OperatorError

WIDTH = 2


def rows(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, WIDTH))


def test_sequences_that_were_joined_are_padded_to_the_longest() -> None:
    layers, main = fluid.layers, fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x, y = (layers.data(name, [WIDTH], dtype="float64", lod_level=1, stop_gradient=False) for name in "xy")
        padded, lengths = layers.sequence_pad(layers.sequence_concat([x, y]), layers.fill_constant([1], "float64", 0.5))
        scores = layers.softmax(layers.matmul(padded, padded, transpose_y=True))
        pooled = layers.reduce_sum(layers.matmul(scores, padded), dim=1)
        gradients = fluid.gradients(layers.reduce_sum(pooled * pooled), [x, y])
    exe = fluid.Executor(fluid.CPUPlace())
    for own in ([[3, 1], [1, 2]], [[0, 1, 2], [1, 1, 5]]):
        values = [rows(seed, sum(one)) for seed, one in enumerate(own)]
        given = zip("xy", values, own, strict=True)
        feed = {name: fluid.create_lod_tensor(value, [one]) for name, value, one in given}
        found = exe.run(main, feed, [padded, lengths, pooled, *gradients])
        wanted = [torch.tensor(value, requires_grad=True) for value in values]
        joined = [torch.cat(pair) for pair in zip(*map(torch.split, wanted, own), strict=True)]
        longest = max(map(len, joined))
        filled = [torch.cat([one, torch.full([longest - len(one), WIDTH], 0.5, dtype=one.dtype)]) for one in joined]
        batch = torch.stack(filled)
        expected = (torch.softmax(batch @ batch.transpose(1, 2), -1) @ batch).sum(1)
        (expected * expected).sum().backward()  # type: ignore[no-untyped-call]  # torch
        np.testing.assert_array_equal(found[0], batch.detach().numpy())
        assert found[1].tolist() == [len(one) for one in joined]
        np.testing.assert_allclose(found[2], expected.detach().numpy(), rtol=1e-12)
        for name, tensor in zip(found[3:], wanted, strict=True):
            assert tensor.grad is not None
            np.testing.assert_allclose(name, tensor.grad.numpy(), rtol=1e-9, atol=1e-12)


def test_rows_are_unpadded_by_lengths_that_are_computed() -> None:
    layers, main = fluid.layers, fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = fluid.data("x", [None, 3, WIDTH], "float64")
        x.stop_gradient = False
        length = layers.data("length", [1], dtype="int64")
        own = layers.sequence_unpad(x, layers.squeeze(length, [1]) + 1)
        pooled = layers.sequence_pool(own * own, "sum")
        (gradient,) = fluid.gradients(layers.reduce_sum(pooled), x)
    value, exe = rows(4, 9).reshape(3, 3, WIDTH), fluid.Executor(fluid.CPUPlace())
    found = exe.run(main, {"x": value, "length": np.array([[0], [2], [1]])}, [own, pooled, gradient])
    kept = [value[0, :1], value[1, :3], value[2, :2]]
    np.testing.assert_array_equal(found[0], np.concatenate(kept))
    np.testing.assert_allclose(found[1], [(one**2).sum(0) for one in kept], rtol=1e-12)
    inside = np.arange(3)[None, :, None] < np.array([1, 3, 2])[:, None, None]
    np.testing.assert_allclose(found[2], np.where(inside, 2 * value, 0.0), rtol=1e-12)
    with pytest.raises(OperatorError, match="expected 0 to 3, the steps of its input"):
        exe.run(main, {"x": value, "length": np.array([[0], [3], [1]])}, [own])


def test_rows_of_a_ragged_input_are_unpadded_by_lengths() -> None:
    layers, main = fluid.layers, fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = fluid.data("x", [None, 3], "float64", lod_level=1)
        length = fluid.data("length", [None], "int64")
        pooled = layers.sequence_pool(layers.sequence_unpad(layers.unsqueeze(x, [2]), length), "sum")
    loader = fluid.io.DataLoader.from_generator(feed_list=[x, length], capacity=2)
    value = rows(5, 6).reshape(4, 3)
    loader.set_sample_list_generator(lambda: iter([[(value.tolist(), [1, 3, 2, 1])]]), places=fluid.CPUPlace())
    (feed,) = loader()
    (found,) = fluid.Executor(fluid.CPUPlace()).run(main, feed, [pooled])
    wanted = [value[row, :length].sum() for row, length in enumerate([1, 3, 2, 1])]
    np.testing.assert_allclose(found[:, 0], wanted, rtol=1e-12)
