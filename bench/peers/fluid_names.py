"""Names of Fluid whose numbers are compared with PaddlePaddle's, and the case that compares each.

ROWS has every public name of Fluid 1.8's optimizers, schedules, initializers, regularizers, clips, metrics and losses
that Penstock has; tests/program/test_names_compared_with_fluid.py fails for a name without a row, and for a row without
its case. A second name of one thing (`SGDOptimizer`) needs none. GROUPS has the cases that `paddle_numbers` records.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.peers import fluid_cases, fluid_counts, fluid_fills, fluid_losses, fluid_wrappers

GROUPS: Mapping[str, Mapping[str, Any]] = {
    "optimizers": fluid_cases.OPTIMIZERS,
    "sparse": fluid_cases.SPARSE,
    "schedules": fluid_cases.SCHEDULES,
    "initializers": fluid_cases.INITIALIZERS,
    "layers": fluid_cases.LAYERS,
    "metrics": fluid_cases.METRICS,
    "recurrent": fluid_cases.RECURRENT,
    "losses": fluid_losses.LOSSES,
    "sampled": fluid_losses.SAMPLED,
    "wrapped": fluid_wrappers.WRAPPED,
    "filled": fluid_fills.FILLED,
    "drawn": fluid_fills.DRAWS,
    "counts": fluid_counts.COUNTS,
    "objects": fluid_counts.OBJECTS,
    "evaluated": {name: name for name in fluid_counts.EVALUATED},
}
"""Group of the table -> its cases."""

_COMPRESSED = "tests/program/test_compressed_gradients.py::test_the_largest_sums_of_gradients_are_exchanged"
_NOTHING = "has no numbers of its own"
ROWS: Mapping[str, Mapping[str, str]] = {
    "paddle.fluid.optimizer": {
        "Adadelta": "optimizers: Adadelta",
        "Adagrad": "optimizers: Adagrad",
        "Adam": "optimizers: Adam",
        "Adamax": "optimizers: Adamax",
        "DGCMomentumOptimizer": _COMPRESSED,  # 2.6.2 has its kernels on GPUs alone
        "DecayedAdagrad": "optimizers: DecayedAdagrad",
        "Dpsgd": "optimizers: Dpsgd",
        "ExponentialMovingAverage": "wrapped: ExponentialMovingAverage",
        "Ftrl": "optimizers: Ftrl",
        "LambOptimizer": "optimizers: Lamb",
        "LarsMomentum": "optimizers: LarsMomentum",
        "LookaheadOptimizer": "wrapped: LookaheadOptimizer",
        "ModelAverage": "wrapped: ModelAverage, window of 0.5, 2 to 6",
        "Momentum": "optimizers: Momentum",
        "RMSPropOptimizer": "optimizers: RMSProp",
        "RecomputeOptimizer": "wrapped: RecomputeOptimizer",
        "SGD": "optimizers: SGD",
    },
    "paddle.fluid.contrib.extend_optimizer.extend_optimizer_with_weight_decay": {
        "extend_with_decoupled_weight_decay": "wrapped: extend_with_decoupled_weight_decay",
    },
    "paddle.fluid.layers.learning_rate_scheduler": {
        "cosine_decay": "schedules: cosine_decay",
        "exponential_decay": "schedules: exponential_decay",
        "inverse_time_decay": "schedules: inverse_time_decay",
        "linear_lr_warmup": "schedules: linear_lr_warmup to a number",
        "natural_exp_decay": "schedules: natural_exp_decay",
        "noam_decay": "schedules: noam_decay",
        "piecewise_decay": "schedules: piecewise_decay",
        "polynomial_decay": "schedules: polynomial_decay",
    },
    "paddle.fluid.initializer": {
        "Bilinear": "filled: Bilinear 4",
        "Constant": "initializers: Constant",
        "MSRA": "drawn: MSRA",
        "Normal": "drawn: Normal",
        "NumpyArrayInitializer": "filled: NumpyArrayInitializer",
        "TruncatedNormal": "drawn: TruncatedNormal",
        "Uniform": "drawn: Uniform",
        "Xavier": "drawn: Xavier",
    },
    "paddle.fluid.regularizer": {
        "L1Decay": "optimizers: L1 decay",
        "L2Decay": "optimizers: L2 decay",
    },
    "paddle.fluid.clip": {
        "ErrorClipByValue": "wrapped: ErrorClipByValue",
        "GradientClipByGlobalNorm": "optimizers: clip by global norm",
        "GradientClipByNorm": "optimizers: clip by norm",
        "GradientClipByValue": "optimizers: clip by value",
        "set_gradient_clip": "wrapped: set_gradient_clip",
    },
    "paddle.fluid.metrics": {
        "Accuracy": "objects: Accuracy",
        "Auc": "objects: Auc",
        "ChunkEvaluator": "objects: ChunkEvaluator",
        "CompositeMetric": "objects: CompositeMetric",
        "DetectionMAP": "evaluated: DetectionMAP",
        "EditDistance": "objects: EditDistance",
        "MetricBase": _NOTHING,
        "Precision": "objects: Precision",
        "Recall": "objects: Recall",
    },
    "paddle.fluid.average": {
        "WeightedAverage": "objects: WeightedAverage",
    },
    "paddle.fluid.evaluator": {
        "ChunkEvaluator": "evaluated: ChunkEvaluator",
        "DetectionMAP": "evaluated: DetectionMAP",
        "EditDistance": "evaluated: EditDistance",
    },
    "paddle.fluid.layers.metric_op": {
        "accuracy": "metrics: accuracy",
        "auc": "metrics: auc",
    },
    "paddle.fluid.contrib.layers.metric_op": {
        "ctr_metric_bundle": "counts: ctr_metric_bundle",
    },
    "paddle.fluid.layers.loss": {
        "bpr_loss": "losses: bpr_loss",
        "center_loss": "losses: center_loss",
        "cross_entropy": "layers: cross_entropy",
        "edit_distance": "counts: edit_distance",
        "hsigmoid": "losses: hsigmoid",
        "huber_loss": "layers: huber_loss",
        "kldiv_loss": "losses: kldiv_loss, mean",
        "margin_rank_loss": "losses: margin_rank_loss",
        "mse_loss": "losses: mse_loss",
        "nce": "sampled: nce, uniform",
        "npair_loss": "losses: npair_loss",
        "rank_loss": "losses: rank_loss",
        "sampled_softmax_with_cross_entropy": "losses: sampled_softmax_with_cross_entropy",
        "sigmoid_cross_entropy_with_logits": "layers: sigmoid_cross_entropy_with_logits",
        "softmax_with_cross_entropy": "layers: softmax_with_cross_entropy",
        "square_error_cost": "layers: square_error_cost",
        "teacher_student_sigmoid_loss": "losses: teacher_student_sigmoid_loss",
        "warpctc": "losses: warpctc",
    },
}
"""Module -> name -> `group: case`, a test of another file, or why there is nothing to compare."""

LOSSES_ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "paddle.fluid.layers.nn": {
        "chunk_eval": "counts: chunk_eval, IOB",
        "cos_sim": "layers: cos_sim",
        "crf_decoding": "counts: crf_decoding",
        "ctc_greedy_decoder": "counts: ctc_greedy_decoder",
        "dice_loss": "losses: dice_loss",
        "fsp_matrix": "losses: fsp_matrix",
        "label_smooth": "losses: label_smooth",
        "linear_chain_crf": "losses: linear_chain_crf",
        "log_loss": "layers: log_loss",
        "mean_iou": "counts: mean_iou",
        "smooth_l1": "layers: smooth_l1",
    },
    "paddle.fluid.layers.detection": {
        "detection_map": "counts: detection_map",
        "sigmoid_focal_loss": "losses: sigmoid_focal_loss",
        "ssd_loss": "losses: ssd_loss",
        "yolov3_loss": "losses: yolov3_loss",
    },
}
"""Losses and metrics among the other layers of a module, whose names that are neither are not listed."""
