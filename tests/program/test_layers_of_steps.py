"""Losses, random parts, steps of sequences, attention and initializers: against their formulas; wrong arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.program.layer_cases import Case, Ints, compare

import penstock as fluid
from penstock.errors import ProgramError
from penstock.scope import Scope

L: Any = fluid.layers
IDS = np.array([[1], [0], [2], [1], [1], [3]])
LENGTHS = [[2, 0, 3, 1]]


def _clicks(x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Value and gradient of the loss: the value does not know the bounds, the gradient does."""
    made = []
    for v, (kind, score) in zip(x, label, strict=True):
        a = v if -1.0 < float(v.detach()) < 1.0 else v.detach()
        click, scored, q = float(kind) % 2, float(kind) >= 2, float(score) / 4
        loss = F.softplus(a) - a * click
        made.append(loss + F.softplus(a) - a * q if scored else loss)
    return torch.stack(made)


def _click_layer(x: Any, label: Any) -> Any:
    kind, score = (L.cast(L.slice(label, [1], [i], [i + 1]), "float64") for i in (0, 1))
    return L.teacher_student_sigmoid_loss(x, torch.where(kind < 2, kind - 2.0, kind - 2.0 + score / 4), 1.0, -1.0)


def _encoding(steps: int, width: int) -> torch.Tensor:
    half, found = width // 2, torch.zeros(steps, width).double()
    for j in range(steps):
        for k in range(half):
            angle = j / 10000.0 ** (k / (half - 1)) if half > 1 else j / 10000.0
            found[j, k], found[j, half + k] = math.sin(angle), math.cos(angle)
    return found


def _ahead(x: torch.Tensor, w_0: torch.Tensor) -> torch.Tensor:
    columns = [[sum(x[n, t + i] * w_0[i] for i in range(3) if t + i < 4) for t in range(4)] for n in range(len(x))]
    return torch.stack([torch.stack(row) for row in columns])  # type: ignore[arg-type]  # sums of tensors


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(1, 2) / 2.0, -1) @ v


CASES: dict[str, Case] = {
    "teacher_student_sigmoid_loss": (((1,), Ints(4, (2,))), _click_layer, _clicks),
    "row_conv": (((4, 3),), lambda x: L.row_conv(x, 2), _ahead),
    "add_position_encoding": (
        ((5, 6),),
        lambda x: L.add_position_encoding(x, 0.5, 2.0),
        lambda x: 0.5 * x + 2.0 * _encoding(5, 6),
    ),
    "add_position_encoding of 2": (
        ((5, 2),),
        lambda x: L.add_position_encoding(x, 1.0, 1.0),
        lambda x: x + _encoding(5, 2),
    ),
    "im2sequence": (
        ((2, 4, 5),),
        lambda x: L.im2sequence(x, [2, 3], [1, 2], [1, 0, 0, 1]),
        lambda x: F.unfold(F.pad(x, (0, 1, 1, 0)), (2, 3), stride=(1, 2)).transpose(1, 2).flatten(0, 1),
    ),
    "glu": (((6,),), fluid.nets.glu, lambda x: x[:, :3] * torch.sigmoid(x[:, 3:])),
    "scaled_dot_product_attention": (
        ((3, 4), (5, 4), (5, 2)),
        fluid.nets.scaled_dot_product_attention,
        _attention,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_layer_equals_the_formula(name: str) -> None:
    compare(CASES[name])


def run(build: Callable[[], Any], feed: dict[str, Any], steps: int = 1, seed: int = 7) -> tuple[list[Any], Scope]:
    """Record what `build` makes and run it; return (what the last run gives, its scope)."""
    main, startup, scope = fluid.Program(), fluid.Program(), Scope()
    main.random_seed = startup.random_seed = seed
    with fluid.program_guard(main, startup):
        made = build()
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    for _ in range(steps):
        found = exe.run(main, feed, list(made), scope=scope, return_numpy=False)
    return found, scope


def test_attention_has_heads_of_their_own_projections() -> None:
    q, k = np.random.default_rng(0).normal(size=(2, 3, 4)), np.random.default_rng(1).normal(size=(2, 5, 4))

    def build() -> list[Any]:
        inputs = [fluid.data("q", [-1, 3, 4], "float64"), fluid.data("k", [-1, 5, 4], "float64")]
        return [fluid.nets.scaled_dot_product_attention(inputs[0], inputs[1], inputs[1], 2)]

    [got], scope = run(build, {"q": q, "k": k})
    weights = [(scope.find(f"fc_{i}.w_0"), scope.find(f"fc_{i}.b_0")) for i in range(3)]
    heads = []
    for x, (weight, bias) in zip((q, k, k), weights, strict=True):
        assert weight is not None
        assert bias is not None
        heads.append((torch.from_numpy(x) @ weight + bias).reshape(2, -1, 2, 2).transpose(1, 2))
    query, key, value = heads
    wanted = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(got.rows, wanted, rtol=1e-10, atol=1e-12)


def test_centers_move_to_their_rows_after_the_loss() -> None:
    x, label = np.random.default_rng(3).normal(size=(5, 2)), np.array([[0], [2], [2], [0], [2]])
    start = np.random.default_rng(4).normal(size=(4, 2))

    def build() -> list[Any]:
        attr = fluid.ParamAttr("centers", fluid.initializer.NumpyArrayInitializer(start))
        inputs = fluid.data("x", [-1, 2], "float64"), fluid.data("label", [-1, 1], "int64")
        return [L.center_loss(*inputs, 4, 0.5, attr)]

    [got], scope = run(build, {"x": x, "label": label}, steps=2)
    centers = start.copy()
    for _ in range(2):
        away = x - centers[label[:, 0]]
        loss = 0.5 * (away**2).sum(1, keepdims=True)
        for row, of in zip(away, label[:, 0], strict=True):
            centers[of] += 0.5 * row / (1 + (label == of).sum())
    np.testing.assert_allclose(np.array(got), loss, rtol=1e-10)
    np.testing.assert_allclose(np.array(scope.find_var("centers")), centers, rtol=1e-10)


def test_centers_get_no_gradient_and_rows_do() -> None:
    def layer(x: Any, label: Any) -> Any:
        attr = fluid.ParamAttr(initializer=fluid.initializer.Constant(0.5))
        return L.center_loss(x, label, 3, 0.1, attr, update_center=False)

    def reference(x: torch.Tensor, label: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
        return 0.5 * ((x - 0.5) ** 2).sum(1, keepdim=True)

    compare((((2,), Ints(3)), layer, reference))


def test_mean_iou_counts_classes_that_are_there() -> None:
    found, wanted = np.array([[0], [1], [1], [3], [0]]), np.array([[0], [1], [3], [3], [1]])

    def build() -> Any:
        return L.mean_iou(fluid.data("x", [-1, 1], "int64"), fluid.data("y", [-1, 1], "int32"), 5)

    (mean, wrong, correct), _ = run(build, {"x": found, "y": wanted.astype("int32")})
    np.testing.assert_array_equal(np.array(wrong), [1, 2, 0, 1, 0])
    np.testing.assert_array_equal(np.array(correct), [1, 1, 0, 1, 0])
    np.testing.assert_allclose(np.array(mean), (1 / 2 + 1 / 3 + 1 / 2) / 3, rtol=1e-6)
    assert {str(np.array(v).dtype) for v in (wrong, correct)} == {"int32"}


def test_crops_are_parts_at_places_of_their_own() -> None:
    x = np.arange(40 * 6 * 5).reshape(40, 1, 6, 5)

    def build() -> list[Any]:
        inputs = fluid.data("x", [-1, 1, 6, 5], "int64")
        return [L.random_crop(inputs, [3, 4]), L.random_crop(inputs, [3, 4], seed=9)]

    (free, seeded), _ = run(build, {"x": x})
    (again, seeded_again), _ = run(build, {"x": x}, seed=8)
    places = set()
    for part, whole in zip(np.array(free), x, strict=True):
        row, column = divmod(int(part[0, 0, 0] - whole[0, 0, 0]), 5)
        np.testing.assert_array_equal(part, whole[:, row : row + 3, column : column + 4])
        places.add((row, column))
    assert places == {(row, column) for row in range(4) for column in range(2)}
    assert not np.array_equal(np.array(free), np.array(again))
    np.testing.assert_array_equal(np.array(seeded), np.array(seeded_again))


def test_randperm_is_an_order_of_all_numbers() -> None:
    (first, small), _ = run(lambda: [L.randperm(50), L.randperm(3, dtype="int32")], {})
    (again, _), _ = run(lambda: [L.randperm(50), L.randperm(3, dtype="int32")], {}, steps=2)
    assert sorted(np.array(first)) == list(range(50)) == sorted(np.array(again))
    assert not np.array_equal(np.array(first), np.array(again))
    assert str(np.array(small).dtype) == "int32"


def _ragged() -> Any:
    return L.embedding(L.data("ids", [1], dtype="int64", lod_level=1), [4, 4], dtype="float64")


def test_steps_of_ragged_rows_end_with_their_sequence() -> None:
    def build() -> list[Any]:
        rows = _ragged()
        return [rows, L.row_conv(rows, 2), L.add_position_encoding(rows, 1.0, 1.0)]

    feed = {"ids": fluid.create_lod_tensor(IDS, LENGTHS, fluid.CPUPlace())}
    (rows, convolved, encoded), scope = run(build, feed)
    weight = np.array(scope.find_var("row_conv_0.w_0"))
    wanted, places = np.zeros((6, 4)), []
    for first, length in ((0, 2), (2, 3), (5, 1)):
        places += list(range(length))
        for t in range(length):
            wanted[first + t] = sum(np.array(rows)[first + t + i] * weight[i] for i in range(3) if t + i < length)
    np.testing.assert_allclose(np.array(convolved), wanted, rtol=1e-10)
    np.testing.assert_allclose(np.array(encoded), np.array(rows) + _encoding(3, 4).numpy()[places], rtol=1e-10)
    assert convolved.recursive_sequence_lengths() == encoded.recursive_sequence_lengths() == LENGTHS


def test_im2sequence_gives_a_sequence_of_each_image() -> None:
    x = np.random.default_rng(2).normal(size=(3, 1, 3, 4))

    def build() -> list[Any]:
        rows = L.im2sequence(fluid.data("x", [-1, 1, 3, 4], "float64"), 2)
        return [rows, L.sequence_pool(rows, "sum")]

    (rows, pooled), _ = run(build, {"x": x})
    assert rows.recursive_sequence_lengths() == [[6, 6, 6]]
    np.testing.assert_allclose(np.array(pooled), F.unfold(torch.from_numpy(x), 2).sum(2), rtol=1e-10)


@pytest.mark.parametrize("width", [5, -1])
@pytest.mark.parametrize("is_reverse", [False, True])
def test_units_run_over_the_windows_of_images(width: int, is_reverse: bool) -> None:
    x = np.random.default_rng(3).normal(size=(3, 2, 3, 5))

    def build() -> list[Any]:
        images = fluid.data("x", [-1, 2, 3, width], "float64")
        images.stop_gradient = False
        windows = L.im2sequence(images, [3, 1])
        steps = L.reshape(L.transpose(images, [0, 3, 1, 2]), [0, -1, 6])
        found = []
        for rows in (windows, steps):
            unit = L.dynamic_gru(rows, 2, fluid.ParamAttr("w"), fluid.ParamAttr("b"), is_reverse=is_reverse)
            found.append(L.reshape(unit, [-1, 2]))
        grads = [fluid.gradients(L.reduce_sum(one * one), images)[0] for one in found]
        return [*found, *grads]

    (rows, steps, of_rows, of_steps), _ = run(build, {"x": x})
    np.testing.assert_allclose(np.array(rows), np.array(steps), rtol=1e-12)
    np.testing.assert_allclose(np.array(of_rows), np.array(of_steps), rtol=1e-10)
    assert np.abs(np.array(of_rows)).max() > 0.0


def test_initializers_of_arrays_and_of_interpolation() -> None:
    array = np.random.default_rng(5).normal(size=(3, 2))

    def build() -> list[Any]:
        given = fluid.initializer.NumpyArrayInitializer(array)
        same = L.create_parameter([3, 2], "float32", "same", default_initializer=given)
        enlarge = fluid.initializer.Bilinear()
        return [same, L.create_parameter([2, 1, 4, 4], "float64", "up", default_initializer=enlarge)]

    (same, up), _ = run(build, {})
    np.testing.assert_array_equal(np.array(same), array.astype("float32"))
    wanted = np.zeros(32)
    for i in range(32):
        column, row = i % 4, i / 4 % 4
        wanted[i] = (1 - abs(column / 2 - 0.75)) * (1 - abs(row / 2 - 0.75))
    np.testing.assert_allclose(np.array(up), wanted.reshape(2, 1, 4, 4), rtol=1e-12)
    with fluid.initializer.init_on_cpu():
        assert not fluid.initializer.force_init_on_cpu()


@pytest.mark.parametrize(("shape", "said"), [([2, 3], r"array has shape \[3, 2\]"), ([3, 1, 4, 2], r"\[n, c, k, k\]")])
def test_an_initializer_of_another_shape_is_refused(shape: list[int], said: str) -> None:
    chosen = fluid.initializer.NumpyArrayInitializer(np.zeros((3, 2))) if len(shape) == 2 else None
    with fluid.program_guard(fluid.Program(), fluid.Program()), pytest.raises(ValueError, match=said):
        L.create_parameter(shape, "float32", default_initializer=chosen or fluid.initializer.Bilinear())


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "teacher": (lambda x: L.teacher_student_sigmoid_loss(x, L.unsqueeze(x, 1)), "teacher_student_sigmoid_loss needs"),
    "center_loss": (lambda x: L.center_loss(x, x, 3, 0.1, None), "center_loss needs ids"),
    "mean_iou": (lambda x: L.mean_iou(x, x, 3), "mean_iou needs ids"),
    "random_crop": (lambda x: L.random_crop(x, [5]), r"random_crop: shape is \[5\]"),
    "randperm": (lambda x: L.randperm(0), "randperm: n is 0"),
    "row_conv": (lambda x: L.row_conv(x, 2), "row_conv needs a variable of 3 dimensions"),
    "row_conv ahead": (lambda x: L.row_conv(L.unsqueeze(x, 1), -1), "future_context_size is -1"),
    "add_position_encoding": (lambda x: L.add_position_encoding(x, 1, 1), "add_position_encoding needs a variable"),
    "odd": (lambda x: L.add_position_encoding(L.unsqueeze(x, 2), 1, 1), "add_position_encoding needs an even"),
    "im2sequence": (lambda x: L.im2sequence(L.unsqueeze(x, [1, 2]), input_image_size=x), "im2sequence: padding is 0"),
    "attention": (
        lambda x: fluid.nets.scaled_dot_product_attention(*[L.unsqueeze(x, 1)] * 3, num_heads=3),
        "scaled_dot_product_attention needs queries",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_argument_is_refused_by_name(name: str) -> None:
    build, said = REFUSED[name]
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = fluid.data("x", [None, 4], "float64")
        with pytest.raises(ProgramError, match=said):
            build(x)


def test_a_dynamic_rnn_attends_to_images_as_sequences() -> None:
    x, words, w = (
        np.random.default_rng(n).normal(size=size) for n, size in ((1, (3, 2, 1, 4)), (2, (6, 2)), (3, (2,)))
    )
    sizes = [1, 3, 2]

    def build() -> list[Any]:
        given = fluid.initializer.NumpyArrayInitializer(w)
        factor = L.create_parameter([2], "float64", "factor", default_initializer=given)
        rows = L.im2sequence(fluid.data("x", [-1, 2, 1, 4], "float64"), 1) * factor
        rnn = L.DynamicRNN()
        with rnn.block():
            word = rnn.step_input(L.data("words", [2], dtype="float64", lod_level=1))
            windows = rnn.static_input(rows)
            near = L.reduce_sum(windows * L.sequence_expand(word, windows), 1, keep_dim=True)
            rnn.output(L.sequence_pool(windows * L.sequence_softmax(near), "sum"))
        found = rnn()
        return [found, *(grad for _, grad in fluid.append_backward(L.reduce_sum(found * found)))]

    (found, grad), _ = run(build, {"x": x, "words": fluid.create_lod_tensor(words, [sizes], fluid.CPUPlace())})
    factor = torch.from_numpy(w).requires_grad_(True)
    windows = torch.from_numpy(x)[:, :, 0].transpose(1, 2) * factor
    of_word = windows[torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))]
    wanted = (torch.softmax((of_word * torch.from_numpy(words)[:, None]).sum(2), 1)[..., None] * of_word).sum(1)
    (gradient,) = torch.autograd.grad((wanted * wanted).sum(), factor)
    np.testing.assert_allclose(np.array(found), wanted.detach().numpy(), rtol=1e-10)
    np.testing.assert_allclose(np.array(grad), gradient.numpy(), rtol=1e-9)
