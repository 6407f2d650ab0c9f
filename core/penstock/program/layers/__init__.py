"""Fluid's layers: names and arguments as in Fluid 1.8, each a few lines of torch on Variables.

`docs/layers.md` lists them and what differs from Fluid.
"""

from penstock.program.layers.activations import (
    elu,
    gelu,
    hard_sigmoid,
    leaky_relu,
    prelu,
    relu,
    sigmoid,
    softmax,
    swish,
    tanh,
)
from penstock.program.layers.convolution import conv2d, pool2d
from penstock.program.layers.elementwise import (
    abs,
    clip,
    cos_sim,
    elementwise_add,
    elementwise_div,
    elementwise_max,
    elementwise_min,
    elementwise_mul,
    elementwise_pow,
    elementwise_sub,
    exp,
    log,
    matmul,
    mean,
    mul,
    pow,
    reduce_max,
    reduce_mean,
    reduce_min,
    reduce_prod,
    reduce_sum,
    scale,
    sqrt,
    square,
    sum,
    sums,
)
from penstock.program.layers.inputs import data, fluid_data
from penstock.program.layers.losses import (
    accuracy,
    auc,
    cross_entropy,
    huber_loss,
    log_loss,
    sigmoid_cross_entropy_with_logits,
    smooth_l1,
    softmax_with_cross_entropy,
    square_error_cost,
)
from penstock.program.layers.network import dropout, embedding, fc
from penstock.program.layers.normalization import batch_norm, l2_normalize, layer_norm, lrn
from penstock.program.layers.recurrent import dynamic_gru, dynamic_lstm, lstm, sequence_lengths, sequence_pool
from penstock.program.layers.tensor import (
    argmax,
    assign,
    cast,
    concat,
    create_global_var,
    create_parameter,
    expand,
    fill_constant,
    flatten,
    one_hot,
    reshape,
    slice,
    split,
    squeeze,
    stack,
    topk,
    transpose,
    unsqueeze,
)
from penstock.program.training.schedules import (
    cosine_decay,
    exponential_decay,
    inverse_time_decay,
    linear_lr_warmup,
    natural_exp_decay,
    noam_decay,
    piecewise_decay,
    polynomial_decay,
)

__all__ = [
    "abs", "accuracy", "argmax", "assign", "auc", "batch_norm", "cast", "clip", "concat", "conv2d", "cos_sim",
    "cosine_decay", "create_global_var", "create_parameter", "cross_entropy", "data", "dropout", "dynamic_gru",
    "dynamic_lstm", "elementwise_add", "elementwise_div", "elementwise_max", "elementwise_min", "elementwise_mul",
    "elementwise_pow", "elementwise_sub", "elu", "embedding", "exp", "expand", "exponential_decay", "fc",
    "fill_constant", "flatten", "fluid_data", "gelu", "hard_sigmoid", "huber_loss", "inverse_time_decay",
    "l2_normalize", "layer_norm", "leaky_relu", "linear_lr_warmup", "log", "log_loss", "lrn", "lstm", "matmul",
    "mean", "mul", "natural_exp_decay", "noam_decay", "one_hot", "piecewise_decay", "polynomial_decay", "pool2d",
    "pow", "prelu", "reduce_max", "reduce_mean", "reduce_min", "reduce_prod", "reduce_sum", "relu", "reshape",
    "scale", "sequence_lengths", "sequence_pool", "sigmoid", "sigmoid_cross_entropy_with_logits", "slice",
    "smooth_l1", "softmax", "softmax_with_cross_entropy", "split", "sqrt", "square", "square_error_cost", "squeeze",
    "stack", "sum", "sums", "swish", "tanh", "topk", "transpose", "unsqueeze",
]  # fmt: skip
