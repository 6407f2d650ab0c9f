"""Contracts of torch's private operators: those that Penstock's own tables name exist, with the operands relied on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tools import private_names

from penstock.compat import torch as private

BATCH_NORM = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
OPERANDS: dict[str, tuple[str, ...]] = {
    "aten::_native_batch_norm_legit": BATCH_NORM,
    "aten::_to_copy": ("self", "dtype", "layout", "device"),
    "aten::_pack_padded_sequence": ("input", "lengths", "batch_first"),
    "aten::_scaled_dot_product_flash_attention_for_cpu": ("query", "key", "value", "dropout_p", "is_causal"),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (
        *("grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal"),
    ),
    "aten::_upsample_bilinear2d_aa": ("self", "output_size", "align_corners", "scales_h", "scales_w"),
    "aten::_upsample_bicubic2d_aa": ("self", "output_size", "align_corners", "scales_h", "scales_w"),
    "aten::_upsample_nearest_exact1d": ("self", "output_size", "scales"),
    "aten::_upsample_nearest_exact2d": ("self", "output_size", "scales_h", "scales_w"),
    "aten::_upsample_nearest_exact3d": ("self", "output_size", "scales_d", "scales_h", "scales_w"),
    **{f"aten::{name}": () for name in private.REFUSED_OPERATORS},
}
"""Operator -> the operands by position that a table or a call of Penstock's relies on; none: that it is there."""


@pytest.mark.parametrize("operator", sorted(OPERANDS))
def test_torch_keeps_operator(operator: str) -> None:
    packet = getattr(torch.ops.aten, operator.removeprefix("aten::"))
    overload = getattr(packet, packet.overloads()[0])
    arguments = private.schema_of(overload).arguments
    relied_on = OPERANDS[operator]
    assert tuple(spec.name for spec in arguments[: len(relied_on)]) == relied_on
    if relied_on:
        assert all(spec.has_default_value() for spec in arguments[len(relied_on) :])


def test_every_private_operator_has_a_contract() -> None:
    compat = Path(private.__file__)
    assert {entry.name for entry in private_names.entries(compat) if entry.kind == "operator"} == set(OPERANDS)
