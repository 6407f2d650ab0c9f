"""Boxes of fixed places and sizes over an image, which detectors choose from: SSD's priors, Faster R-CNN's anchors.

They follow from the sizes of the feature map and of the image, which have to be known before a run; so they are
constants of the program, computed in float64. Coordinates are left, top, right, bottom.
Source: fluid.layers.prior_box, density_prior_box, anchor_generator, multi_box_head (Fluid 1.8) and their kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.errors import ProgramError
from penstock.program.layers.convolution import conv2d
from penstock.program.layers.expected import expect_known, expect_rank
from penstock.program.layers.tensor import assign, concat, reshape, transpose
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.source import user_line

_VARIANCE = (0.1, 0.1, 0.2, 0.2)
_SAME = 1e-6  # ratios that are closer than this are one
Numbers = Sequence[float] | float


def prior_box(
    input: Any,
    image: Any,
    min_sizes: Numbers,
    max_sizes: Numbers | None = None,
    aspect_ratios: Numbers = (1.0,),
    variance: Sequence[float] = _VARIANCE,
    flip: bool = False,
    clip: bool = False,
    steps: Sequence[float] = (0.0, 0.0),
    offset: float = 0.5,
    name: str | None = None,
    min_max_aspect_ratios_order: bool = False,
) -> tuple[Any, Any]:
    """Return SSD's priors of a feature map [n, c, h, w] over an image [n, c, height, width], and their variances.

    Shapes: two of [h, w, priors, 4], in shares of the image. Of each min size a box of each ratio (1 first, with `flip`
    also 1 / ratio), then a square of √(min max); with `min_max_aspect_ratios_order` the square comes second.
    """
    least, most = _listed(min_sizes), [size for size in _listed(max_sizes or ()) if size > 0]
    if most and len(most) != len(least):
        raise ProgramError(
            f"{user_line()}: prior_box: {len(least)} min_sizes and {len(most)} max_sizes; expected as many"
        )
    ratios = _ratios(_listed(aspect_ratios), flip=flip)
    sides: list[tuple[float, float]] = []
    for number, size in enumerate(least):
        shaped = [(size * math.sqrt(ratio), size / math.sqrt(ratio)) for ratio in ratios]
        square = [(math.sqrt(size * most[number]),) * 2] if most else []
        sides += [shaped[0], *square, *shaped[1:]] if min_max_aspect_ratios_order else [*shaped, *square]
    centers, extent = _grid("prior_box", input, image, steps, offset)
    half = np.array(sides).reshape(-1, 2) / 2
    boxes = np.concatenate([centers - half, centers + half], -1) / extent
    return _constants("prior_box", input, np.clip(boxes, 0, 1) if clip else boxes, variance, name)


def _ratios(given: Sequence[float], *, flip: bool) -> list[float]:
    """1 and the ratios that differ from those before, each with its inverse if `flip`."""
    found = [1.0]
    for ratio in given:
        if all(abs(ratio - other) >= _SAME for other in found):
            found += [ratio, 1.0 / ratio] if flip else [ratio]
    return found


def density_prior_box(
    input: Any,
    image: Any,
    densities: Sequence[int] | None = None,
    fixed_sizes: Sequence[float] | None = None,
    fixed_ratios: Sequence[float] | None = None,
    variance: Sequence[float] = _VARIANCE,
    clip: bool = False,
    steps: Sequence[float] = (0.0, 0.0),
    offset: float = 0.5,
    flatten_to_2d: bool = False,
    name: str | None = None,
) -> tuple[Any, Any]:
    """Return priors of which `density` x `density` lie around each place, and their variances.

    Shapes: two of [h, w, priors, 4], or with `flatten_to_2d` [h w priors, 4], in shares of the image and within it.
    """
    counts, sizes, ratios = list(densities or ()), _listed(fixed_sizes or ()), _listed(fixed_ratios or ())
    if not counts or len(counts) != len(sizes) or not ratios:
        raise ProgramError(
            f"{user_line()}: density_prior_box: densities are {counts}, fixed_sizes {sizes}, fixed_ratios {ratios}; "
            "expected as many densities as sizes, and at least one ratio"
        )
    width, height = _steps(input, image, steps)
    average = int((width + height) * 0.5)
    shifts: list[tuple[float, float]] = []
    sides: list[tuple[float, float]] = []
    for count, size in zip(counts, sizes, strict=True):
        shift = average // count
        places = [shift / 2 - average / 2 + number * shift for number in range(count)]
        for ratio in ratios:
            shifts += [(x, y) for y in places for x in places]
            sides += [(size * math.sqrt(ratio), size / math.sqrt(ratio))] * (count * count)
    centers, extent = _grid("density_prior_box", input, image, steps, offset)
    moved, half = centers + np.array(shifts), np.array(sides) / 2
    boxes = np.clip(
        np.concatenate([moved - half, moved + half], -1) / extent, [0, 0, -np.inf, -np.inf], [np.inf, np.inf, 1, 1]
    )
    boxes = np.clip(boxes, 0, 1) if clip else boxes
    return _constants("density_prior_box", input, boxes.reshape(-1, 4) if flatten_to_2d else boxes, variance, name)


def anchor_generator(
    input: Any,
    anchor_sizes: Numbers | None = None,
    aspect_ratios: Numbers | None = None,
    variance: Sequence[float] = _VARIANCE,
    stride: Sequence[float] | None = None,
    offset: float = 0.5,
    name: str | None = None,
) -> tuple[Any, Any]:
    """Return anchors of a feature map [n, c, h, w], in pixels, and their variances: two of [h, w, anchors, 4].

    `stride`: pixels of the image for one of the map, (across, down). Of each ratio (height / width) one of each size.
    """
    across, down = _pair("anchor_generator", "stride", stride)
    sides = []
    for ratio in _listed(aspect_ratios or ()):
        base = _rounded(math.sqrt(across * down / ratio))
        sides += [(s / across * base, s / down * _rounded(base * ratio)) for s in _listed(anchor_sizes or ())]
    if not sides:
        raise ProgramError(f"{user_line()}: anchor_generator needs anchor_sizes and aspect_ratios")
    rows, columns = _sizes("anchor_generator", input)
    x = np.arange(columns) * across + offset * (across - 1)
    y = np.arange(rows) * down + offset * (down - 1)
    centers = np.stack(np.broadcast_arrays(x[None, :], y[:, None]), -1)[:, :, None]
    half = (np.array(sides) - 1) / 2
    return _constants("anchor_generator", input, np.concatenate([centers - half, centers + half], -1), variance, name)


def multi_box_head(
    inputs: Sequence[Any],
    image: Any,
    base_size: float,
    num_classes: int,
    aspect_ratios: Sequence[Numbers],
    min_ratio: int | None = None,
    max_ratio: int | None = None,
    min_sizes: Sequence[Numbers] | None = None,
    max_sizes: Sequence[Numbers] | None = None,
    steps: Sequence[float] | None = None,
    step_w: Sequence[float] | None = None,
    step_h: Sequence[float] | None = None,
    offset: float = 0.5,
    variance: Sequence[float] = _VARIANCE,
    flip: bool = True,
    clip: bool = False,
    kernel_size: int = 1,
    pad: int = 0,
    stride: int = 1,
    name: str | None = None,
    min_max_aspect_ratios_order: bool = False,
) -> tuple[Any, Any, Any, Any]:
    """Return SSD's predictions of several feature maps: places [n, priors, 4], classes [n, priors, num_classes], and
    the priors [priors, 4] with their variances. Each map has two convolutions.

    Without sizes they follow from `min_ratio` and `max_ratio`, percents of `base_size`, for three maps or more.
    """
    count = len(inputs)
    if min_sizes is None or max_sizes is None:
        min_sizes, max_sizes = _sizes_between(base_size, min_ratio, max_ratio, count)
    across, down = (steps, steps) if steps is not None else (step_w, step_h)
    lists = {
        "min_sizes": min_sizes,
        "max_sizes": max_sizes,
        "aspect_ratios": aspect_ratios,
        "step_w": across,
        "step_h": down,
    }
    for what, values in lists.items():
        if values is not None and len(values) != count:
            raise ProgramError(f"{user_line()}: multi_box_head: {len(values)} {what} for {count} feature maps")
    places: list[Any] = []
    classes: list[Any] = []
    boxes, variances = [], []
    for number, one in enumerate(inputs):
        step = (across[number] if across else 0.0, down[number] if down else 0.0)
        box, own = prior_box(
            one, image, min_sizes[number], max_sizes[number], aspect_ratios[number], variance, flip, clip, step, offset,
            None, min_max_aspect_ratios_order,
        )  # fmt: skip
        priors = expect_known("multi_box_head", box, 2)
        for found, width in ((places, 4), (classes, num_classes)):
            made = conv2d(one, priors * width, kernel_size, stride, pad)
            found.append(reshape(transpose(made, [0, 2, 3, 1]), [0, -1, width]))
        boxes.append(reshape(box, [-1, 4]))
        variances.append(reshape(own, [-1, 4]))
    return concat(places, 1), concat(classes, 1), concat(boxes), concat(variances)


def _sizes_between(base: float, low: int | None, high: int | None, count: int) -> tuple[list[float], list[float]]:
    if low is None or high is None or count <= 2:
        raise ProgramError(
            f"{user_line()}: multi_box_head of {count} feature maps needs min_sizes and max_sizes, or min_ratio and "
            "max_ratio for three maps or more"
        )
    step = (high - low) // (count - 2)
    ratios = range(low, high + 1, step)
    least, most = [base * ratio / 100 for ratio in ratios], [base * (ratio + step) / 100 for ratio in ratios]
    return [base * 0.1, *least][:count], [base * 0.2, *most][:count]


# ---------------------------------------------------------------- places


def _listed(values: Any) -> list[float]:
    return [float(v) for v in values] if isinstance(values, (list, tuple)) else [float(values)]


def _rounded(value: float) -> float:
    """Round half away from zero, as C does."""
    return math.floor(value + 0.5)


def _pair(layer: str, what: str, values: Any) -> tuple[float, float]:
    if not isinstance(values, (list, tuple)) or len(values) != 2:
        raise ProgramError(f"{user_line()}: {layer}: {what} is {values!r}; expected two numbers, (across, down)")
    return float(values[0]), float(values[1])


def _sizes(layer: str, x: Any) -> tuple[int, int]:
    expect_rank(layer, x, 4)
    return expect_known(layer, x, 2), expect_known(layer, x, 3)


def _steps(input: Any, image: Any, steps: Sequence[float]) -> tuple[float, float]:
    """Pixels of the image for one of the map, (across, down): `steps`, or what the sizes say."""
    across, down = _pair("prior boxes", "steps", steps)
    (rows, columns), (height, width) = _sizes("prior boxes", input), _sizes("prior boxes", image)
    return (width / columns, height / rows) if across == 0 or down == 0 else (across, down)


def _grid(layer: str, input: Any, image: Any, steps: Sequence[float], offset: float) -> tuple[Any, Any]:
    """The centers [h, w, 1, 2] in pixels, and the image's (width, height) twice."""
    (rows, columns), (height, width) = _sizes(layer, input), _sizes(layer, image)
    across, down = _steps(input, image, steps)
    x, y = (np.arange(columns) + offset) * across, (np.arange(rows) + offset) * down
    centers = np.stack(np.broadcast_arrays(x[None, :], y[:, None]), -1)[:, :, None]
    return centers, np.array([width, height] * 2, float)


def _constants(layer: str, like: Any, boxes: Any, variance: Sequence[float], name: str | None) -> tuple[Any, Any]:
    kind = str(like.dtype).removeprefix("torch.")
    with name_scope(name or default_main_program().unique(layer)):
        return assign(boxes.astype(kind)), assign(np.broadcast_to(np.array(variance, kind), boxes.shape))
