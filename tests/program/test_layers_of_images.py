"""Layers of images and volumes: value and gradient against torch or the formula of Fluid's kernel; wrong arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.program.layer_cases import Case, compare

import penstock as fluid
from penstock.errors import ProgramError

L: Any = fluid.layers


def _at(i: int, size: int, out: int, mode: str) -> float:
    """The place that element i of the result is read at, as Fluid's kernels of 1.8 find it."""
    ratio = 0.0 if out == 1 else (size - 1) / (out - 1) if mode == "corners" else size / out
    return max(ratio * (i + 0.5) - 0.5, 0.0) if mode == "halves" else ratio * i


def _read(x: torch.Tensor, axis: int, out: int, mode: str, nearest: bool) -> torch.Tensor:
    size, made = x.shape[axis], []
    for i in range(out):
        place = _at(i, size, out, mode)
        if nearest:
            made.append(x.select(axis, int(place + (0.5 if mode == "corners" else 0.0))))
            continue
        low = min(int(place), size - 1)
        share = place - low
        made.append(x.select(axis, low) * (1 - share) + x.select(axis, min(low + 1, size - 1)) * share)
    return torch.stack(made, axis)


def _resize(*sizes: int, mode: str, nearest: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    def read(x: torch.Tensor) -> torch.Tensor:
        for axis, out in enumerate(sizes, start=2):
            x = _read(x, axis, out, mode, nearest)
        return x

    return read


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """space_to_depth by 2, element by element as the kernel's indices say."""
    n, c, h, w = x.shape
    made, narrow = torch.zeros(n * c * h * w, dtype=x.dtype), c // 4
    flat = x.reshape(n, c, h, w)
    for b in range(n):
        for k in range(c):
            for j in range(h):
                for i in range(w):
                    offset, inner = divmod(k, narrow)
                    column, row = i * 2 + offset % 2, j * 2 + offset // 2
                    place = column + w * 2 * (row + h * 2 * (inner + narrow * b))
                    one = torch.zeros_like(made)
                    one[place] = 1.0
                    made = made + one * flat[b, k, j, i]
    return made.reshape(n, c * 4, h // 2, w // 2)


def _shifted(x: torch.Tensor) -> torch.Tensor:
    frames, made = x.reshape(-1, 2, *x.shape[1:]), []
    for pair in frames:
        zero = torch.zeros_like(pair[0, :1])
        made.append(torch.cat([zero, pair[1, 1:2], pair[0, 2:]]))
        made.append(torch.cat([pair[0, :1], zero, pair[1, 2:]]))
    return torch.stack(made)


def _focused(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros_like(x)
    for image, out in zip(x, mask, strict=True):
        for index in (0, 2):
            left = image[index].detach().clone()
            for _ in range(2):
                row, column = divmod(int(left.argmax()), left.shape[1])
                out[:, row, column] = 1.0
                left[row], left[:, column] = -torch.inf, -torch.inf
    return mask


def _norm(w: torch.Tensor, u: torch.Tensor, v: torch.Tensor, rounds: int) -> torch.Tensor:
    matrix = w.movedim(1, 0).reshape(w.shape[1], -1)
    for _ in range(rounds):
        v = F.normalize(matrix.detach().t() @ u, dim=0, eps=0.0)
        u = F.normalize(matrix.detach() @ v, dim=0, eps=0.0)
    return w / (u.detach() @ matrix @ v.detach())


def _spectral(x: Any) -> Any:
    weight = L.create_parameter([3, 4, 2], "float64", "weight.filter")
    return L.reduce_sum(x) * L.spectral_norm(weight, 1, 2)


CASES: dict[str, Case] = {
    "conv3d": (
        ((4, 5, 4, 4),),
        lambda x: L.conv3d(x, 6, [2, 3, 2], 2, [1, 0, 1], groups=2, act="tanh"),
        lambda x, w_0, b_0: F.conv3d(x, w_0, b_0, 2, [1, 0, 1], 1, 2).tanh(),
    ),
    "conv3d same": (
        ((2, 4, 3, 5),),
        lambda x: L.conv3d(x, 3, 2, padding="SAME", bias_attr=False),
        lambda x, w_0: F.conv3d(F.pad(x, (0, 1, 0, 1, 0, 1)), w_0),
    ),
    "conv3d with uneven padding": (
        ((2, 4, 3, 5),),
        lambda x: L.conv3d(x, 3, 2, padding=[1, 0, 0, 2, 1, 1], dilation=[1, 2, 1]),
        lambda x, w_0, b_0: F.conv3d(F.pad(x, (1, 1, 0, 2, 1, 0)), w_0, b_0, dilation=[1, 2, 1]),
    ),
    "conv3d_transpose": (
        ((4, 3, 2, 3),),
        lambda x: L.conv3d_transpose(x, 6, filter_size=3, stride=2, padding=1, groups=2),
        lambda x, w_0, b_0: F.conv_transpose3d(x, w_0, b_0, 2, 1, 0, 2),
    ),
    "conv3d_transpose to a size": (
        ((2, 3, 2, 3),),
        lambda x: L.conv3d_transpose(x, 3, [7, 4, 7], 2, stride=2, bias_attr=False),
        lambda x, w_0: F.conv_transpose3d(x, w_0, None, 2, 0, [1, 0, 1]),
    ),
    "pool3d": (((2, 5, 5, 5),), lambda x: L.pool3d(x, 3, "max", 2, 1), lambda x: F.max_pool3d(x, 3, 2, 1)),
    "pool3d up": (
        ((2, 5, 4, 5),),
        lambda x: L.pool3d(x, 2, "max", 2, ceil_mode=True),
        lambda x: F.max_pool3d(x, 2, 2, ceil_mode=True),
    ),
    "pool3d average": (
        ((2, 5, 5, 5),),
        lambda x: L.pool3d(x, 3, "avg", 2, 1),
        lambda x: F.avg_pool3d(x, 3, 2, 1, count_include_pad=False),
    ),
    "pool3d average with padding": (
        ((2, 5, 5, 5),),
        lambda x: L.pool3d(x, 3, "avg", 2, 1, exclusive=False),
        lambda x: F.avg_pool3d(x, 3, 2, 1),
    ),
    "pool3d global": (
        ((2, 3, 4, 2),),
        lambda x: L.pool3d(x, pool_type="avg", global_pooling=True),
        lambda x: x.mean((2, 3, 4), keepdim=True),
    ),
    "adaptive_pool2d": (
        ((2, 5, 7),),
        lambda x: L.adaptive_pool2d(x, [2, 3]),
        lambda x: F.adaptive_max_pool2d(x, [2, 3]),
    ),
    "adaptive_pool2d average": (
        ((2, 5, 7),),
        lambda x: L.adaptive_pool2d(x, 3, "avg"),
        lambda x: F.adaptive_avg_pool2d(x, 3),
    ),
    "adaptive_pool2d positions": (
        ((2, 5, 7),),
        lambda x: L.adaptive_pool2d(x, 3, require_index=True)[1],
        lambda x: F.adaptive_max_pool2d_with_indices(x, 3)[1].int(),
    ),
    "adaptive_pool3d": (((2, 5, 4, 3),), lambda x: L.adaptive_pool3d(x, 2), lambda x: F.adaptive_max_pool3d(x, 2)),
    "adaptive_pool3d average": (
        ((2, 5, 4, 3),),
        lambda x: L.adaptive_pool3d(x, [2, 3, 1], "avg"),
        lambda x: F.adaptive_avg_pool3d(x, (2, 3, 1)),
    ),
    "instance_norm": (
        ((3, 4, 2),),
        L.instance_norm,
        lambda x, w_0, b_0: F.instance_norm(x, weight=w_0, bias=b_0),
    ),
    "image_resize corners": (((2, 3, 5),), lambda x: L.image_resize(x, [7, 4]), _resize(7, 4, mode="corners")),
    "image_resize to 1": (((2, 3, 5),), lambda x: L.image_resize(x, [1, 8]), _resize(1, 8, mode="corners")),
    "resize_bilinear": (
        ((2, 3, 5),),
        lambda x: L.resize_bilinear(x, [7, 4], align_corners=False),
        _resize(7, 4, mode="plain"),
    ),
    "resize_bilinear by halves": (
        ((2, 3, 5),),
        lambda x: L.resize_bilinear(x, [7, 4], align_corners=False, align_mode=0),
        _resize(7, 4, mode="halves"),
    ),
    "resize_bilinear by halves to 1": (
        ((2, 3, 5),),
        lambda x: L.resize_bilinear(x, [7, 1], align_corners=False, align_mode=0),
        _resize(7, 1, mode="halves"),
    ),
    "resize_bilinear by a scale": (
        ((2, 3, 5),),
        lambda x: L.resize_bilinear(x, scale=1.5, align_corners=False),
        _resize(4, 7, mode="plain"),
    ),
    "resize_trilinear": (
        ((2, 3, 2, 4),),
        lambda x: L.resize_trilinear(x, [2, 5, 3], align_corners=False, data_format="NCDHW"),
        _resize(2, 5, 3, mode="plain"),
    ),
    "resize_trilinear corners": (
        ((2, 3, 2, 4),),
        lambda x: L.resize_trilinear(x, [2, 5, 3]),
        _resize(2, 5, 3, mode="corners"),
    ),
    "resize_nearest": (
        ((2, 3, 5),),
        lambda x: L.resize_nearest(x, [7, 4]),
        _resize(7, 4, mode="corners", nearest=True),
    ),
    "resize_nearest down": (
        ((2, 3, 5),),
        lambda x: L.resize_nearest(x, [7, 4], align_corners=False),
        _resize(7, 4, mode="plain", nearest=True),
    ),
    "interpolate by cubes": (
        ((2, 4, 5),),
        lambda x: L.interpolate(x, [7, 4], resample="BICUBIC", align_corners=False),
        lambda x: F.interpolate(x, [7, 4], mode="bicubic"),
    ),
    "image_resize_short": (((2, 6, 4),), lambda x: L.image_resize_short(x, 6), _resize(9, 6, mode="corners")),
    "grid_sampler": (
        ((2, 3, 4), (5, 2, 2)),
        L.grid_sampler,
        lambda x, grid: F.grid_sample(x, grid, align_corners=True),
    ),
    "affine_grid": (
        ((2, 3),),
        lambda theta: L.affine_grid(theta, [4, 1, 3, 5]),
        lambda theta: F.affine_grid(theta, [theta.shape[0], 1, 3, 5], align_corners=True),
    ),
    "affine_channel": (
        ((3, 2, 2), (3,)),
        lambda x, y: L.affine_channel(x, L.reduce_sum(y, 0), L.reduce_max(y, 0), act="tanh"),
        lambda x, y: (x * y.sum(0)[:, None, None] + y.amax(0)[:, None, None]).tanh(),
    ),
    "affine_channel last": (
        ((2, 2, 3), (3,)),
        lambda x, y: L.affine_channel(x, L.reduce_sum(y, 0), L.reduce_max(y, 0), "NHWC"),
        lambda x, y: x * y.sum(0) + y.amax(0),
    ),
    "pixel_shuffle": (((8, 2, 3),), lambda x: L.pixel_shuffle(x, 2), lambda x: F.pixel_shuffle(x, 2)),
    "shuffle_channel": (((6, 2, 3),), lambda x: L.shuffle_channel(x, 2), lambda x: F.channel_shuffle(x, 2)),
    "space_to_depth": (((4, 2, 4),), lambda x: L.space_to_depth(x, 2), _blocks),
    "unfold": (
        ((2, 5, 6),),
        lambda x: L.unfold(x, [2, 3], [1, 2], [1, 0, 2, 1], [2, 1]),
        lambda x: F.unfold(F.pad(x, (0, 1, 1, 2)), (2, 3), (2, 1), 0, (1, 2)),
    ),
    "maxout": (((6, 2, 3),), lambda x: L.maxout(x, 3), lambda x: x.reshape(-1, 2, 3, 2, 3).amax(2)),
    "maxout of the last": (
        ((2, 3, 4),),
        lambda x: L.maxout(x, 2, axis=-1),
        lambda x: x.reshape(-1, 2, 3, 2, 2).amax(4),
    ),
    "similarity_focus": (((3, 2, 4),), lambda x: L.similarity_focus(x, 1, [0, 2]), _focused),
}


@pytest.mark.parametrize("name", CASES)
def test_layer_equals_the_formula(name: str) -> None:
    compare(CASES[name])


def test_temporal_shift_takes_channels_from_the_frames_around() -> None:
    compare((((4, 2, 2),), lambda x: L.temporal_shift(x, 2, 0.25), _shifted), rows=(4, 6))


def test_spectral_norm_divides_by_the_largest_singular_value() -> None:
    def reference(x: torch.Tensor, filter: torch.Tensor, w_0: torch.Tensor, w_1: torch.Tensor) -> torch.Tensor:
        return x.sum() * _norm(filter, w_0.detach(), w_1.detach(), 2)

    compare((((3,),), _spectral, reference))


def _volume(x: Any) -> Any:
    return L.reshape(x, [0, 4, 1, 2, 2])


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "conv3d": (lambda x: L.conv3d(x, 2, 1), "conv3d_0: input .* five dimensions"),
    "conv3d format": (lambda x: L.conv3d(_volume(x), 2, 1, data_format="NHWC"), "conv3d: data_format is 'NHWC', and"),
    "conv3d padding": (lambda x: L.conv3d(_volume(x), 2, 1, padding=[1, 2]), "conv3d_0: padding .* three or six"),
    "conv3d_transpose": (lambda x: L.conv3d_transpose(_volume(x), 2), "conv3d_transpose_0: give filter_size"),
    "pool3d": (lambda x: L.pool3d(_volume(x), 2, "mean"), "pool3d_0: pool_type is 'mean'"),
    "pool3d window": (lambda x: L.pool3d(_volume(x)), "pool3d_0: pool_size is"),
    "adaptive_pool2d": (lambda x: L.adaptive_pool2d(x, 2, "avg", True), "adaptive_pool2d: require_index"),
    "adaptive_pool3d": (lambda x: L.adaptive_pool3d(x, 2), "adaptive_pool3d: input .* five dimensions"),
    "instance_norm": (lambda x: L.instance_norm(L.flatten(x)), "instance_norm_0: input"),
    "spectral_norm": (L.spectral_norm, "spectral_norm_0: weight"),
    "resample": (lambda x: L.image_resize(x, [2, 2], resample="LINEAR"), "image_resize: resample is 'LINEAR'"),
    "resize rank": (lambda x: L.resize_trilinear(x, [2, 2, 2]), "resize_trilinear needs a variable of 5 dimensions"),
    "resize scale": (lambda x: L.resize_nearest(x, scale=0), "resize_nearest: scale is 0"),
    "resize sizes": (lambda x: L.resize_bilinear(x, [2]), r"resize_bilinear: out_shape is \[2\]"),
    "resize format": (lambda x: L.resize_bilinear(x, [2, 2], data_format="NHWC"), "data_format is 'NHWC'"),
    "bicubic": (lambda x: L.image_resize(x, [1, 2], resample="BICUBIC", align_corners=False), "align_corners=True"),
    "short": (lambda x: L.image_resize_short(L.flatten(x), 2), "image_resize_short needs a variable of 4 dimensions"),
    "grid_sampler": (lambda x: L.grid_sampler(x, L.flatten(x)), "grid_sampler needs a variable of 4 dimensions"),
    "affine_grid": (lambda x: L.affine_grid(L.flatten(x, 1), [1, 1, 2, 2]), "affine_grid needs a variable of 3"),
    "affine_channel": (L.affine_channel, "affine_channel: scale is None"),
    "pixel_shuffle": (lambda x: L.pixel_shuffle(x, 3), "pixel_shuffle needs a number of channels that 9 divides"),
    "shuffle_channel": (lambda x: L.shuffle_channel(x, 3), "shuffle_channel needs"),
    "space_to_depth": (lambda x: L.space_to_depth(L.reshape(x, [0, 4, 1, 4]), 2), "space_to_depth needs height"),
    "temporal_shift": (lambda x: L.temporal_shift(x, 2, 0.75), "shift_ratio 0.75"),
    "unfold": (lambda x: L.unfold(x, 2, paddings=[1, 2, 3]), r"unfold: paddings is \[1, 2, 3\]"),
    "maxout": (lambda x: L.maxout(x, 3), "maxout needs channels that groups=3"),
    "similarity_focus": (lambda x: L.similarity_focus(x, 0, [0]), "similarity_focus: axis is 0"),
    "similarity_focus beyond": (lambda x: L.similarity_focus(x, 1, [4]), r"similarity_focus needs indexes=\[4\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_argument_is_refused_by_name(name: str) -> None:
    build, said = REFUSED[name]
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = fluid.data("x", [None, 4, 2, 2], "float64")
        with pytest.raises(ProgramError, match=said):
            build(x)
