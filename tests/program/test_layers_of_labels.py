"""Temporal classification, distances of labels and LSTMs in other forms: against torch step by step; refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.program.layer_cases import Case, compare

import penstock as fluid
from penstock.errors import OperatorError, ProgramError
from penstock.scope import Scope

L: Any = fluid.layers
PLACE = fluid.CPUPlace()
LABELS, SIZES = np.array([[1], [1], [3], [2]]), [[2, 1, 1]]
STEPS = [[5, 2, 3]]


def ran(build: Callable[[], list[Any]], feed: dict[str, Any]) -> tuple[list[Any], Scope]:
    """Record what `build` makes and run it; return (its values, its scope)."""
    main, startup, scope = fluid.Program(), fluid.Program(), Scope()
    startup.random_seed = 4
    with fluid.program_guard(main, startup):
        made = build()
    exe = fluid.Executor(PLACE)
    exe.run(startup, scope=scope)
    return exe.run(main, feed, made, scope=scope, return_numpy=False), scope


def _trained(rows: Any, loss: Callable[[Any], Any]) -> list[Any]:
    """What the loss is, and the gradient of what the rows are multiplied by."""
    factor = L.create_parameter([4], "float64", "factor", default_initializer=fluid.initializer.Constant(1.0))
    found = loss(rows * factor)
    return [found, *(grad for _, grad in fluid.append_backward(L.reduce_sum(found)))]


def _wanted(x: torch.Tensor, by_times: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    factor = torch.ones(4, dtype=torch.float64, requires_grad=True)
    logs = torch.split(torch.log_softmax(x * factor, 1), STEPS[0])
    labels = torch.split(torch.from_numpy(LABELS[:, 0]), SIZES[0])
    each = [
        F.ctc_loss(one[:, None], of[None], torch.tensor([len(one)]), torch.tensor([len(of)]), reduction="sum")
        for one, of in zip(logs, labels, strict=True)
    ]
    weights = [1 / len(one) if by_times else 1.0 for one in logs]
    sum(loss * w for loss, w in zip(each, weights, strict=True)).backward()  # type: ignore[union-attr]  # a tensor
    assert factor.grad is not None
    return torch.stack(each).detach()[:, None], factor.grad


@pytest.mark.parametrize("by_times", [False, True])
def test_warpctc_of_ragged_rows_is_torch_sequence_by_sequence(by_times: bool) -> None:
    x = np.random.default_rng(1).normal(size=(10, 4))

    def build() -> list[Any]:
        rows = L.data("x", [4], dtype="float64", lod_level=1)
        label = L.data("label", [1], dtype="int32", lod_level=1)
        return _trained(rows, lambda x: L.warpctc(x, label, norm_by_times=by_times))

    labels = fluid.create_lod_tensor(LABELS.astype("int32"), SIZES, PLACE)
    (loss, grad), _ = ran(build, {"x": fluid.create_lod_tensor(x, STEPS, PLACE), "label": labels})
    wanted, gradient = _wanted(torch.from_numpy(x), by_times)
    torch.testing.assert_close(loss.rows, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(grad.rows, gradient, rtol=1e-10, atol=1e-12)


def _steps_of_ctc(num_replicas: int, reduce: str) -> tuple[list[Any], Any]:
    """Six steps of SGD on logits that a layer computes of ragged rows; return (losses of the steps, the weight)."""
    main, startup, scope = fluid.Program(), fluid.Program(), Scope()
    startup.random_seed = 3
    with fluid.program_guard(main, startup):
        rows = L.data("x", [4], dtype="float64", lod_level=1)
        label = L.data("label", [1], dtype="int32", lod_level=1)
        loss = L.reduce_mean(L.warpctc(L.fc(rows, 5, param_attr="w", bias_attr=False), label, norm_by_times=True))
        fluid.optimizer.SGD(0.5).minimize(loss)
    exe = fluid.Executor(PLACE)
    exe.run(startup, scope=scope)
    build = fluid.BuildStrategy()
    build.reduce_strategy = getattr(fluid.BuildStrategy.ReduceStrategy, reduce)
    program = fluid.CompiledProgram(main).with_data_parallel(loss.name, build, places=[PLACE] * num_replicas)
    steps, sizes = [[5, 2, 3, 4]], [[2, 1, 1, 3]]
    feed = {
        "x": fluid.create_lod_tensor(np.random.default_rng(5).normal(size=(14, 4)), steps, PLACE),
        "label": fluid.create_lod_tensor(np.array([[1], [1], [3], [2], [1], [4], [2]], "int32"), sizes, PLACE),
    }
    losses = [np.mean(exe.run(program, feed, [loss], scope=scope)[0]) for _ in range(6)]
    return losses, np.array(scope.find_var("w"))


@pytest.mark.parametrize("reduce", ["AllReduce", "Reduce"])
def test_warpctc_trains_alike_on_one_replica_and_two(reduce: str) -> None:
    losses, weight = _steps_of_ctc(1, reduce)
    assert losses[-1] < 0.8 * losses[0]
    found, other = _steps_of_ctc(2, reduce)
    np.testing.assert_allclose(found, losses, rtol=1e-12)
    np.testing.assert_allclose(other, weight, rtol=1e-12, atol=1e-14)


def test_warpctc_of_a_padded_batch_does_not_read_beyond_the_ends() -> None:
    x = np.random.default_rng(1).normal(size=(10, 4))
    batch, labels = np.full((5, 3, 4), 9.0), np.full((3, 3), 2)
    for i, (one, of) in enumerate(zip(np.split(x, [5, 7]), np.split(LABELS[:, 0], [2, 3]), strict=True)):
        batch[: len(one), i], labels[i, : len(of)] = one, of

    def build() -> list[Any]:
        lengths = [fluid.data(n, [-1, 1], "int64") for n in ("steps", "sizes")]
        label = fluid.data("label", [-1, 3], "int64")
        inputs = L.transpose(fluid.data("x", [-1, 5, 4], "float64"), [1, 0, 2])
        return _trained(inputs, lambda x: L.warpctc(x, label, 0, False, *lengths))

    feed = {"x": batch.transpose(1, 0, 2), "label": labels, "steps": np.array(STEPS).T, "sizes": np.array(SIZES).T}
    (loss, grad), _ = ran(build, feed)
    wanted, gradient = _wanted(torch.from_numpy(x))
    torch.testing.assert_close(loss.rows, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(grad.rows, gradient, rtol=1e-10, atol=1e-12)
    with pytest.raises(OperatorError, match="lengths are 5 to 6; expected 0 to 5"):
        ran(build, {**feed, "steps": np.array([[5], [6], [5]])})


def test_the_greedy_decoder_drops_repetitions_and_blanks() -> None:
    best = np.array([[1, 1, 0, 1, 2, 2], [0, 2, 2, 0, 0, 3], [3, 3, 1, 1, 1, 1]])
    x = np.eye(4)[best] + np.random.default_rng(0).random((3, 6, 4)) * 0.5

    def build() -> list[Any]:
        inputs = fluid.data("x", [-1, 6, 4], "float64"), fluid.data("lengths", [-1, 1], "int64")
        return list(L.ctc_greedy_decoder(inputs[0], 0, inputs[1], padding_value=-1))

    (found, lengths), _ = ran(build, {"x": x, "lengths": np.array([[6], [5], [2]])})
    assert found.rows.tolist() == [[1, 1, 2, -1, -1, -1], [2, -1, -1, -1, -1, -1], [3, -1, -1, -1, -1, -1]]
    assert lengths.rows.tolist() == [[3], [1], [1]]


def test_greedy_labels_of_ragged_rows_are_ragged() -> None:
    best = [0, 1, 1, 0, 1, 2, 2, 2, 0, 0, 0, 3]
    sizes = [[6, 2, 3, 1]]

    def build() -> list[Any]:
        found = L.ctc_greedy_decoder(L.data("x", [4], dtype="float64", lod_level=1), 0)
        label = L.data("label", [1], dtype="int64", lod_level=1)
        return [found, *L.edit_distance(found, label, normalized=False)]

    label = fluid.create_lod_tensor(np.array([[1], [2], [2], [1], [3]]), [[2, 1, 1, 1]], PLACE)
    rows = fluid.create_lod_tensor(np.eye(4)[best], sizes, PLACE)
    (found, distance, count), _ = ran(build, {"x": rows, "label": label})
    assert found.rows.tolist() == [[1], [1], [2], [2], [3]]
    assert found.recursive_sequence_lengths() == [[3, 1, 0, 1]]
    assert (distance.rows.tolist(), count.rows.tolist()) == ([[1.0], [0.0], [1.0], [0.0]], [4])
    nothing = {"x": fluid.create_lod_tensor(np.eye(4)[[0, 0]], [[1, 1]], PLACE)}
    (found, _, _), _ = ran(build, {**nothing, "label": fluid.create_lod_tensor(np.array([[1], [2]]), [[1, 1]], PLACE)})
    assert (found.rows.tolist(), found.recursive_sequence_lengths()) == ([], [[0, 0]])


FOUND, WANTED = [["kitten", "sunday", ""], ["sitting", "saturday", "ab"]]
DISTANCES = [3.0, 3.0, 2.0]


def _ids(words: list[str]) -> tuple[np.ndarray, list[list[int]]]:
    return np.array([[ord(letter)] for word in words for letter in word]), [[len(word) for word in words]]


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("is_padded", [False, True])
def test_edit_distance_of_words(normalized: bool, is_padded: bool) -> None:
    feed: dict[str, Any] = {}
    for name, words in (("x", FOUND), ("y", WANTED)):
        feed[name] = fluid.create_lod_tensor(*_ids(words), PLACE)
        if is_padded:
            feed[name] = np.array([[*map(ord, word), *[7] * (9 - len(word))] for word in words])
            feed[f"{name}.lengths"] = np.array([len(word) for word in words])

    def build() -> list[Any]:
        if is_padded:
            ids = [fluid.data(n, [-1, 9], "int64") for n in "xy"]
            lengths = [fluid.data(f"{n}.lengths", [-1], "int64") for n in "xy"]
            return list(L.edit_distance(*ids, normalized, None, *lengths))
        return list(L.edit_distance(*[L.data(n, [1], dtype="int64", lod_level=1) for n in "xy"], normalized))

    (distance, number), _ = ran(build, feed)
    wanted = [d / len(word) if normalized else d for d, word in zip(DISTANCES, WANTED, strict=True)]
    np.testing.assert_allclose(np.array(distance)[:, 0], wanted, rtol=1e-6)
    assert number.rows.tolist() == [3]


def test_edit_distance_leaves_tokens_out_refuses_empty_labels() -> None:
    def build() -> list[Any]:
        ids = [L.data(n, [1], dtype="int64", lod_level=1) for n in "xy"]
        return list(L.edit_distance(*ids, True, [ord("a"), ord("t")]))

    def feed(found: list[str], wanted: list[str]) -> dict[str, Any]:
        return {n: fluid.create_lod_tensor(*_ids(words), PLACE) for n, words in (("x", found), ("y", wanted))}

    (distance, _), _ = ran(build, feed(["banal", "tat"], ["bnt", "xta"]))
    np.testing.assert_allclose(np.array(distance), [[1 / 2], [1.0]])
    with pytest.raises(OperatorError, match="a label has no ids"):
        ran(build, feed(["b"], ["at"]))


def _unit(x: torch.Tensor, h: torch.Tensor, c: torch.Tensor, w_0: torch.Tensor, b_0: torch.Tensor) -> torch.Tensor:
    i, f, o, g = torch.split(torch.cat([x, h], 1) @ w_0 + b_0, 3, 1)
    cell = (f + 0.5).sigmoid() * c + i.sigmoid() * g.tanh()
    return torch.cat([o.sigmoid() * cell.tanh(), cell], 1)


UNIT: Case = (((2,), (3,), (3,)), lambda x, h, c: L.concat(list(L.lstm_unit(x, h, c, 0.5)), 1), _unit)


def test_lstm_unit_is_one_step() -> None:
    compare(UNIT)


def _projected(x: torch.Tensor, state: dict[str, torch.Tensor], peepholes: bool, clip: float) -> torch.Tensor:
    """One sequence, step by step: [t, 2 + 3] of outputs and cells."""
    weight, projection, bias = (state[name] for name in ("w_0", "w_1", "b_0"))
    r, c = torch.zeros(2).double(), torch.zeros(3).double()
    made = []
    for row in x:
        g, i, f, o = torch.split(row + bias[0, :12] + r @ weight, 3)
        look = torch.split(bias[0, 12:], 3) if peepholes else [0.0] * 3
        c = ((f + look[1] * c).sigmoid() * c + (i + look[0] * c).sigmoid() * g.relu()).clamp(-clip, clip)
        r = (((o + look[2] * c).sigmoid() * c.tanh()) @ projection).clamp(-clip, clip)
        made.append(torch.cat([r, c]))
    return torch.stack(made)


@pytest.mark.parametrize(("peepholes", "reverse", "clip"), [(True, False, 9.0), (False, True, 0.2)])
def test_dynamic_lstmp_projects_each_output(peepholes: bool, reverse: bool, clip: float) -> None:
    x, lengths = np.random.default_rng(6).normal(size=(6, 12)), [3, 1, 2]

    def build() -> list[Any]:
        rows = L.data("x", [12], dtype="float64", lod_level=1)
        bias = fluid.ParamAttr(initializer=fluid.initializer.Uniform(-1.0, 1.0))
        options = {"candidate_activation": "relu", "proj_activation": "identity", "dtype": "float64"}
        clips = {"cell_clip": clip, "proj_clip": clip}
        found, cells = L.dynamic_lstmp(rows, 12, 2, None, bias, peepholes, reverse, **options, **clips)
        both = L.concat([found, cells], 1)
        pairs = fluid.append_backward(L.reduce_sum(both * both))
        return [both, *(grad for _, grad in sorted(pairs, key=lambda pair: pair[0].name))]

    (both, *grads), scope = ran(build, {"x": fluid.create_lod_tensor(x, [lengths], PLACE)})
    state = {}
    for name in ("b_0", "w_0", "w_1"):
        value = scope.find(f"lstmp_0.{name}")
        assert value is not None
        state[name] = value.clone().requires_grad_()
    parts = [part.flip(0) if reverse else part for part in torch.split(torch.from_numpy(x), lengths)]
    made = [_projected(part, state, peepholes, clip) for part in parts]
    wanted = torch.cat([one.flip(0) if reverse else one for one in made])
    (wanted * wanted).sum().backward()  # type: ignore[no-untyped-call]  # torch
    torch.testing.assert_close(both.rows, wanted.detach(), rtol=1e-10, atol=1e-12)
    assert both.recursive_sequence_lengths() == [lengths]
    for grad, (name, tensor) in zip(grads, sorted(state.items()), strict=True):
        torch.testing.assert_close(grad.rows, tensor.grad, rtol=1e-9, atol=1e-11, msg=name)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "warpctc": (lambda x: L.warpctc(x, x), "warpctc needs ragged rows"),
    "decoder": (lambda x: L.ctc_greedy_decoder(x, 0), "ctc_greedy_decoder needs ragged rows"),
    "edit_distance": (lambda x: L.edit_distance(x, x), "edit_distance needs ids"),
    "edit_distance rows": (lambda x: L.edit_distance(*[L.cast(x, "int64")] * 2), "edit_distance needs ragged rows"),
    "lstm_unit": (lambda x: L.lstm_unit(x, x[:, :2], x), "lstm_unit needs a hidden state of the cell's size 4"),
    "dynamic_lstmp": (lambda x: L.dynamic_lstmp(x, 4, 2), "dynamic_lstmp needs ragged rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_argument_is_refused_by_name(name: str) -> None:
    build, said = REFUSED[name]
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = fluid.data("x", [None, 4], "float64")
        with pytest.raises(ProgramError, match=said):
            build(x)
