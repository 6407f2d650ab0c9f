"""Kinds that multiply, convolve, pool, normalise and look up: those with parameters above all."""

from __future__ import annotations

from typing import Any

from penstock.program import layers
from penstock.program.framework.kinds.call import REQUIRED, Call, Kind, layer


def _lookup(call: Call) -> Any:
    table, ids, padding = call.one("W"), call.one("Ids"), call["padding_idx"]
    rows = layers.embedding(
        ids, list(table.desc.shape), call["is_sparse"], call["is_distributed"], None if padding == -1 else padding,
        call.parameter("W"), table.desc.dtype,
    )  # fmt: skip
    keeps = call.type == "lookup_table_v2" and ids.ndim > 1 and ids.desc.shape[-1] == 1
    return rows.unsqueeze(-2) if keeps else rows


def _matmul(call: Call) -> Any:
    return layers.matmul(call.one("X"), call.one("Y"), call["trans_x"], call["trans_y"])


def _convolution(call: Call) -> Any:
    weight = list(call.one("Filter").desc.shape)
    function = layers.conv3d if call.type == "conv3d" else layers.conv2d
    out = function(call.one("Input"), weight[0], weight[2:], padding=_padding(call), **_windows(call))
    return _with_bias(call, out)


def _transposed(call: Call) -> Any:
    weight, groups = list(call.one("Filter").desc.shape), call["groups"] or 1
    function = layers.conv3d_transpose if call.type == "conv3d_transpose" else layers.conv2d_transpose
    if call["output_padding"]:
        raise call.refuse("has output_padding")
    size = list(call["output_size"]) or None
    return _with_bias(call, function(
        call.one("Input"), weight[1] * groups, size, weight[2:], padding=_padding(call), **_windows(call),
    ))  # fmt: skip


def _windows(call: Call) -> dict[str, Any]:
    return {
        "stride": call["strides"], "dilation": call["dilations"], "groups": call["groups"] or 1,
        "param_attr": call.parameter("Filter"), "bias_attr": False, "data_format": _format(call),
    }  # fmt: skip


def _with_bias(call: Call, out: Any) -> Any:
    bias = call.optional("Bias")
    return out if bias is None else out + bias.reshape([-1, *[1] * (out.ndim - 2)])


def _padding(call: Call) -> Any:
    algorithm = call["padding_algorithm"]
    return list(call["paddings"]) if algorithm == "EXPLICIT" else algorithm


def _format(call: Call) -> str:
    """The layout that a layer is given: unset ones, and conv3d_transpose's "NCHW", stand for channels first."""
    found, rank = str(call["data_format"]), 3 if "3d" in call.type else 2
    return ("NCDHW" if rank == 3 else "NCHW") if found in ("AnyLayout", "NCHW", "NCDHW", "") else found


def _pool(call: Call) -> Any:
    volumes = call.type == "pool3d"
    if call["adaptive"]:
        adapted = layers.adaptive_pool3d if volumes else layers.adaptive_pool2d
        return adapted(call.one("X"), list(call["ksize"]), call["pooling_type"])
    function = layers.pool3d if volumes else layers.pool2d
    return function(
        call.one("X"), list(call["ksize"]), call["pooling_type"] or "max", list(call["strides"]), _padding(call),
        call["global_pooling"], ceil_mode=call["ceil_mode"], exclusive=call["exclusive"], data_format=_format(call),
    )  # fmt: skip


def _batch_norm(call: Call) -> Any:
    trains = not (call["is_test"] or call["use_global_stats"])
    if trains and call.optional("MomentumTensor") is not None:
        raise call.refuse("has input 'MomentumTensor' while training (give the attribute 'momentum')")
    return layers.batch_norm(
        call.one("X"), is_test=call["is_test"], momentum=call["momentum"], epsilon=call["epsilon"],
        param_attr=call.parameter("Scale"), bias_attr=call.parameter("Bias"), data_layout=call["data_layout"],
        moving_mean_name=call.one("Mean").name, moving_variance_name=call.one("Variance").name,
        use_global_stats=call["use_global_stats"],
    )  # fmt: skip


def _layer_norm(call: Call) -> Any:
    scale, shift = call.parameter("Scale"), call.parameter("Bias")
    return layers.layer_norm(
        call.one("X"), scale is not False, shift is not False, call["begin_norm_axis"], call["epsilon"],
        scale or None, shift or None,
    )  # fmt: skip


def _group_norm(call: Call) -> Any:
    parameters = call.parameter("Scale"), call.parameter("Bias")
    return layers.group_norm(call.one("X"), call["groups"], call["epsilon"], *parameters)


def _instance_norm(call: Call) -> Any:
    return layers.instance_norm(call.one("X"), call["epsilon"], call.parameter("Scale"), call.parameter("Bias"))


def _bilinear(call: Call) -> Any:
    size = call.one("Weight").desc.shape[0]
    weight, bias = call.parameter("Weight"), call.parameter("Bias")
    return layers.bilinear_tensor_product(call.one("X"), call.one("Y"), size, param_attr=weight, bias_attr=bias)


def _row_conv(call: Call) -> Any:
    ahead = call.one("Filter").desc.shape[0] - 1
    return layers.row_conv(call.one("X"), ahead, call.parameter("Filter"))


def _resized(call: Call) -> Any:
    size, factor = [call["out_h"], call["out_w"]], call["scale"]
    factor = (factor[0] if len(factor) else 0.0) if isinstance(factor, (list, tuple)) else factor
    given = {"scale": factor} if factor > 0 and min(size) <= 0 else {"out_shape": size}
    if call.type.startswith("nearest"):
        return layers.resize_nearest(call.one("X"), align_corners=call["align_corners"], **given)
    corners = {"align_corners": call["align_corners"], "align_mode": call["align_mode"]}
    return layers.resize_bilinear(call.one("X"), **corners, **given)


_WINDOW2 = {
    "strides": [1, 1], "paddings": [0, 0], "padding_algorithm": "EXPLICIT", "dilations": [1, 1], "groups": 1,
    "data_format": "NCHW",
}  # fmt: skip
_WINDOW3 = {**_WINDOW2, "strides": [1] * 3, "paddings": [0] * 3, "dilations": [1] * 3, "data_format": "NCDHW"}
_BACK: dict[str, list[int]] = {"output_size": [], "output_padding": []}
_POOL = {
    "ksize": REQUIRED, "pooling_type": "", "ceil_mode": False, "exclusive": True, "global_pooling": False,
    "adaptive": False, "padding_algorithm": "EXPLICIT",
}  # fmt: skip
_RESIZED = {"out_h": 0, "out_w": 0, "align_corners": True, "align_mode": 1, "interp_method": "bilinear"}
_LOOKUP = {"padding_idx": -1, "is_sparse": False, "is_distributed": False}
_NORMS = {"epsilon": 1e-5}

PRODUCTS: dict[str, Kind] = {
    "mul": layer(layers.mul, "X Y", attrs={"x_num_col_dims": 1, "y_num_col_dims": 1}),
    "matmul": layer(layers.matmul, "X Y", attrs={"transpose_X": False, "transpose_Y": False, "alpha": 1.0},
                    names={"transpose_X": "transpose_x", "transpose_Y": "transpose_y"}),
    "matmul_v2": Kind(_matmul, "X Y", attrs={"trans_x": False, "trans_y": False}),
    "bmm": layer(layers.bmm, "X Y"), "dot": layer(layers.dot, "X Y"), "kron": layer(layers.kron, "X Y"),
    "addmm": layer(layers.addmm, "Input X Y", attrs={"Alpha": 1.0, "Beta": 1.0},
                   names={"Alpha": "alpha", "Beta": "beta"}),
    "fsp": layer(layers.fsp_matrix, "X Y"),
    "bilinear_tensor_product": Kind(_bilinear, "X Y Weight Bias?"),
    "lookup_table": Kind(_lookup, "W Ids", attrs=_LOOKUP), "lookup_table_v2": Kind(_lookup, "W Ids", attrs=_LOOKUP),
    "conv2d": Kind(_convolution, "Input Filter Bias?", "Output", _WINDOW2),
    "depthwise_conv2d": Kind(_convolution, "Input Filter Bias?", "Output", _WINDOW2),
    "conv3d": Kind(_convolution, "Input Filter Bias?", "Output", _WINDOW3),
    "conv2d_transpose": Kind(_transposed, "Input Filter Bias?", "Output", {**_WINDOW2, **_BACK}),
    "depthwise_conv2d_transpose": Kind(_transposed, "Input Filter Bias?", "Output", {**_WINDOW2, **_BACK}),
    "conv3d_transpose": Kind(_transposed, "Input Filter Bias?", "Output", {
        **_WINDOW3, **_BACK, "data_format": "NCHW",
    }),
    "pool2d": Kind(_pool, attrs={**_POOL, "strides": [1, 1], "paddings": [0, 0], "data_format": "NCHW"}),
    "pool3d": Kind(_pool, attrs={**_POOL, "strides": [1] * 3, "paddings": [0] * 3, "data_format": "NCDHW"}),
    "row_conv": Kind(_row_conv, "X Filter"),
    "batch_norm": Kind(
        _batch_norm, "X Scale? Bias? Mean Variance MomentumTensor?",
        "Y MeanOut- VarianceOut- SavedMean- SavedVariance- ReserveSpace-",
        {"momentum": 0.9, **_NORMS, "is_test": False, "data_layout": "NCHW", "use_global_stats": False},
    ),
    "layer_norm": Kind(_layer_norm, "X Scale? Bias?", "Y Mean- Variance-", {**_NORMS, "begin_norm_axis": 1}),
    "group_norm": Kind(_group_norm, "X Scale? Bias?", "Y Mean- Variance-", {**_NORMS, "groups": REQUIRED}),
    "instance_norm": Kind(_instance_norm, "X Scale? Bias?", "Y SavedMean- SavedVariance-", _NORMS),
    "lrn": layer(layers.lrn, "X", "Out MidOut-", {"n": 5, "k": 2.0, "alpha": 1e-4, "beta": 0.75}),
    "affine_channel": layer(layers.affine_channel, "X Scale Bias"),
    "bilinear_interp": Kind(_resized, attrs={**_RESIZED, "scale": 0.0}),
    "nearest_interp": Kind(_resized, attrs={**_RESIZED, "scale": 0.0}),
    "bilinear_interp_v2": Kind(_resized, attrs={**_RESIZED, "scale": []}),
    "nearest_interp_v2": Kind(_resized, attrs={**_RESIZED, "scale": []}),
    "pixel_shuffle": layer(layers.pixel_shuffle, attrs={"upscale_factor": 1}),
    "shuffle_channel": layer(layers.shuffle_channel, attrs={"group": 1}),
    "space_to_depth": layer(layers.space_to_depth, attrs={"blocksize": REQUIRED}),
    "temporal_shift": layer(layers.temporal_shift, attrs={"seg_num": REQUIRED, "shift_ratio": 0.25}),
    "grid_sampler": layer(layers.grid_sampler, "X Grid", "Output"),
    "unfold": layer(layers.unfold, "X", "Y", {
        "kernel_sizes": REQUIRED, "strides": REQUIRED, "paddings": REQUIRED, "dilations": REQUIRED,
    }),
    "add_position_encoding": layer(layers.add_position_encoding, attrs={"alpha": 1.0, "beta": 1.0}),
}  # fmt: skip
