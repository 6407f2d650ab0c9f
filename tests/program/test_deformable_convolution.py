"""Deformable convolution: against the steps of Fluid's kernel, one place after another, in torch's float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import ProgramError
from penstock.scope import Scope

L: Any = fluid.layers
ROWS, CHANNELS, HEIGHT, WIDTH, FILTERS = 2, 4, 5, 6, 6
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"filter_size": 3, "padding": 1},
    "uneven": {"filter_size": [3, 2], "padding": [1, 0], "stride": [2, 1], "dilation": [1, 2]},
    "groups": {"filter_size": 2, "groups": 2, "deformable_groups": 4},
    "without masks": {"filter_size": 3, "padding": 2, "deformable_groups": 2, "modulated": False},
}


def pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def between(image: torch.Tensor, down: torch.Tensor, across: torch.Tensor) -> torch.Tensor:
    """The values [c] at a place between four pixels; those outside of the image are 0."""
    total = image.new_zeros(len(image))
    top, left = math.floor(down.detach()), math.floor(across.detach())
    for row in (top, top + 1):
        for column in (left, left + 1):
            if 0 <= row < HEIGHT and 0 <= column < WIDTH:
                total = total + image[:, row, column] * (1 - (down - row).abs()) * (1 - (across - column).abs())
    return total


def convolved(x: Any, offset: Any, mask: Any, parameters: list[Any], settings: dict[str, Any]) -> torch.Tensor:
    (weight, bias), size_of = parameters, settings.get
    kernel, around = pair(settings["filter_size"]), pair(size_of("padding", 0))
    steps, holes = pair(size_of("stride", 1)), pair(size_of("dilation", 1))
    groups, parts = size_of("groups", 1), size_of("deformable_groups", 1)
    taps, size = kernel[0] * kernel[1], CHANNELS // parts
    made = []
    for image, ways, marks in zip(x, offset, mask, strict=True):
        for row, column in np.ndindex(*offset.shape[2:]):
            seen = []
            for part, i, j in np.ndindex(parts, *kernel):
                at = (part * taps + i * kernel[1] + j) * 2
                down = row * steps[0] - around[0] + i * holes[0] + ways[at, row, column]
                across = column * steps[1] - around[1] + j * holes[1] + ways[at + 1, row, column]
                values = between(image[part * size : (part + 1) * size], down, across)
                seen.append(values * marks[at // 2, row, column])
            whole = torch.stack(seen).reshape(parts, taps, size).transpose(1, 2).reshape(groups, -1)
            made.append((weight.reshape(groups, FILTERS // groups, -1) @ whole.unsqueeze(-1)).reshape(-1) + bias)
    return torch.stack(made).reshape(len(x), *offset.shape[2:], FILTERS).permute(0, 3, 1, 2)


def sizes_of(settings: dict[str, Any]) -> tuple[int, list[int]]:
    """(deformable groups times elements of a filter, height and width of the result)."""
    kernel, parts = pair(settings["filter_size"]), settings.get("deformable_groups", 1)
    others = (pair(settings.get(key, default)) for key, default in (("stride", 1), ("padding", 0), ("dilation", 1)))
    made = [
        (side + 2 * around - hole * (k - 1) - 1) // step + 1
        for side, k, step, around, hole in zip((HEIGHT, WIDTH), kernel, *others, strict=True)
    ]
    return parts * kernel[0] * kernel[1], made


@pytest.mark.parametrize("case", SETTINGS)
def test_filters_look_where_their_offsets_say(case: str) -> None:
    settings = SETTINGS[case]
    count, made = sizes_of(settings)
    draw = np.random.default_rng(3)
    feed = {
        "x": draw.normal(size=(ROWS, CHANNELS, HEIGHT, WIDTH)),
        "offset": draw.normal(0, 1.5, (ROWS, 2 * count, *made)),
        "mask": draw.random((ROWS, count, *made)),
    }
    main, startup, scope = fluid.Program(), fluid.Program(), Scope()
    with fluid.program_guard(main, startup):
        inputs = {name: fluid.data(name, [None, *value.shape[1:]], "float64") for name, value in feed.items()}
        for one in inputs.values():
            one.stop_gradient = False
        result = L.deformable_conv(
            inputs["x"], inputs["offset"], inputs["mask"] if settings.get("modulated", True) else None, FILTERS,
            param_attr="w", bias_attr=fluid.ParamAttr("b", fluid.initializer.Constant(0.5)), **settings,
        )  # fmt: skip
        read = [one for name, one in inputs.items() if name != "mask" or settings.get("modulated", True)]
        parameters = [main.global_block().var(name) for name in ("w", "b")]
        gradients = fluid.gradients([L.reduce_sum(L.sin(result))], [*read, *parameters])
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    given = {one.name: feed[one.name] for one in read}
    found = exe.run(main, given, [result, *gradients], scope=scope)
    values = {name: torch.tensor(value, requires_grad=True) for name, value in given.items()}
    weights = [torch.tensor(np.array(scope.find_var(name)), requires_grad=True) for name in ("w", "b")]
    mask = values.get("mask", torch.ones(ROWS, count, *made, dtype=torch.float64))
    wanted = convolved(values["x"], values["offset"], mask, weights, settings)
    slopes = torch.autograd.grad(wanted.sin().sum(), [*values.values(), *weights])
    for one, other in zip(found, [wanted.detach(), *slopes], strict=True):
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-9, atol=1e-11)


def test_without_offsets_it_is_a_convolution() -> None:
    main, startup, scope = fluid.Program(), fluid.Program(), Scope()
    with fluid.program_guard(main, startup):
        x = fluid.data("x", [None, CHANNELS, HEIGHT, WIDTH], "float32")
        still = fluid.data("offset", [None, 18, HEIGHT, WIDTH], "float32")
        made = [
            L.deformable_conv(x, still, None, 3, 3, padding=1, param_attr="w", bias_attr=False, modulated=False),
            L.conv2d(x, 3, 3, padding=1, param_attr="w", bias_attr=False),
        ]
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    rows = np.random.default_rng(0).normal(size=(3, CHANNELS, HEIGHT, WIDTH)).astype("float32")
    feed = {"x": rows, "offset": np.zeros((3, 18, HEIGHT, WIDTH), "float32")}
    moved, plain = exe.run(main, feed, made, scope=scope)
    np.testing.assert_allclose(moved, plain, rtol=1e-4, atol=1e-5)


def slopes_of_the_kernel(image: np.ndarray, mask: np.ndarray, way: float) -> np.ndarray:
    """Slopes [18, side, side] of the sum of what filters of 3, around 1, see of an image, times `mask`, along offsets.

    Source: DmcnGetCoordinateWeight in deformable_conv_op.h (Fluid 1.8): 0 at places of -1 and less, and of a side.
    """
    side = len(image)
    found = np.zeros((18, side, side))
    around = np.pad(image, 2)  # image[i] is around[i + 2]
    for tap, row, column in np.ndindex(9, side, side):
        down, across = row + tap // 3 - 1 + way, column + tap % 3 - 1 + way
        if down <= -1 or down >= side or across <= -1 or across >= side:
            continue
        top, left = math.floor(down), math.floor(across)
        own = around[top + 2 : top + 4, left + 2 : left + 4]
        for axis, share in ((0, across - left), (1, down - top)):
            before, after = own if axis == 0 else own.T
            slope = (after - before) @ np.array([1 - share, share])
            found[2 * tap + axis, row, column] = slope * mask[tap, row, column]
    return found


@pytest.mark.parametrize("side", [5, 7])
@pytest.mark.parametrize("way", [0.0, -(2.0**-21)])
def test_slopes_at_whole_places_are_those_of_the_kernel(side: int, way: float) -> None:
    """Of floats of 32 bits: the places are exact in them, and neither side's 2 / side is."""
    main, startup, scope = fluid.Program(), fluid.Program(), Scope()
    with fluid.program_guard(main, startup):
        x = fluid.data("x", [None, 1, side, side], "float32")
        offset, mask = (fluid.data(name, [None, c, side, side], "float32") for name, c in (("o", 18), ("m", 9)))
        offset.stop_gradient = False
        ones = fluid.ParamAttr("w", fluid.initializer.Constant(1.0))
        result = L.deformable_conv(x, offset, mask, 1, 3, padding=1, param_attr=ones, bias_attr=False)
        gradients = fluid.gradients([L.reduce_sum(result)], [offset])
    exe, draw = fluid.Executor(fluid.CPUPlace()), np.random.default_rng(5)
    exe.run(startup, scope=scope)
    image, marks = draw.normal(size=(side, side)).astype("float32"), draw.random((9, side, side)).astype("float32")
    feed = {"x": image[None, None], "o": np.full((1, 18, side, side), way, "float32"), "m": marks[None]}
    (found,) = exe.run(main, feed, gradients, scope=scope)
    wanted = slopes_of_the_kernel(image.astype("float64"), marks.astype("float64"), way)
    np.testing.assert_allclose(found[0], wanted, rtol=0, atol=4e-6)  # a few roundings of values up to 8


def test_offsets_that_are_no_numbers_see_nothing() -> None:
    main, startup, scope = fluid.Program(), fluid.Program(), Scope()
    with fluid.program_guard(main, startup):
        x, offset = fluid.data("x", [None, 1, 2, 2], "float32"), fluid.data("o", [None, 2, 2, 2], "float32")
        ones = fluid.ParamAttr("w", fluid.initializer.Constant(1.0))
        result = L.deformable_conv(x, offset, None, 1, 1, param_attr=ones, bias_attr=False, modulated=False)
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    ways = np.array([np.nan, np.inf, -np.inf, 0.0, 0.0, 0.0, 0.0, 0.0], "float32").reshape(1, 2, 2, 2)
    (found,) = exe.run(main, {"x": np.ones((1, 1, 2, 2), "float32"), "o": ways}, [result], scope=scope)
    assert found.ravel().tolist() == [0.0, 0.0, 0.0, 1.0]


def test_sizes_that_do_not_fit_are_refused() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = fluid.data("x", [None, CHANNELS, HEIGHT, WIDTH], "float32")
        offset, mask = (fluid.data(f"c{c}", [None, c, HEIGHT, WIDTH], "float32") for c in (18, 8))
        with pytest.raises(ProgramError, match=r"offset is .*c8.*; expected \[18, 5, 6\] behind the batch"):
            L.deformable_conv(x, mask, None, 3, 3, padding=1, modulated=False)
        with pytest.raises(ProgramError, match=r"mask is .*c8.*; expected \[9, 5, 6\] behind the batch"):
            L.deformable_conv(x, offset, mask, 3, 3, padding=1)
        with pytest.raises(ProgramError, match="4 channels and 3 filters do not divide into 2 groups"):
            L.deformable_conv(x, offset, None, 3, 3, padding=1, groups=2, modulated=False)
