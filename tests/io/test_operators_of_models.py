"""Operators of `__model__`: what their attributes ask for is done, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import UserError
from penstock.io.fluid.schema import message
from penstock.program.framework.kinds.table import KINDS
from penstock.scope import Scope

FIELDS = ((bool, 6, "b"), (int, 0, "i"), (float, 1, "f"), (str, 2, "s"), (list, 3, "ints"))
INT32, INT64, FLOAT32 = 2, 3, 5
X = np.array([[[3.0, -1.0, 2.0], [0.5, 7.0, -4.0]]], np.float32)


def add_op(
    block: Any,
    kind: str,
    inputs: Mapping[str, Sequence[str]],
    outputs: Mapping[str, Sequence[str]],
    attrs: Mapping[str, Any],
) -> None:
    op = block.ops.add(type=kind)
    for slots, given in ((op.inputs, inputs), (op.outputs, outputs)):
        for slot, names in given.items():
            slots.add(parameter=slot, arguments=names)
    for name, value in attrs.items():
        number, field = next((n, f) for type_, n, f in FIELDS if isinstance(value, type_))
        attr = op.attrs.add(name=name, type=number)
        getattr(attr, field).extend(value) if isinstance(value, list) else setattr(attr, field, value)


def write_model(
    folder: Path, kind: str, inputs: Sequence[str], outputs: Mapping[str, str], attrs: Mapping[str, Any]
) -> None:
    """A model of one operator that reads `x` in each slot of `inputs`."""
    program = message("ProgramDesc")()
    block = program.blocks.add(idx=0, parent_idx=-1)
    described = block.vars.add(name="x")
    described.type.type = 7
    described.type.lod_tensor.tensor.data_type = FLOAT32
    described.type.lod_tensor.tensor.dims.extend([-1, 2, 3])
    add_op(block, "feed", {}, {"Out": ["x"]}, {"col": 0})
    add_op(block, kind, {slot: ["x"] for slot in inputs}, {s: [n] for s, n in outputs.items()}, attrs)
    for column, name in enumerate(outputs.values()):
        add_op(block, "fetch", {"X": [name]}, {}, {"col": column})
    (folder / "__model__").write_bytes(program.SerializeToString())


def ran(folder: Path, kind: str, attrs: Mapping[str, Any], outputs: Mapping[str, str] | None = None) -> list[Any]:
    write_model(folder, kind, ["X"], outputs or {"Out": "out"}, attrs)
    with fluid.scope_guard(Scope()):
        program, _, fetches = fluid.io.load_inference_model(folder, None)
        found: list[Any] = fluid.Executor().run(program, {"x": X}, fetches)
    return found


@pytest.mark.parametrize(
    ("kind", "attrs", "expected"),
    [
        ("arg_max", {"axis": 1, "keepdims": True}, X.argmax(1)[:, None]),
        ("arg_max", {"axis": 2, "dtype": INT32}, X.argmax(2).astype(np.int32)),
        ("arg_max", {"axis": 2, "dtype": INT64}, X.argmax(2)),
        ("arg_max", {"axis": 2, "dtype": -1, "op_callstack": "line 1"}, X.argmax(2)),
        ("fill_any_like", {"value": 2.0, "dtype": INT64}, np.full(X.shape, 2, np.int64)),
        ("fill_any_like", {"value": 2.0, "dtype": -1}, np.full(X.shape, 2, np.float32)),
        ("softplus", {"beta": 2.0}, torch.nn.functional.softplus(torch.from_numpy(X), 2.0).numpy()),
    ],
)
def test_attributes_are_honoured(kind: str, attrs: Mapping[str, Any], expected: np.ndarray, tmp_path: Path) -> None:
    (found,) = ran(tmp_path, kind, attrs)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found.dtype == expected.dtype


def test_a_constant_is_the_number_in_its_text(tmp_path: Path) -> None:
    # Fluid writes both: value is a float32, which has no 2^24 + 1
    attrs = {"shape": [2], "dtype": INT64, "value": 2.0**24, "str_value": str(2**24 + 1)}
    write_model(tmp_path, "fill_constant", [], {"Out": "out"}, attrs)
    with fluid.scope_guard(Scope()):
        program, _, fetches = fluid.io.load_inference_model(tmp_path, None)
        (found,) = fluid.Executor().run(program, {"x": X}, fetches)
    np.testing.assert_array_equal(found, np.full(2, 2**24 + 1, np.int64))


def test_the_smallest_of_another_axis_are_found(tmp_path: Path) -> None:
    attrs = {"k": 1, "axis": 1, "largest": False, "sorted": True}
    values, indices = ran(tmp_path, "top_k_v2", attrs, {"Out": "out", "Indices": "at"})
    np.testing.assert_array_equal(values, X.min(1, keepdims=True))
    np.testing.assert_array_equal(indices, X.argmin(1)[:, None])


@pytest.mark.parametrize(
    ("kind", "inputs", "attrs", "asked"),
    [
        ("top_k", ["X", "K"], {}, "input 'K'"),
        ("pad2d", ["X", "Paddings"], {}, "input 'Paddings'"),
        ("matmul", ["X", "Y"], {"head_number": 2}, "attribute 'head_number' 2"),
        ("transpose2", ["X"], {"data_format": "NHWC"}, "attribute 'data_format' 'NHWC'"),
        ("elementwise_add", ["X", "Y"], {"axis": -1, "act": "relu"}, "attribute 'act' 'relu'"),
        ("elementwise_add", ["X", "Y"], {"axis": -1, "Scale_x": 2.0}, "attribute 'Scale_x' 2.0"),
        ("softmax_with_cross_entropy", ["Logits", "Label"], {"use_softmax": False}, "attribute 'use_softmax' False"),
    ],
)
def test_what_is_not_done_is_refused_by_name(
    kind: str, inputs: list[str], attrs: Mapping[str, Any], asked: str, tmp_path: Path
) -> None:
    write_model(tmp_path, kind, inputs, {KINDS[kind].made[0]: "out"}, attrs)
    with pytest.raises(UserError, match=f"operator '{kind}' has {asked}.*; that is not supported"):
        fluid.io.load_inference_model(tmp_path, None)


@pytest.mark.parametrize(
    ("attrs", "said"),
    [
        ({"sub_block": 0}, "'while' runs block 0; the model has 1 blocks"),
        ({"sub_block": 7}, "'while' runs block 7; the model has 1 blocks"),
        ({}, "'while' runs block None; the model has 1 blocks"),
    ],
)
def test_a_block_that_is_not_there_is_refused(attrs: Mapping[str, Any], said: str, tmp_path: Path) -> None:
    write_model(tmp_path, "while", ["Condition"], {"Out": "out"}, attrs)
    with pytest.raises(UserError, match=said):
        fluid.io.load_inference_model(tmp_path, None)


def test_a_choice_between_unequal_shapes_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "select_input", ["X", "Mask"], {"Out": "out"}, {})
    path = tmp_path / "__model__"
    program = message("ProgramDesc").FromString(path.read_bytes())
    block = program.blocks[0]
    made = block.ops.add(type="reduce_sum")
    made.inputs.add(parameter="X", arguments=["x"])
    made.outputs.add(parameter="Out", arguments=["sum"])
    choice = next(op for op in block.ops if op.type == "select_input")
    next(slot for slot in choice.inputs if slot.parameter == "X").arguments.append("sum")
    ordered = sorted(block.ops, key=lambda op: ["feed", "reduce_sum", "select_input", "fetch"].index(op.type))
    operators = [type(op).FromString(op.SerializeToString()) for op in ordered]
    del block.ops[:]
    block.ops.extend(operators)
    path.write_bytes(program.SerializeToString())
    with pytest.raises(UserError, match=r"'select_input' chooses between .*expected variables of one shape and dtype"):
        fluid.io.load_inference_model(tmp_path, None)


def test_defaults_of_fluid_are_no_reason_to_refuse() -> None:
    for kind, attrs in DEFAULTS.items():
        assert not list(KINDS[kind].asks({}, attrs)), kind


# what Fluid writes for an operator of a layer called without options
DEFAULTS: dict[str, dict[str, Any]] = {
    "conv2d": {"use_cudnn": True, "fuse_relu_before_depthwise_conv": False, "workspace_size_MB": 512, "Scale_in": 1.0},
    "mul": {"scale_x": 1.0, "scale_y": [1.0], "force_fp32_output": False},
    "softmax": {"data_format": "AnyLayout", "use_mkldnn": False},
    "softmax_with_cross_entropy": {"numeric_stable_mode": True, "use_softmax": True, "axis": -1},
    "lookup_table": {"is_sparse": True, "remote_prefetch": False, "entry": "none", "trainer_id": 0, "epmap": []},
    "batch_norm": {"momentum": 0.9, "use_global_stats": False, "trainable_statistics": False},
    "dropout": {"seed": 0, "fix_seed": False},
    "gather": {"overwrite": True, "axis": 0},
    "reduce_sum": {"reduce_all": False, "in_dtype": -1, "out_dtype": -1},
    "transpose2": {"mkldnn_data_type": "float32", "data_format": "AnyLayout"},
    "matmul": {"head_number": 1, "Scale_out": 1.0},
    "slice": {"infer_flags": [1, 1]},
}
