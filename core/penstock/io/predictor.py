"""Fluid's inference engine: a saved inference model, run on arrays. `create_paddle_predictor(AnalysisConfig(folder))`.

A predictor has a scope and an Executor of its own, so that it may be used beside a training in the same process; one
thread uses it at a time, `clone()` makes another one of the same model. Settings that choose Fluid's optimizations are
accepted and have no effect on results here; those that need another engine (TensorRT) are refused.
Source: paddle/fluid/pybind/inference_api.cc, paddle/fluid/inference/api (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import FeedError, SpecError, UserError
from penstock.exec.executor import Executor
from penstock.exec.places import CPUPlace, CUDAPlace
from penstock.io.loads import load_inference_model
from penstock.io.predictor_tensors import PaddleTensor, array_of, tensor_of
from penstock.lod_tensor import LoDTensor
from penstock.scope import Scope


class _Model:
    """Where a model is, and on what it runs."""

    def predictor(self) -> PaddlePredictor:
        """Read the model. Raises UserError if it is absent or damaged."""
        return PaddlePredictor(self)

    def _files(self) -> tuple[str, str | None, str | None]:
        """The folder, and the names of the model's and the parameters' file if they are others than Fluid's."""
        raise NotImplementedError

    def _place(self) -> CPUPlace | CUDAPlace:
        raise NotImplementedError

    def _is_fed_by_name(self) -> bool:
        raise NotImplementedError


def _in_one_folder(folder: str, program: str, parameters: str) -> tuple[str, str | None, str | None]:
    if not program:
        if not folder:
            raise SpecError("the configuration of a predictor names no model: give a folder, or the model's file")
        return folder, None, None
    if parameters and Path(parameters).parent != Path(program).parent:
        raise SpecError(f"{program} and {parameters} are in two folders; expected both in one")
    return str(Path(program).parent), Path(program).name, Path(parameters).name or None


@dataclass(slots=True)
class NativeConfig(_Model):
    """The configuration of a predictor, as fields. `fraction_of_gpu_memory` has no effect."""

    model_dir: str = ""
    prog_file: str = ""
    param_file: str = ""
    use_gpu: bool = False
    device: int = 0
    fraction_of_gpu_memory: float = -1.0
    specify_input_name: bool = False

    def _files(self) -> tuple[str, str | None, str | None]:
        return _in_one_folder(self.model_dir, self.prog_file, self.param_file)

    def _place(self) -> CPUPlace | CUDAPlace:
        return CUDAPlace(self.device) if self.use_gpu else CPUPlace()

    def _is_fed_by_name(self) -> bool:
        return self.specify_input_name


_NO_EFFECT = {
    "enable_memory_optim", "enable_profile", "disable_glog_info", "set_optim_cache_dir", "switch_ir_debug",
    "enable_mkldnn", "set_mkldnn_cache_capacity", "set_mkldnn_op", "set_cpu_math_library_num_threads", "delete_pass",
}  # fmt: skip
"""Settings of Fluid's engine that choose how it computes, never what."""


class AnalysisConfig(_Model):
    """The configuration of a predictor: a folder, or the model's file and that of all parameters."""

    def __init__(self, model_dir: str = "", params_file: str = "") -> None:
        self._folder, self._program, self._parameters = model_dir, "", ""
        self._gpu: int | None = None
        self._is_optimized = self._has_feed_ops = True
        self._has_names = False
        if params_file:
            self.set_model(model_dir, params_file)

    def set_model(self, model: str, params_file: str = "") -> None:
        """Take a folder, or the model's file and that of all parameters."""
        self._folder, self._program, self._parameters = ("", model, params_file) if params_file else (model, "", "")

    def set_prog_file(self, path: str) -> None:
        """Take the model's file."""
        self._program = path

    def set_params_file(self, path: str) -> None:
        """Take the file of all parameters."""
        self._parameters = path

    def model_dir(self) -> str:
        """Return the folder; '' if files were given."""
        return self._folder

    def prog_file(self) -> str:
        """Return the model's file; '' if a folder was given."""
        return self._program

    def params_file(self) -> str:
        """Return the file of all parameters; '' if a folder was given."""
        return self._parameters

    def enable_use_gpu(self, memory_pool_init_size_mb: int, device_id: int = 0) -> None:
        """Run on a GPU. The size of the pool has no effect: memory is taken as it is needed."""
        self._gpu = device_id

    def disable_gpu(self) -> None:
        """Run on the processor."""
        self._gpu = None

    def use_gpu(self) -> bool:
        """Whether it runs on a GPU."""
        return self._gpu is not None

    def gpu_device_id(self) -> int:
        """Return the number of the GPU; 0 on the processor."""
        return self._gpu or 0

    def switch_ir_optim(self, x: bool = True) -> None:
        """Note whether the program is optimized, which has no effect here."""
        self._is_optimized = x

    def ir_optim(self) -> bool:
        """Return what `switch_ir_optim` has noted."""
        return self._is_optimized

    def switch_use_feed_fetch_ops(self, x: bool = True) -> None:
        """Note whether `run` is used (True), or `zero_copy_run`; both can be called either way."""
        self._has_feed_ops = x

    def use_feed_fetch_ops_enabled(self) -> bool:
        """Return what `switch_use_feed_fetch_ops` has noted."""
        return self._has_feed_ops

    def switch_specify_input_names(self, x: bool = True) -> None:
        """Say whether tensors are fed by their names; else by their positions."""
        self._has_names = x

    def specify_input_name(self) -> bool:
        """Whether tensors are fed by their names."""
        return self._has_names

    def enable_tensorrt_engine(self, *settings: object, **more: object) -> None:
        """Refuse: operators run on torch's kernels."""
        raise SpecError("enable_tensorrt_engine: there is no TensorRT here. Leave the call out: the model runs without")

    def tensorrt_engine_enabled(self) -> bool:
        """Whether TensorRT is used: never."""
        return False

    def __getattr__(self, name: str) -> Any:
        """Accept settings without effect. Raises AttributeError for others."""
        if name in _NO_EFFECT:
            return lambda *settings: None
        raise AttributeError(
            f"AnalysisConfig has no {name!r}; settings without effect are {', '.join(sorted(_NO_EFFECT))}"
        )

    def _files(self) -> tuple[str, str | None, str | None]:
        return _in_one_folder(self._folder, self._program, self._parameters)

    def _place(self) -> CPUPlace | CUDAPlace:
        return CPUPlace() if self._gpu is None else CUDAPlace(self._gpu)

    def _is_fed_by_name(self) -> bool:
        return self._has_names


@dataclass(slots=True)
class ZeroCopyTensor:
    """An input that `zero_copy_run` reads, or an output that it has made. Values are copied."""

    name: str
    _value: LoDTensor = field(default_factory=LoDTensor)
    _sizes: tuple[int, ...] | None = None
    _offsets: list[list[int]] | None = None  # that were given before the values that they are of

    def reshape(self, shape: Sequence[int]) -> None:
        """Note the sizes of the array that comes; `copy_from_cpu` lays it out so."""
        self._sizes = tuple(shape)

    def copy_from_cpu(self, data: Any) -> None:
        """Take an array, in the sizes that `reshape` has noted since the last one if it has as many elements.

        Raises UserError if offsets that were given before it are not of its rows.
        """
        array = np.asarray(data)
        fits = self._sizes is not None and int(np.prod(self._sizes)) == array.size
        self._value.set(array.reshape(self._sizes) if fits else array)
        self._sizes = None
        if self._offsets is not None:
            offsets, self._offsets = self._offsets, None
            self._value.set_lod(offsets)

    def copy_to_cpu(self) -> Any:
        """Return a copy of the values as an array."""
        return np.array(self._value)

    def shape(self) -> list[int]:
        """Return the sizes."""
        return list(np.asarray(self._value).shape)

    def set_lod(self, lod: Sequence[Sequence[int]]) -> None:
        """Take the offsets of sequences, before or after the values. Raises UserError for offsets of neither."""
        offsets = [[int(offset) for offset in level] for level in lod]
        try:
            self._value.set_lod(offsets)
        except UserError:
            if not offsets or not all(level and level[0] == 0 for level in offsets):
                raise
            self._offsets = offsets  # of the values that come

    def lod(self) -> list[list[int]]:
        """Return the offsets of sequences."""
        return [list(level) for level in self._value.lod()]


class PaddlePredictor:
    """A model that was read, in a scope of its own."""

    def __init__(self, config: _Model) -> None:
        self._config, self._scope = config, Scope()
        self._executor = Executor(config._place())
        folder, program, parameters = config._files()
        self._program, self._feeds, self._fetches = load_inference_model(
            folder, self._executor, program, parameters, scope=self._scope
        )
        self._inputs = {name: ZeroCopyTensor(name) for name in self._feeds}
        self._outputs = {name: ZeroCopyTensor(name) for name in self.get_output_names()}

    def get_input_names(self) -> list[str]:
        """Return the names of the inputs, in order."""
        return list(self._feeds)

    def get_output_names(self) -> list[str]:
        """Return the names of the outputs, in order."""
        return [one.name for one in self._fetches]

    def get_input_tensor(self, name: str) -> ZeroCopyTensor:
        """Return the input that `zero_copy_run` reads. Raises SpecError for another name."""
        return _named(self._inputs, name, "input")

    def get_output_tensor(self, name: str) -> ZeroCopyTensor:
        """Return the output that `zero_copy_run` makes. Raises SpecError for another name."""
        return _named(self._outputs, name, "output")

    def get_input_tensor_shape(self) -> dict[str, list[int]]:
        """Return the declared sizes of the inputs; -1 for one that is known when it runs."""
        described = self._program.variables
        return {n: [d if isinstance(d, int) else -1 for d in described[n].shape] for n in self._feeds}

    def run(self, inputs: Sequence[PaddleTensor]) -> list[PaddleTensor]:
        """Run the model on tensors in the order of its inputs, or by their names if the configuration says so.

        Raises FeedError for too few or too many, or for an unknown name.
        """
        names = [one.name for one in inputs] if self._config._is_fed_by_name() else self._feeds
        if len(inputs) != len(self._feeds) or set(names) != set(self._feeds):
            given = [one.name or "(no name)" for one in inputs]
            raise FeedError(f"the predictor is given {len(inputs)} tensors, {given}; expected {list(self._feeds)}")
        feed = {name: array_of(one) for name, one in zip(names, inputs, strict=True)}
        return [tensor_of(name, value) for name, value in zip(self.get_output_names(), self._run(feed), strict=True)]

    def zero_copy_run(self) -> None:
        """Run the model on what its input tensors have; its output tensors have the results then."""
        found = self._run({name: one._value for name, one in self._inputs.items()})
        for one, value in zip(self._outputs.values(), found, strict=True):
            one._value = value

    def clone(self) -> PaddlePredictor:
        """Return another predictor of the same model, read again."""
        return type(self)(self._config)

    def _run(self, feed: dict[str, LoDTensor]) -> list[LoDTensor]:
        return self._executor.run(self._program, feed, self._fetches, scope=self._scope, return_numpy=False)


def _named(tensors: dict[str, ZeroCopyTensor], name: str, kind: str) -> ZeroCopyTensor:
    if name not in tensors:
        raise SpecError(f"the model has no {kind} {name!r}; expected one of {', '.join(tensors)}")
    return tensors[name]


def create_paddle_predictor(config: _Model) -> PaddlePredictor:
    """Read the model of an AnalysisConfig or NativeConfig. Raises UserError if it is absent or damaged."""
    return config.predictor()


AnalysisPredictor = NativePaddlePredictor = PaddlePredictor

__all__ = [
    "AnalysisConfig", "AnalysisPredictor", "NativeConfig", "NativePaddlePredictor", "PaddlePredictor", "ZeroCopyTensor",
    "create_paddle_predictor",
]  # fmt: skip
