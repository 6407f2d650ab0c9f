"""Groups of layers that Fluid's book examples use (`fluid.nets`). Source: python/paddle/fluid/nets.py (Fluid 1.8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.errors import ProgramError
from penstock.program.layers.activations import sigmoid, softmax
from penstock.program.layers.convolution import conv2d, pool2d
from penstock.program.layers.elementwise import matmul
from penstock.program.layers.expected import expect_known, expect_rank, refuse
from penstock.program.layers.network import dropout, fc
from penstock.program.layers.normalization import batch_norm
from penstock.program.layers.sequences import sequence_conv, sequence_pool
from penstock.program.layers.tensor import split
from penstock.program.layers.windows import Size
from penstock.program.record.source import user_line


def simple_img_conv_pool(
    input: Any,
    num_filters: int,
    filter_size: Size,
    pool_size: Size,
    pool_stride: Size,
    pool_padding: Size = 0,
    pool_type: str = "max",
    global_pooling: bool = False,
    conv_stride: Size = 1,
    conv_padding: Size = 0,
    conv_dilation: Size = 1,
    conv_groups: int = 1,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    use_cudnn: bool = True,
) -> Any:
    """One convolution and one pooling."""
    convolved = conv2d(
        input, num_filters, filter_size, conv_stride, conv_padding, conv_dilation, conv_groups, param_attr, bias_attr,
        act=act,
    )  # fmt: skip
    return pool2d(convolved, pool_size, pool_type, pool_stride, pool_padding, global_pooling)


def img_conv_group(
    input: Any,
    conv_num_filter: Sequence[int],
    pool_size: Size,
    conv_padding: int | Sequence[int] = 1,
    conv_filter_size: int | Sequence[int] = 3,
    conv_act: str | None = None,
    param_attr: Any = None,
    conv_with_batchnorm: bool | Sequence[bool] = False,
    conv_batchnorm_drop_rate: float | Sequence[float] = 0.0,
    pool_stride: Size = 1,
    pool_type: str = "max",
    use_cudnn: bool = True,
) -> Any:
    """Several convolutions, each with batch-norm and dropout if asked for, and one pooling (a block of VGG)."""
    count = len(conv_num_filter)
    padding, size = _each(conv_padding, count, "conv_padding"), _each(conv_filter_size, count, "conv_filter_size")
    attrs = _each(param_attr, count, "param_attr")
    normed = _each(conv_with_batchnorm, count, "conv_with_batchnorm")
    rates = _each(conv_batchnorm_drop_rate, count, "conv_batchnorm_drop_rate")
    for i, filters in enumerate(conv_num_filter):
        act = None if normed[i] else conv_act
        input = conv2d(input, filters, size[i], padding=padding[i], param_attr=attrs[i], act=act)
        if normed[i]:
            input = batch_norm(input, act=conv_act)
            input = dropout(input, rates[i]) if rates[i] > 0 else input
    return pool2d(input, pool_size, pool_type, pool_stride)


def _each(value: Any, count: int, what: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ProgramError(f"{user_line()}: img_conv_group: {what} has {len(value)} entries for {count} convolutions")
    return list(value)


def sequence_conv_pool(
    input: Any,
    num_filters: int,
    filter_size: int,
    param_attr: Any = None,
    act: str = "sigmoid",
    pool_type: str = "max",
    bias_attr: Any = None,
) -> Any:
    """One convolution over the rows of each sequence, and one pooling."""
    convolved = sequence_conv(input, num_filters, filter_size, param_attr=param_attr, bias_attr=bias_attr, act=act)
    return sequence_pool(convolved, pool_type)


def glu(input: Any, dim: int = -1) -> Any:
    """Return the first half of `input` along `dim`, times the sigmoid of the second."""
    first, second = split(input, 2, dim)
    return first * sigmoid(second)


def scaled_dot_product_attention(
    queries: Any, keys: Any, values: Any, num_heads: int = 1, dropout_rate: float = 0.0
) -> Any:
    """Return for each query the values, weighted by softmax(query key / sqrt(size of a head)).

    Shapes: queries [n, q, d], keys [n, k, d], values [n, k, v]; result [n, q, v]. With several heads, each of the three
    goes through an fc of its own size first, and d and v are split between the heads. `dropout_rate`: of the weights.
    """
    name = "scaled_dot_product_attention"
    for operand in (queries, keys, values):
        expect_rank(name, operand, 3)
    width, depth = expect_known(name, keys, 2), expect_known(name, values, 2)
    if expect_known(name, queries, 2) != width or width % num_heads or depth % num_heads:
        instead = f"Keys and queries have one size, which num_heads={num_heads} divides, as that of values"
        refuse(name, f"queries of size {width}, as the keys", queries, instead)
    heads = [queries, keys, values]
    if num_heads > 1:
        heads = [fc(x, expect_known(name, x, 2), num_flatten_dims=2) for x in heads]
        heads = [x.unflatten(2, (num_heads, -1)).transpose(1, 2) for x in heads]
    query, key, value = heads
    weights = softmax(matmul(query * (width // num_heads) ** -0.5, key, transpose_y=True))
    if dropout_rate:
        weights = dropout(weights, dropout_rate)
    found = matmul(weights, value)
    return found if num_heads == 1 else found.transpose(1, 2).flatten(2)
