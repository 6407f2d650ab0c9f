"""Fluid's inference engine: a saved model on tensors by position, by name and without feeds, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as fluid
from penstock.errors import FeedError, SpecError, UserError
from penstock.io.predictor import AnalysisConfig, NativeConfig, create_paddle_predictor
from penstock.io.predictor_tensors import PaddleBuf, PaddleDType, PaddleTensor

IDS = np.array([[1], [2], [3]])
OFFSETS = [[0, 2, 3]]
X = np.array([[1.0, -2.0], [0.5, 4.0]], np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of sums of embeddings and a dense input, in a folder and in two files."""
    folder = tmp_path_factory.mktemp("model")
    main, startup, scope = fluid.Program(), fluid.Program(), fluid.Scope()
    with fluid.program_guard(main, startup), fluid.scope_guard(scope):
        ids, x = fluid.layers.data("ids", [1], dtype="int64", lod_level=1), fluid.layers.data("x", [2])
        rows = fluid.layers.embedding(ids, [5, 2], param_attr=fluid.initializer.Constant(0.25))
        total: Any = fluid.layers.sequence_pool(rows, "sum") + x
        exe = fluid.Executor(fluid.CPUPlace())
        exe.run(startup)
        fluid.io.save_inference_model(str(folder), ["ids", "x"], [total, fluid.layers.argmax(total, 1)], exe, main)
        fluid.io.save_inference_model(str(folder / "two"), ["ids", "x"], [total], exe, main, "model", "params")
    return folder


def _tensors() -> list[PaddleTensor]:
    ids = PaddleTensor(IDS, "ids")
    ids.lod = OFFSETS
    return [ids, PaddleTensor(X, "x")]


EXPECTED = X + np.array([[0.5, 0.5], [0.25, 0.25]], np.float32)


def test_tensors_are_fed_by_position_or_name(model: Path) -> None:
    config = AnalysisConfig(str(model))
    config.disable_gpu()
    config.enable_memory_optim()
    predictor = create_paddle_predictor(config)
    assert predictor.get_input_names() == ["ids", "x"]
    assert predictor.get_input_tensor_shape() == {"ids": [-1, 1], "x": [-1, 2]}
    total, best = predictor.run(_tensors())
    np.testing.assert_array_equal(total.as_ndarray(), EXPECTED)
    assert (total.name, total.shape, total.dtype) == (predictor.get_output_names()[0], [2, 2], PaddleDType.FLOAT32)
    assert (best.data.int64_data(), best.dtype) == ([0, 1], PaddleDType.INT64)
    config.switch_specify_input_names()
    again = predictor.clone().run(_tensors()[::-1])
    assert again[0].data.float_data() == EXPECTED.reshape(-1).tolist()
    with pytest.raises(FeedError, match=r"given 1 tensors, \['ids'\]; expected \['ids', 'x'\]"):
        predictor.run(_tensors()[:1])


def test_inputs_and_outputs_are_set_and_read_in_place(model: Path) -> None:
    predictor = create_paddle_predictor(AnalysisConfig(str(model / "two" / "model"), str(model / "two" / "params")))
    ids, x = predictor.get_input_tensor("ids"), predictor.get_input_tensor("x")
    ids.copy_from_cpu(IDS)
    ids.set_lod(OFFSETS)
    x.reshape([2, 2])
    x.copy_from_cpu(X.reshape(-1))
    predictor.zero_copy_run()
    out = predictor.get_output_tensor(predictor.get_output_names()[0])
    np.testing.assert_array_equal(out.copy_to_cpu(), EXPECTED)
    assert (out.shape(), ids.lod(), out.lod()) == ([2, 2], OFFSETS, [])
    with pytest.raises(SpecError, match="no output 'y'"):
        predictor.get_output_tensor("y")


@pytest.mark.parametrize("order", ["offsets first", "values first"])
def test_batches_of_other_sequences_follow_one_another(model: Path, order: str) -> None:
    predictor = create_paddle_predictor(AnalysisConfig(str(model)))
    ids, x = predictor.get_input_tensor("ids"), predictor.get_input_tensor("x")
    results = []
    for rows in (IDS, np.concatenate([IDS, IDS[-1:]]), IDS):
        offsets = [[0, OFFSETS[0][1], len(rows)]]
        if order == "offsets first":
            ids.set_lod(offsets)
        ids.copy_from_cpu(rows)
        if order == "values first":
            ids.set_lod(offsets)
        x.reshape([2, 2])
        x.copy_from_cpu(X.reshape(-1))
        assert ids.lod() == offsets
        predictor.zero_copy_run()
        results.append(predictor.get_output_tensor(predictor.get_output_names()[0]).copy_to_cpu())
    np.testing.assert_array_equal(results[0], EXPECTED)
    np.testing.assert_array_equal(results[2], EXPECTED)
    assert not np.array_equal(results[1], EXPECTED)
    x.copy_from_cpu(X.reshape(4, 1))
    assert x.shape() == [4, 1], "sizes that were noted are of one array"
    ids.set_lod([[0, 99]])
    with pytest.raises(UserError, match="do not add up"):
        ids.copy_from_cpu(IDS)


def test_a_compiled_program_runs_the_model_of_a_configuration(model: Path) -> None:
    config = NativeConfig()
    config.model_dir, config.use_gpu = str(model), False
    exe = fluid.Executor(fluid.CPUPlace())
    program, _, _ = fluid.io.load_inference_model(str(model), exe)
    compiled = fluid.CompiledProgram(program)
    assert not compiled._is_inference
    compiled._with_inference_optimize(config)
    assert compiled._is_inference
    np.testing.assert_array_equal(exe.run(compiled, feed=_tensors())[0].as_ndarray(), EXPECTED)


def test_values_are_kept_as_bytes_and_read_by_type() -> None:
    buffer = PaddleBuf([1.5, 2.0])
    assert (buffer.length(), buffer.tolist("float32"), buffer.empty()) == (8, [1.5, 2.0], False)
    buffer.resize(16)
    assert buffer.int64_data() == [0, 0]
    buffer.reset(np.array([7], np.int32))
    assert buffer.int32_data() == [7]
    tensor = PaddleTensor()
    tensor.data, tensor.shape, tensor.dtype = buffer, [2], PaddleDType.INT32
    with pytest.raises(FeedError, match=r"has 1 values of int32 and the sizes \[2\]"):
        tensor.as_ndarray()
    with pytest.raises(FeedError, match="is given uint8; expected one of float32"):
        PaddleTensor(np.zeros(2, np.uint8))


def test_what_the_engine_has_not_is_refused(model: Path, tmp_path: Path) -> None:
    config = AnalysisConfig(str(model))
    with pytest.raises(SpecError, match="there is no TensorRT"):
        config.enable_tensorrt_engine(1 << 20)
    with pytest.raises(AttributeError, match="no 'enable_tpu'; settings without effect are"):
        config.enable_tpu()
    with pytest.raises(SpecError, match="names no model"):
        create_paddle_predictor(NativeConfig())
    with pytest.raises(SpecError, match="in two folders"):
        create_paddle_predictor(NativeConfig("", str(tmp_path / "a" / "model"), str(tmp_path / "params")))
    with pytest.raises(UserError):
        create_paddle_predictor(AnalysisConfig(str(tmp_path)))
