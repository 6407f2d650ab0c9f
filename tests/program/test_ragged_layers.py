"""Layers over ragged rows: values and gradients of a loop over the sequences in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import OperatorError, ProgramError

LENGTHS = [3, 0, 1, 4]
ROWS = sum(LENGTHS)
BATCHES = [LENGTHS, [2, 2, 2, 2], [0, 5, 0, 0]]


class Layer:
    """A layer over rows of a table, the sum of its squares as the loss, and the gradient of the table."""

    def __init__(self, build: Callable[[Any], Any], width: int = 2) -> None:
        self.main, startup, self.scope = fluid.Program(), fluid.Program(), fluid.Scope()
        self.main.random_seed = startup.random_seed = 1
        with fluid.program_guard(self.main, startup):
            ids = fluid.layers.data("ids", [1], dtype="int64", lod_level=1)
            table = fluid.ParamAttr(name="table", initializer=fluid.initializer.Normal(0.0, 1.0, seed=4))
            self.out = build(fluid.layers.embedding(ids, [ROWS, width], param_attr=table, dtype="float64"))
            fluid.append_backward(fluid.layers.reduce_sum(self.out * self.out))
        self.exe = fluid.Executor(fluid.CPUPlace())
        self.exe.run(startup, scope=self.scope)
        self.parameters = {v.name: torch.tensor(np.array(self.scope.find_var(v.name))) for v in self.main.parameters()}
        places = [fluid.CPUPlace()] * 2
        self.shared = fluid.CompiledProgram(self.main.clone(for_test=True)).with_data_parallel(places=places)

    def run(self, lengths: list[int], *, shared: bool = False) -> list[np.ndarray]:
        """The result and the gradient; `shared`: by two replicas, the result alone."""
        feed = {"ids": fluid.create_lod_tensor(np.arange(sum(lengths))[:, None], [lengths])}
        fetches = [self.out] if shared else [self.out, "table@GRAD"]
        return list(self.exe.run(self.shared if shared else self.main, feed, fetches, scope=self.scope))


def split(rows: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    return list(torch.split(rows, lengths))


def compare(build: Any, loop: Any, width: int = 2) -> None:
    """Compare values and gradients with those of `loop(rows, lengths, parameters)`, over batches of other lengths."""
    layer = Layer(build, width)
    for lengths in BATCHES:
        table = layer.parameters["table"].clone().requires_grad_(True)
        wanted = loop(table[: sum(lengths)], lengths, layer.parameters)
        (wanted * wanted).sum().backward()
        assert table.grad is not None
        found, gradient = layer.run(lengths)
        np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(gradient, table.grad.numpy(), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(layer.run(lengths, shared=True)[0], found, rtol=1e-9, atol=1e-12)


def padded_rows(x: torch.Tensor, lengths: list[int], steps: int, value: float = 0.0) -> torch.Tensor:
    parts = [torch.cat([p, torch.full((steps - len(p), x.shape[1]), value, dtype=x.dtype)]) for p in split(x, lengths)]
    return torch.stack(parts)


def windows(x: torch.Tensor, lengths: list[int], first: int, size: int) -> torch.Tensor:
    found = []
    for part in split(x, lengths):
        for row in range(len(part)):
            seen = [
                part[i] if 0 <= i < len(part) else torch.zeros_like(part[0])
                for i in range(row + first, row + first + size)
            ]
            found.append(torch.cat(seen))
    return torch.stack(found)


def test_softmax_reverse_and_steps_are_each_sequences_own() -> None:
    layers = fluid.layers
    compare(
        layers.sequence_softmax,
        lambda x, own, _: torch.cat([p.softmax(0) for p in split(x, own)]), width=1,
    )  # fmt: skip
    compare(layers.sequence_reverse, lambda x, own, _: torch.cat([p.flip(0) for p in split(x, own)]))
    ends = [(layers.sequence_first_step, 0), (layers.sequence_last_step, -1)]
    for layer, row in ends:
        compare(layer, lambda x, own, _, r=row: torch.stack([p[r] if len(p) else 0 * x.sum(0) for p in split(x, own)]))


def test_rows_are_repeated_for_each_row_of_a_sequence() -> None:
    def build(x: Any) -> Any:
        return fluid.layers.sequence_expand(fluid.layers.sequence_pool(x, "sum"), x) + x

    def loop(x: torch.Tensor, own: list[int], _: Any) -> torch.Tensor:
        return torch.cat([p.sum(0, keepdim=True) + p for p in split(x, own)])

    compare(build, loop)


def test_sequences_are_concatenated_one_by_one() -> None:
    def build(x: Any) -> Any:
        both = fluid.layers.sequence_concat([x, fluid.layers.sequence_reverse(x) * 2.0, x])
        return fluid.layers.sequence_concat([fluid.layers.sequence_reverse(both), x])

    def loop(x: torch.Tensor, own: list[int], _: Any) -> torch.Tensor:
        return torch.cat([torch.cat([torch.cat([p, p.flip(0) * 2, p]).flip(0), p]) for p in split(x, own)])

    compare(build, loop)


def test_padding_and_back() -> None:
    def pad(x: Any, maxlen: int | None) -> Any:
        return fluid.layers.sequence_pad(x, fluid.layers.fill_constant([1], "float64", -3.0), maxlen)

    def there_and_back(x: Any) -> Any:
        padded, lengths = pad(x, None)
        return fluid.layers.sequence_unpad(padded * padded, lengths)

    compare(lambda x: pad(x, 6)[0], lambda x, own, _: padded_rows(x, own, 6, -3.0))
    compare(there_and_back, lambda x, own, _: x * x)
    assert Layer(lambda x: pad(x, None)[0]).run(LENGTHS)[0].shape == (4, 4, 2)
    longer = Layer(lambda x: pad(x, 1)[0])
    with pytest.raises(OperatorError, match="lengths of sequence_pad hold 3 at row 0"):
        longer.run(LENGTHS)


def test_a_convolution_sees_its_own_sequence() -> None:
    for size, start in ((3, None), (2, 0), (4, -3)):
        compare(
            lambda x, n=size, s=start: fluid.layers.sequence_conv(x, 3, n, padding_start=s, bias_attr=False),
            lambda x, own, given, n=size, s=start: (
                windows(x, own, -(n // 2) if s is None else s, n) @ given["fc_0.w_0"]
            ),
        )
    compare(
        lambda x: fluid.nets.sequence_conv_pool(x, 3, 3, pool_type="sum", act="tanh", bias_attr=False),
        lambda x, own, given: torch.stack(
            [p.sum(0) for p in split(torch.tanh(windows(x, own, -1, 3) @ given["fc_0.w_0"]), own)]
        ),
    )


def test_rows_are_laid_out_anew() -> None:
    def build(x: Any) -> Any:
        return fluid.layers.sequence_pool(fluid.layers.sequence_reshape(x, 2), "sum")

    compare(build, lambda x, own, _: torch.stack([p.reshape(-1, 2).sum(0) for p in split(x, own)]), width=4)
    uneven = Layer(lambda x: fluid.layers.sequence_pool(fluid.layers.sequence_reshape(x, 4), "sum"))
    with pytest.raises(OperatorError, match="add up to"):
        uneven.run([1, 3, 1, 1])


@pytest.mark.parametrize("is_reverse", [False, True])
def test_recurrent_layers_run_over_each_sequence(is_reverse: bool) -> None:
    def turned(part: torch.Tensor) -> torch.Tensor:
        return part.flip(0) if is_reverse else part

    def lstm(x: torch.Tensor, own: list[int], given: dict[str, torch.Tensor]) -> torch.Tensor:
        weight, found = given["lstm_0.w_0"], []
        for part in split(x, own):
            h = c = torch.zeros(2, dtype=x.dtype)
            steps = []
            for row in turned(part):
                g, i, f, o = (row + given["lstm_0.b_0"][0] + h @ weight).chunk(4)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                steps.append(h)
            found += list(turned(torch.stack(steps))) if steps else []
        return torch.stack(found)

    compare(
        lambda x: fluid.layers.dynamic_lstm(x, 8, use_peepholes=False, is_reverse=is_reverse, dtype="float64")[0],
        lstm, width=8,
    )  # fmt: skip

    def gru(x: torch.Tensor, own: list[int], given: dict[str, torch.Tensor]) -> torch.Tensor:
        flat, found = given["gru_0.w_0"].reshape(-1), []
        of_gates, of_candidate = flat[:8].view(2, 4), flat[8:].view(2, 2)
        for part in split(x, own):
            h, steps = torch.zeros(2, dtype=x.dtype), []
            for row in turned(part):
                own_gates = row + given["gru_0.b_0"][0]
                u, r = (own_gates[:4] + h @ of_gates).sigmoid().chunk(2)
                h = u * h + (1 - u) * (own_gates[4:] + (r * h) @ of_candidate).tanh()
                steps.append(h)
            found += list(turned(torch.stack(steps))) if steps else []
        return torch.stack(found)

    compare(lambda x: fluid.layers.dynamic_gru(x, 2, is_reverse=is_reverse, origin_mode=True), gru, width=6)


def test_ids_are_enumerated_and_masked() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        ids = fluid.layers.data("ids", [1], dtype="int64", lod_level=1)
        seen = fluid.layers.sequence_enumerate(ids, 2, pad_value=9)
        mask = fluid.layers.sequence_mask(fluid.layers.sequence_lengths(ids).reshape(-1), 3, "float32")
    feed = {"ids": [[1, 2, 3], [], [4]]}
    found = fluid.Executor(fluid.CPUPlace()).run(main, feed, [seen, mask])
    assert found[0].tolist() == [[1, 2], [2, 3], [3, 9], [4, 9]]
    assert found[1].tolist() == [[1, 1, 1], [0, 0, 0], [1, 0, 0]]


def test_rows_of_a_padded_batch_have_the_lengths_that_are_fed() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x, length = fluid.data("x", [None, 3, 2], "float64"), fluid.data("length", [None], "int64")
        rows = fluid.layers.sequence_unpad(x, length)
        pooled = fluid.layers.sequence_pool(rows, "sum")
    value, lengths, exe = np.arange(24.0).reshape(4, 3, 2), [3, 0, 1, 2], fluid.Executor(fluid.CPUPlace())
    feed = {"x": value, "length": np.array(lengths)}
    wanted = [part[:own] for part, own in zip(value, lengths, strict=True)]
    found = exe.run(main, feed, [rows], return_numpy=False)[0]
    np.testing.assert_array_equal(np.array(found), np.concatenate(wanted))
    assert found.recursive_sequence_lengths() == [lengths]
    shared = fluid.CompiledProgram(main).with_data_parallel(places=[fluid.CPUPlace()] * 2)
    np.testing.assert_array_equal(exe.run(shared, feed, [pooled])[0], [part.sum(0) for part in wanted])
    with pytest.raises(OperatorError, match="lengths of sequence_unpad hold 4 at row 1"):
        exe.run(main, {**feed, "length": np.array([1, 4, 0, 0])}, [rows])


def test_a_declared_number_of_rows_says_nothing_of_sequences() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = fluid.data("x", [10, 1], "float64", lod_level=1)
        summed = fluid.layers.sequence_pool(x, "sum")
        assert fluid.data("x", [10, 1], "float64", lod_level=1).name == x.name
        main = fluid.default_main_program()
    fed = fluid.create_lod_tensor(np.arange(3.0)[:, None], [[2, 1]])
    (found,) = fluid.Executor(fluid.CPUPlace()).run(main, {"x": fed}, [summed])
    assert found.tolist() == [[1.0], [2.0]]


def test_what_has_no_sequences_is_refused() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = fluid.layers.data("x", [2], dtype="float64")
        y = fluid.layers.data("y", [2], dtype="float64", lod_level=1)
        with pytest.raises(ProgramError, match="sequence_reverse needs ragged rows"):
            fluid.layers.sequence_reverse(x)
        with pytest.raises(ProgramError, match="Pool them first"):
            fluid.layers.sequence_expand_as(y, y)
        with pytest.raises(ProgramError, match="follows from data"):
            fluid.layers.dynamic_gru(fluid.layers.fc(fluid.layers.sequence_concat([y, y]), 6), 2)
