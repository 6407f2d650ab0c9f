"""Fluid's layers: names and arguments as in Fluid 1.8, each a few lines of torch on Variables.

`docs/layers.md` lists them and what differs from Fluid.
"""

from types import FunctionType

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
from penstock.program.layers.arrays import array_length, array_read, array_write, create_array, tensor_array_to_tensor
from penstock.program.layers.beam_search import beam_search, beam_search_decode, gather_tree
from penstock.program.layers.boxes import (
    box_clip,
    box_coder,
    iou_similarity,
    polygon_box_transform,
    sigmoid_focal_loss,
    yolo_box,
)
from penstock.program.layers.chunks import chunk_eval
from penstock.program.layers.control_flow import Switch, While, case, cond, switch_case
from penstock.program.layers.convolution import (
    adaptive_pool2d,
    adaptive_pool3d,
    conv2d,
    conv2d_transpose,
    conv3d,
    conv3d_transpose,
    pool2d,
    pool3d,
)
from penstock.program.layers.creation import (
    argmin,
    argsort,
    autoincreased_step_counter,
    clip_by_norm,
    create_tensor,
    diag,
    expand_as,
    eye,
    fill_constant_batch_size_like,
    full_like,
    gather,
    gather_nd,
    label_smooth,
    linspace,
    ones,
    ones_like,
    pad,
    pad2d,
    range,
    reverse,
    scatter,
    shape,
    strided_slice,
    tril,
    triu,
    unstack,
    zeros,
    zeros_like,
)
from penstock.program.layers.crf import crf_decoding, linear_chain_crf
from penstock.program.layers.ctc import ctc_greedy_decoder, edit_distance, warpctc
from penstock.program.layers.ctr import continuous_value_model, data_norm
from penstock.program.layers.decode_helpers import (
    BasicDecoder,
    DecodeHelper,
    GreedyEmbeddingHelper,
    SampleEmbeddingHelper,
    TrainingHelper,
)
from penstock.program.layers.decoding import BeamSearchDecoder, Decoder, dynamic_decode
from penstock.program.layers.deformable import deformable_conv
from penstock.program.layers.detections import detection_map
from penstock.program.layers.distributions import Categorical, MultivariateNormalDiag, Normal, Uniform
from penstock.program.layers.dynamic_rnn import DynamicRNN, IfElse
from penstock.program.layers.elementwise import (
    abs,
    clip,
    cos_sim,
    elementwise_add,
    elementwise_div,
    elementwise_floordiv,
    elementwise_max,
    elementwise_min,
    elementwise_mod,
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
from penstock.program.layers.functions import (
    acos,
    asin,
    atan,
    brelu,
    ceil,
    clamp,
    cos,
    cumsum,
    equal,
    erf,
    floor,
    greater_equal,
    greater_than,
    hard_shrink,
    hard_swish,
    has_inf,
    has_nan,
    increment,
    is_empty,
    isfinite,
    less_equal,
    less_than,
    log1p,
    log_softmax,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    logsigmoid,
    mish,
    not_equal,
    reciprocal,
    reduce_all,
    reduce_any,
    relu6,
    round,
    rsqrt,
    selu,
    sign,
    sin,
    soft_relu,
    softplus,
    softshrink,
    softsign,
    stanh,
    tanh_shrink,
    thresholded_relu,
)
from penstock.program.layers.hashes import hash
from penstock.program.layers.images import (
    affine_channel,
    affine_grid,
    grid_sampler,
    image_resize,
    image_resize_short,
    interpolate,
    maxout,
    pixel_shuffle,
    resize_bilinear,
    resize_nearest,
    resize_trilinear,
    shuffle_channel,
    similarity_focus,
    space_to_depth,
    temporal_shift,
    unfold,
)
from penstock.program.layers.inputs import data, fluid_data
from penstock.program.layers.levels import lod_append, lod_reset, sequence_scatter, sequence_slice
from penstock.program.layers.linear_algebra import (
    addcmul,
    addmm,
    allclose,
    bilinear_tensor_product,
    bmm,
    cross,
    diag_embed,
    dist,
    dot,
    elementwise_equal,
    fsp_matrix,
    kron,
    logsumexp,
    t,
    trace,
)
from penstock.program.layers.losses import (
    accuracy,
    auc,
    bpr_loss,
    center_loss,
    cross_entropy,
    dice_loss,
    huber_loss,
    kldiv_loss,
    log_loss,
    margin_rank_loss,
    mean_iou,
    mse_loss,
    npair_loss,
    rank_loss,
    sigmoid_cross_entropy_with_logits,
    smooth_l1,
    softmax_with_cross_entropy,
    square_error_cost,
    teacher_student_sigmoid_loss,
)
from penstock.program.layers.lstm_units import dynamic_lstmp, lstm_unit
from penstock.program.layers.matching import bipartite_match, ssd_loss, target_assign
from penstock.program.layers.messages import Assert, Print
from penstock.program.layers.network import dropout, embedding, fc
from penstock.program.layers.normalization import (
    batch_norm,
    group_norm,
    instance_norm,
    l2_normalize,
    layer_norm,
    lrn,
    spectral_norm,
)
from penstock.program.layers.positions import (
    arange,
    crop,
    crop_tensor,
    flip,
    full,
    index_sample,
    index_select,
    meshgrid,
    multiplex,
    pad_constant_like,
    rank,
    roll,
    scatter_nd,
    scatter_nd_add,
    shard_index,
    size,
)
from penstock.program.layers.priors import anchor_generator, density_prior_box, multi_box_head, prior_box
from penstock.program.layers.python_functions import py_func
from penstock.program.layers.random import (
    gaussian_random,
    gaussian_random_batch_size_like,
    randint,
    randn,
    random_crop,
    randperm,
    sampling_id,
    uniform_random,
    uniform_random_batch_size_like,
)
from penstock.program.layers.ranks import (
    array_to_lod_tensor,
    lod_rank_table,
    lod_tensor_to_array,
    max_sequence_len,
    reorder_lod_tensor_by_rank,
    shrink_memory,
)
from penstock.program.layers.readers import create_py_reader_by_data, double_buffer, py_reader, read_file
from penstock.program.layers.recurrent import dynamic_gru, dynamic_lstm, lstm
from penstock.program.layers.recurrent_units import gru_unit
from penstock.program.layers.regions import roi_align, roi_pool
from penstock.program.layers.results import named
from penstock.program.layers.rnn_cells import GRUCell, LSTMCell, RNNCell, rnn
from penstock.program.layers.sampling import hsigmoid, nce, sampled_softmax_with_cross_entropy
from penstock.program.layers.selections import nonzero, unique, unique_with_counts, where
from penstock.program.layers.sequences import (
    sequence_concat,
    sequence_conv,
    sequence_enumerate,
    sequence_expand,
    sequence_expand_as,
    sequence_first_step,
    sequence_last_step,
    sequence_lengths,
    sequence_mask,
    sequence_pad,
    sequence_pool,
    sequence_reshape,
    sequence_reverse,
    sequence_softmax,
    sequence_unpad,
)
from penstock.program.layers.static_rnn import StaticRNN
from penstock.program.layers.steps import add_position_encoding, im2sequence, row_conv
from penstock.program.layers.suppression import detection_output, multiclass_nms
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
from penstock.program.layers.while_loops import while_loop
from penstock.program.layers.yolo_loss import yolov3_loss
from penstock.program.record.declared_sizes import takes_declared_sizes
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
    "Assert", "BasicDecoder", "BeamSearchDecoder", "Categorical", "DecodeHelper", "Decoder", "DynamicRNN", "GRUCell",
    "GreedyEmbeddingHelper", "IfElse", "LSTMCell", "MultivariateNormalDiag", "Normal", "Print", "RNNCell",
    "SampleEmbeddingHelper", "StaticRNN", "Switch", "TrainingHelper", "Uniform", "While", "abs", "accuracy", "acos",
    "adaptive_pool2d", "adaptive_pool3d", "add_position_encoding", "addcmul", "addmm", "affine_channel", "affine_grid",
    "allclose", "anchor_generator", "arange", "argmax", "argmin", "argsort", "array_length", "array_read",
    "array_to_lod_tensor", "array_write", "asin", "assign", "atan", "auc", "autoincreased_step_counter", "batch_norm",
    "beam_search", "beam_search_decode", "bilinear_tensor_product", "bipartite_match", "bmm", "box_clip", "box_coder",
    "bpr_loss", "brelu", "case", "cast", "ceil", "center_loss", "chunk_eval", "clamp", "clip", "clip_by_norm", "concat",
    "cond", "continuous_value_model", "conv2d", "conv2d_transpose", "conv3d", "conv3d_transpose", "cos", "cos_sim",
    "cosine_decay", "create_array", "create_global_var", "create_parameter", "create_py_reader_by_data",
    "create_tensor", "crf_decoding", "crop", "crop_tensor", "cross", "cross_entropy", "ctc_greedy_decoder", "cumsum",
    "data", "data_norm", "deformable_conv", "density_prior_box", "detection_map", "detection_output", "diag",
    "diag_embed", "dice_loss", "dist", "dot", "double_buffer", "dropout", "dynamic_decode", "dynamic_gru",
    "dynamic_lstm", "dynamic_lstmp", "edit_distance", "elementwise_add", "elementwise_div", "elementwise_equal",
    "elementwise_floordiv", "elementwise_max", "elementwise_min", "elementwise_mod", "elementwise_mul",
    "elementwise_pow", "elementwise_sub", "elu", "embedding", "equal", "erf", "exp", "expand", "expand_as",
    "exponential_decay", "eye", "fc", "fill_constant", "fill_constant_batch_size_like", "flatten", "flip", "floor",
    "fluid_data", "fsp_matrix", "full", "full_like", "gather", "gather_nd", "gather_tree", "gaussian_random",
    "gaussian_random_batch_size_like", "gelu", "greater_equal", "greater_than", "grid_sampler", "group_norm",
    "gru_unit", "hard_shrink", "hard_sigmoid", "hard_swish", "has_inf", "has_nan", "hash", "hsigmoid", "huber_loss",
    "im2sequence", "image_resize", "image_resize_short", "increment", "index_sample", "index_select", "instance_norm",
    "interpolate", "inverse_time_decay", "iou_similarity", "is_empty", "isfinite", "kldiv_loss", "kron", "l2_normalize",
    "label_smooth", "layer_norm", "leaky_relu", "less_equal", "less_than", "linear_chain_crf", "linear_lr_warmup",
    "linspace", "lod_append", "lod_rank_table", "lod_reset", "lod_tensor_to_array", "log", "log1p", "log_loss",
    "log_softmax", "logical_and", "logical_not", "logical_or", "logical_xor", "logsigmoid", "logsumexp", "lrn", "lstm",
    "lstm_unit", "margin_rank_loss", "matmul", "max_sequence_len", "maxout", "mean", "mean_iou", "meshgrid", "mish",
    "mse_loss", "mul", "multi_box_head", "multiclass_nms", "multiplex", "natural_exp_decay", "nce", "noam_decay",
    "nonzero", "not_equal", "npair_loss", "one_hot", "ones", "ones_like", "pad", "pad2d", "pad_constant_like",
    "piecewise_decay", "pixel_shuffle", "polygon_box_transform", "polynomial_decay", "pool2d", "pool3d", "pow", "prelu",
    "prior_box", "py_func", "py_reader", "randint", "randn", "random_crop", "randperm", "range", "rank", "rank_loss",
    "read_file", "reciprocal", "reduce_all", "reduce_any", "reduce_max", "reduce_mean", "reduce_min", "reduce_prod",
    "reduce_sum", "relu", "relu6", "reorder_lod_tensor_by_rank", "reshape", "resize_bilinear", "resize_nearest",
    "resize_trilinear", "reverse", "rnn", "roi_align", "roi_pool", "roll", "round", "row_conv", "rsqrt",
    "sampled_softmax_with_cross_entropy", "sampling_id", "scale", "scatter", "scatter_nd", "scatter_nd_add", "selu",
    "sequence_concat", "sequence_conv", "sequence_enumerate", "sequence_expand", "sequence_expand_as",
    "sequence_first_step", "sequence_last_step", "sequence_lengths", "sequence_mask", "sequence_pad", "sequence_pool",
    "sequence_reshape", "sequence_reverse", "sequence_scatter", "sequence_slice", "sequence_softmax", "sequence_unpad",
    "shape", "shard_index", "shrink_memory", "shuffle_channel", "sigmoid", "sigmoid_cross_entropy_with_logits",
    "sigmoid_focal_loss", "sign", "similarity_focus", "sin", "size", "slice", "smooth_l1", "soft_relu", "softmax",
    "softmax_with_cross_entropy", "softplus", "softshrink", "softsign", "space_to_depth", "spectral_norm", "split",
    "sqrt", "square", "square_error_cost", "squeeze", "ssd_loss", "stack", "stanh", "strided_slice", "sum", "sums",
    "swish", "switch_case", "t", "tanh", "tanh_shrink", "target_assign", "teacher_student_sigmoid_loss",
    "temporal_shift", "tensor_array_to_tensor", "thresholded_relu", "topk", "trace", "transpose", "tril", "triu",
    "unfold", "uniform_random", "uniform_random_batch_size_like", "unique", "unique_with_counts", "unsqueeze",
    "unstack", "warpctc", "where", "while_loop", "yolo_box", "yolov3_loss", "zeros", "zeros_like",
]  # fmt: skip

_SCHEDULES = {
    "cosine_decay", "exponential_decay", "inverse_time_decay", "linear_lr_warmup", "natural_exp_decay", "noam_decay",
    "piecewise_decay", "polynomial_decay",
}  # fmt: skip
_TAKING_FUNCTIONS = {"case", "cond", "data", "fluid_data", "py_func", "switch_case", "while_loop"}
for _name in __all__:
    if isinstance(_layer := globals()[_name], FunctionType) and _name not in _TAKING_FUNCTIONS:
        globals()[_name] = takes_declared_sizes(_layer if _name in _SCHEDULES else named(_layer))
