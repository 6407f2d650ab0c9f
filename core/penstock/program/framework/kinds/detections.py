"""Kinds over boxes in images."""

from __future__ import annotations

from typing import Any

from penstock.program import layers
from penstock.program.framework.kinds.call import REQUIRED, Call, Kind, layer


def _steps(call: Call) -> list[float]:
    return [call["step_w"], call["step_h"]]


def _prior(call: Call) -> Any:
    return layers.prior_box(
        call.one("Input"), call.one("Image"), list(call["min_sizes"]), list(call["max_sizes"]) or None,
        list(call["aspect_ratios"]), list(call["variances"]), call["flip"], call["clip"], _steps(call), call["offset"],
        min_max_aspect_ratios_order=call["min_max_aspect_ratios_order"],
    )  # fmt: skip


def _density(call: Call) -> Any:
    return layers.density_prior_box(
        call.one("Input"), call.one("Image"), list(call["densities"]), list(call["fixed_sizes"]),
        list(call["fixed_ratios"]), list(call["variances"]), call["clip"], _steps(call), call["offset"],
        call["flatten_to_2d"],
    )  # fmt: skip


def _anchors(call: Call) -> Any:
    return layers.anchor_generator(
        call.one("Input"), call["anchor_sizes"], call["aspect_ratios"], call["variances"], call["stride"],
        call["offset"],
    )  # fmt: skip


def _coder(call: Call) -> Any:
    variance = call.optional("PriorBoxVar")
    return layers.box_coder(
        call.one("PriorBox"), variance if variance is not None else list(call["variance"]) or None,
        call.one("TargetBox"), call["code_type"], call["box_normalized"], axis=call["axis"],
    )  # fmt: skip


def _suppressed(call: Call) -> Any:
    return layers.multiclass_nms(
        call.one("BBoxes"), call.one("Scores"), call["score_threshold"], call["nms_top_k"], call["keep_top_k"],
        call["nms_threshold"], call["normalized"], call["nms_eta"], call["background_label"],
    )  # fmt: skip


def _yolo(call: Call) -> Any:
    return layers.yolo_box(
        call.one("X"), call.one("ImgSize"), call["anchors"], call["class_num"], call["conf_thresh"],
        call["downsample_ratio"], call["clip_bbox"],
    )  # fmt: skip


_STEPS = {"step_w": 0.0, "step_h": 0.0, "offset": 0.5}
_REGION = {"pooled_height": 1, "pooled_width": 1, "spatial_scale": 1.0}

DETECTIONS: dict[str, Kind] = {
    "iou_similarity": layer(layers.iou_similarity, "X Y", attrs={"box_normalized": True}),
    "box_coder": Kind(_coder, "PriorBox PriorBoxVar? TargetBox", "OutputBox", {
        "code_type": "encode_center_size", "box_normalized": True, "axis": 0, "variance": [],
    }),
    "box_clip": layer(layers.box_clip, "Input ImInfo", "Output"),
    "polygon_box_transform": layer(layers.polygon_box_transform, "Input", "Output"),
    "prior_box": Kind(_prior, "Input Image", "Boxes Variances", {
        "min_sizes": REQUIRED, "max_sizes": [], "aspect_ratios": [], "variances": [], "flip": True, "clip": True,
        **_STEPS, "min_max_aspect_ratios_order": False,
    }),
    "density_prior_box": Kind(_density, "Input Image", "Boxes Variances", {
        "variances": REQUIRED, "clip": True, "flatten_to_2d": False, **_STEPS, "fixed_sizes": [], "fixed_ratios": [],
        "densities": [],
    }),
    "anchor_generator": Kind(_anchors, "Input", "Anchors Variances", {
        "anchor_sizes": REQUIRED, "aspect_ratios": REQUIRED, "variances": REQUIRED, "stride": [16.0, 16.0],
        "offset": 0.5,
    }),
    "multiclass_nms": Kind(_suppressed, "BBoxes Scores", "Out", {
        "background_label": 0, "score_threshold": REQUIRED, "nms_top_k": REQUIRED, "keep_top_k": REQUIRED,
        "nms_threshold": 0.3, "nms_eta": 1.0, "normalized": True,
    }),
    "yolo_box": Kind(_yolo, "X ImgSize", "Boxes Scores", {
        "anchors": [], "class_num": 1, "conf_thresh": 0.01, "downsample_ratio": 32, "clip_bbox": True,
    }),
    "roi_align": layer(layers.roi_align, "X ROIs", attrs={**_REGION, "sampling_ratio": -1}),
    "roi_pool": layer(layers.roi_pool, "X ROIs", "Out Argmax-", _REGION),
}  # fmt: skip
