"""Images [n, channels, h, w] and volumes [n, channels, d, h, w]: other sizes, other places of pixels and channels.

Source: python/paddle/fluid/layers/nn.py and the operators' kernels (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from penstock.errors import ProgramError
from penstock.program.layers.activations import activate
from penstock.program.layers.expected import expect_known, expect_rank, refuse
from penstock.program.layers.sizes import sizes_in
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable

_RANKS = {"BILINEAR": 4, "NEAREST": 4, "BICUBIC": 4, "TRILINEAR": 5}


def image_resize(
    input: Any,
    out_shape: Any = None,
    scale: float | None = None,
    name: str | None = None,
    resample: str = "BILINEAR",
    actual_shape: Any = None,
    align_corners: bool = True,
    align_mode: int = 1,
    data_format: str = "NCHW",
) -> Any:
    """Return images in another size: `out_shape` (sizes of the last dimensions), or their own times `scale`.

    `resample`: 'BILINEAR', 'NEAREST' or 'BICUBIC' for images, 'TRILINEAR' for volumes. Place i of the result is read at
    i (in - 1) / (out - 1) with `align_corners`, else at i in / out; with `align_mode` 0, and always for 'BICUBIC', at
    (i + 0.5) in / out - 0.5. 'NEAREST' rounds half up with `align_corners`, else down.
    """
    layer = name or "image_resize"
    if resample not in _RANKS or align_mode not in (0, 1):
        raise ProgramError(
            f"{user_line()}: {layer}: resample is {resample!r} and align_mode {align_mode}; expected one of "
            f"{sorted(_RANKS)}, and 0 or 1"
        )
    expect_rank(layer, input, _RANKS[resample])
    if data_format not in ("NCHW", "NCDHW") or actual_shape is not None:
        raise ProgramError(
            f"{user_line()}: {layer}: data_format is {data_format!r}, actual_shape {actual_shape!r}; transpose the "
            "input to channels first, and give the sizes in out_shape"
        )
    sizes = [expect_known(layer, input, axis) for axis in range(2, input.ndim)]
    wanted = _sizes(layer, sizes, out_shape, scale)
    with name_scope(default_main_program().unique(layer)):
        if resample == "NEAREST":
            return _nearest(input, sizes, wanted, align_corners)
        if resample == "BICUBIC":
            if 1 in wanted and not align_corners:
                raise ProgramError(f"{user_line()}: {layer}: 'BICUBIC' to size 1 needs align_corners=True")
            return F.interpolate(input, wanted, mode="bicubic", align_corners=align_corners)
        half = 0.5 if align_mode == 0 and not align_corners else 0.0
        return _linear(input, sizes, wanted, align_corners, half)


def _sizes(layer: str, sizes: Sequence[int], out_shape: Any, scale: Any) -> list[int]:
    if out_shape is not None:
        wanted = [int(size) for size in sizes_in(out_shape)]
    elif isinstance(scale, (int, float)) and scale > 0:
        wanted = [int(size * scale) for size in sizes]
    else:
        raise ProgramError(f"{user_line()}: {layer}: scale is {scale!r}; give a number above 0, or out_shape")
    if len(wanted) != len(sizes) or min(wanted) < 1:
        raise ProgramError(f"{user_line()}: {layer}: out_shape is {wanted}; expected {len(sizes)} sizes above 0")
    return wanted


def _nearest(x: Any, sizes: Sequence[int], wanted: list[int], align_corners: bool) -> Any:
    for axis, (size, out) in enumerate(zip(sizes, wanted, strict=True), start=2):
        places = _counted(x, out) * _ratio(size, out, align_corners) + (0.5 if align_corners else 0.0)
        x = torch.index_select(x, axis, places.long().clamp(max=size - 1))
    return x


def _counted(like: Any, count: int) -> Any:
    """0, 1, … as float64: places are the same for any dtype."""
    return like.new_ones([count], dtype=torch.float64).cumsum(0) - 1.0


def _ratio(size: int, out: int, align_corners: bool) -> float:
    if out == 1:
        return 0.0
    return (size - 1) / (out - 1) if align_corners else size / out


def _linear(x: Any, sizes: Sequence[int], wanted: list[int], align_corners: bool, half: float) -> Any:
    """Between the pixels around each place, an axis after the other. Fluid reads a single place at 0, torch not."""
    if (align_corners or half) and 1 not in wanted:
        mode = "bilinear" if x.ndim == 4 else "trilinear"
        return F.interpolate(x, wanted, mode=mode, align_corners=align_corners)
    for axis, (size, out) in enumerate(zip(sizes, wanted, strict=True), start=2):
        places = (_counted(x, out) + half) * _ratio(size, out, align_corners) - half
        places = places.clamp(min=0.0)
        low = places.long().clamp(max=size - 1)
        share = (places - low).to(x.dtype).reshape([out, *[1] * (x.ndim - axis - 1)])
        before, behind = (torch.index_select(x, axis, at) for at in (low, (low + 1).clamp(max=size - 1)))
        x = before * (1.0 - share) + behind * share
    return x


def _resized(resample: str, layer: str) -> Callable[..., Any]:
    def call(
        input: Any,
        out_shape: Any = None,
        scale: float | None = None,
        name: str | None = None,
        actual_shape: Any = None,
        align_corners: bool = True,
        align_mode: int = 1,
        data_format: str = "NCHW",
    ) -> Any:
        given = (resample, actual_shape, align_corners, align_mode, data_format)
        return image_resize(input, out_shape, scale, name or layer, *given)

    call.__name__ = call.__qualname__ = layer
    call.__doc__ = f"image_resize(resample={resample!r})."
    return call


interpolate = image_resize
resize_bilinear = _resized("BILINEAR", "resize_bilinear")
resize_trilinear = _resized("TRILINEAR", "resize_trilinear")


def resize_nearest(
    input: Any,
    out_shape: Any = None,
    scale: float | None = None,
    name: str | None = None,
    actual_shape: Any = None,
    align_corners: bool = True,
    data_format: str = "NCHW",
) -> Any:
    """image_resize(resample="NEAREST")."""
    given = ("NEAREST", actual_shape, align_corners, 1, data_format)
    return image_resize(input, out_shape, scale, name or "resize_nearest", *given)


def image_resize_short(input: Any, out_short_len: int, resample: str = "BILINEAR") -> Any:
    """Return images whose shorter side is `out_short_len`, the other one in proportion."""
    expect_rank("image_resize_short", input, 4)
    sizes = [expect_known("image_resize_short", input, axis) for axis in (2, 3)]
    short = sizes.index(min(sizes))
    wanted = [int(size * (out_short_len / sizes[short]) + 0.5) for size in sizes]
    wanted[short] = out_short_len
    return image_resize(input, wanted, name="image_resize_short", resample=resample)


def grid_sampler(x: Any, grid: Any, name: str | None = None) -> Any:
    """Return x [n, c, h, w] at the places `grid` [n, h', w', 2], (column, row) from -1 to 1, between four pixels; zeros
    outside."""
    expect_rank("grid_sampler", x, 4)
    expect_rank("grid_sampler", grid, 4)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=True)


def affine_grid(theta: Any, out_shape: Any, name: str | None = None) -> Any:
    """Return the places that affine maps `theta` [n, 2, 3] give to a grid from -1 to 1: [n, h, w, 2], of
    `out_shape` [n, c, h, w]."""
    expect_rank("affine_grid", theta, 3)
    sizes = sizes_in(out_shape)
    if len(sizes) != 4 or not all(isinstance(size, int) for size in sizes[2:]):
        raise ProgramError(f"{user_line()}: affine_grid: out_shape is {out_shape!r}; expected [n, c, h, w], numbers")
    height, width = (_steps(theta, size) for size in sizes[2:])
    rows = height.reshape([-1, 1, 1]).expand([-1, width.shape[0], 1])
    columns = width.reshape([1, -1, 1]).expand([height.shape[0], -1, 1])
    grid = torch.cat([columns, rows, torch.ones_like(rows)], -1)
    return torch.einsum("hwk,nik->nhwi", grid, theta)


def _steps(like: Any, count: int) -> Any:
    places = like.new_ones([count]).cumsum(0) - 1.0
    return places * (2.0 / (count - 1)) - 1.0 if count > 1 else places - 1.0


def affine_channel(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    data_layout: str = "NCHW",
    name: str | None = None,
    act: str | None = None,
) -> Any:
    """Return x times `scale` plus `bias`, both [c], for each channel: dimension 1, or the last of "NHWC"."""
    if scale is None or bias is None or data_layout not in ("NCHW", "NHWC"):
        raise ProgramError(
            f"{user_line()}: affine_channel: scale is {scale!r}, bias {bias!r}, data_layout {data_layout!r}; expected "
            "two variables, and 'NCHW' or 'NHWC'"
        )
    shape = [-1, *[1] * (x.ndim - 2)] if data_layout == "NCHW" else [-1]
    return activate(x * scale.reshape(shape) + bias.reshape(shape), act)


def pixel_shuffle(x: Any, upscale_factor: int) -> Any:
    """Return images `upscale_factor` times as high and wide, whose pixels are from r^2 channels each."""
    _expect_parts("pixel_shuffle", x, upscale_factor**2)
    return F.pixel_shuffle(x, upscale_factor)


def shuffle_channel(x: Any, group: int, name: str | None = None) -> Any:
    """Return the channels, of `group` groups one from each in turn."""
    _expect_parts("shuffle_channel", x, group)
    return x.unflatten(1, (group, -1)).transpose(1, 2).flatten(1, 2)


def space_to_depth(x: Any, blocksize: int, name: str | None = None) -> Any:
    """Return [n, c, h, w] as [n, c b^2, h / b, w / b], in the order of Fluid's kernel.

    The kernel takes channel (i b + j) c / b^2 + k as pixels (i, j) of blocks in an image of c / b^2 channels that is b
    times as high and wide, and that is cut into rows anew; so b^2 divides the channels, and b height and width.
    """
    _expect_parts("space_to_depth", x, blocksize**2)
    channels, height, width = (expect_known("space_to_depth", x, axis) for axis in (1, 2, 3))
    if blocksize < 1 or height % blocksize or width % blocksize:
        refuse("space_to_depth", f"height and width that blocksize={blocksize} divides", x, "Resize or pad it")
    parts = x.reshape([-1, blocksize, blocksize, channels // blocksize**2, height, width])
    spread = parts.permute([0, 3, 4, 1, 5, 2])
    return spread.reshape([-1, channels * blocksize**2, height // blocksize, width // blocksize])


def temporal_shift(x: Any, seg_num: int, shift_ratio: float = 0.25, name: str | None = None) -> Any:
    """Return frames [n seg_num, c, h, w] with the first channels from the frame before, as many from the one behind.

    `shift_ratio`: the share of the channels for each; zeros beyond the first and last of `seg_num` frames.
    """
    expect_rank("temporal_shift", x, 4)
    channels = expect_known("temporal_shift", x, 1)
    first, second = int(channels * shift_ratio), int(channels * 2 * shift_ratio)
    if seg_num < 1 or not 0 <= second <= channels:
        raise ProgramError(
            f"{user_line()}: temporal_shift: seg_num is {seg_num}, shift_ratio {shift_ratio}; expected at least 1, and "
            "0 to 0.5"
        )
    frames = x.unflatten(0, (-1, seg_num))
    before = F.pad(frames[:, :, :first], [0, 0, 0, 0, 0, 0, 1, 0])[:, :seg_num]
    behind = F.pad(frames[:, :, first:second], [0, 0, 0, 0, 0, 0, 0, 1])[:, 1:]
    return torch.cat([before, behind, frames[:, :, second:]], 2).flatten(0, 1)


def unfold(
    x: Any,
    kernel_sizes: int | Sequence[int],
    strides: int | Sequence[int] = 1,
    paddings: int | Sequence[int] = 0,
    dilations: int | Sequence[int] = 1,
    name: str | None = None,
) -> Any:
    """Return the windows of images as columns [n, c kh kw, windows]. `paddings`: one, (h, w) or (top, left, bottom,
    right)."""
    expect_rank("unfold", x, 4)
    around = [paddings] * 4 if isinstance(paddings, int) else list(paddings) * (4 // max(len(paddings), 1))
    if len(around) != 4:
        raise ProgramError(f"{user_line()}: unfold: paddings is {paddings}; expected a number, two or four of them")
    top, left, bottom, right = around
    return F.unfold(F.pad(x, [left, right, top, bottom]), _pair(kernel_sizes), _pair(dilations), 0, _pair(strides))


def _pair(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)


def maxout(x: Any, groups: int, name: str | None = None, axis: int = 1) -> Any:
    """Return the maxima of each `groups` channels that follow one another along `axis`."""
    if groups < 2 or expect_known("maxout", x, axis) % groups:
        refuse("maxout", f"channels that groups={groups}, at least 2, divides along axis={axis}", x, "Change groups")
    return x.unflatten(axis, (-1, groups)).amax(axis + 1 if axis >= 0 else axis)


def _expect_parts(layer: str, x: Any, parts: int) -> None:
    expect_rank(layer, x, 4)
    if parts < 1 or expect_known(layer, x, 1) % parts:
        refuse(layer, f"a number of channels that {parts} divides", x, "Change the number of parts")


def similarity_focus(input: Any, axis: int, indexes: Sequence[int], name: str | None = None) -> Any:
    """Return a mask of `input` [n, a, b, c]: for each of `indexes` along `axis`, the largest values that have neither
    row nor column in common, all along the axis."""
    expect_rank("similarity_focus", input, 4)
    if axis not in (1, 2, 3) or not indexes:
        raise ProgramError(
            f"{user_line()}: similarity_focus: axis is {axis}, indexes {indexes}; expected 1, 2 or 3, and positions"
        )
    size = expect_known("similarity_focus", input, axis)
    if not all(0 <= index < size for index in indexes):
        refuse("similarity_focus", f"indexes={list(indexes)} below the size along axis={axis}", input, "Change them")
    with name_scope(default_main_program().unique("similarity_focus")), torch.no_grad():
        mask: Any = None
        for index in indexes:
            found = _focus(input.select(axis, index))
            mask = found if mask is None else torch.logical_or(mask, found)
        return mask.unsqueeze(axis).expand(input.shape).to(input.dtype)


def _focus(plane: Variable) -> Any:
    """Whether each of [n, rows, columns] is chosen: again and again the largest that is left, without its row and
    column then."""
    rows, columns = (expect_known("similarity_focus", plane, axis) for axis in (1, 2))
    left: Any = plane
    chosen: Any = torch.zeros_like(left, dtype=torch.bool)
    places = left.new_ones([rows * columns], dtype=torch.int64).cumsum(0) - 1
    for _ in range(min(rows, columns)):
        at = left.flatten(1).argmax(1, keepdim=True)
        here = (places == at).unflatten(1, (rows, columns))
        chosen = torch.logical_or(chosen, here)
        taken = torch.logical_or(here.any(2, keepdim=True), here.any(1, keepdim=True))
        left = left.masked_fill(taken, float("-inf"))
    return chosen
