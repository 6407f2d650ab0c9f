"""Penstock: PaddlePaddle Fluid's training system on PyTorch, made visible.

`import penstock as fluid` runs Fluid-style scripts. Attributes are loaded at their first use, so that the
control plane, which needs no torch, can import `penstock.protocol` without paying for it.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from penstock.imports import importing_torch as _importing_torch
from penstock.logger import set_up as _set_up_logging
from penstock.openmp import limit_spinning as _limit_spinning
from penstock.version import __version__ as __version__

_set_up_logging()
_limit_spinning(os.environ)
_WHERE = {
    "Program": "program.framework",
    "default_main_program": "program.record.context",
    "default_startup_program": "program.record.context",
    "program_guard": "program.record.context",
    "name_scope": "program.framework.name_scopes",
    "device_guard": "program.framework.device_guard",
    "Variable": "program.record.variable",
    "LayerHelper": "program.framework",
    "ParamAttr": "program.training.parameters",
    "WeightNormParamAttr": "program.training.parameters",
    "append_backward": "program.training.backward",
    "gradients": "program.training.backward",
    "in_dygraph_mode": "program.eager",
    "enable_dygraph": "program.eager",
    "disable_dygraph": "program.eager",
    "Executor": "exec.executor",
    "FetchHandler": "exec.dataset_reports",
    "ParallelExecutor": "exec.parallel",
    "CompiledProgram": "exec.parallel",
    "BuildStrategy": "exec.strategies",
    "DatasetFactory": "dataset",
    "InMemoryDataset": "dataset.memory",
    "QueueDataset": "dataset.streaming",
    "DistributeTranspiler": "transpile.transpiler",
    "DistributeTranspilerConfig": "transpile.config",
    "ExecutionStrategy": "exec.strategies",
    "CPUPlace": "exec.places",
    "CUDAPlace": "exec.places",
    "cpu_places": "exec.places",
    "cuda_places": "exec.places",
    "is_compiled_with_cuda": "exec.places",
    "Scope": "scope",
    "log": "telemetry",
    "Table": "telemetry.media",
    "Histogram": "telemetry.media",
    "capture": "captured",
    "LoDTensor": "lod_tensor",
    "LoDTensorArray": "lod_tensor",
    "create_lod_tensor": "lod_tensor",
    "create_random_int_lodtensor": "lod_tensor",
    "memory_optimize": "program.memory_optimize",
    "release_memory": "program.memory_optimize",
    "set_flags": "exec.flags",
    "get_flags": "exec.flags",
    "DataFeeder": "io.data_feeder",
    "save": "io.saves.variables",
    "load": "io.loads",
    "load_program_state": "io.states",
    "set_program_state": "io.states",
    "global_scope": "scope",
    "scope_guard": "scope",
}
_MODULES = {
    "framework": "program.framework",
    "layer_helper": "program.framework.layer_helper",
    "unique_name": "program.unique_name",
    "layers": "program.layers",
    "nets": "program.layers.nets",
    "initializer": "program.initializers",
    "optimizer": "program.optimizers",
    "metrics": "metrics",
    "profiler": "profiler",
    "average": "metrics",
    "evaluator": "evaluator",
    "install_check": "install_check",
    "regularizer": "program.training.regularizers",
    "clip": "program.training.clipping",
    "backward": "program.training.backward",
    "compiler": "exec.parallel",
    "telemetry": "telemetry",
    "transpiler": "transpiler",
    "dataset": "dataset",
    "core": "core",
    "io": "io",
}


_READS = ("program.", "io", "captured")
"""Where programs are read and extended."""


def __getattr__(name: str) -> Any:
    with _importing_torch():
        value = _loaded(name)
    globals()[name] = value
    return value


def _loaded(name: str) -> Any:
    if {"data": "program.layers", "embedding": "program.layers", **_WHERE, **_MODULES}.get(name, "").startswith(_READS):
        importlib.import_module("penstock.operators")  # which a program that was saved may call
        importlib.import_module("penstock.program.framework")  # what blocks declare and append with
    if name in _WHERE:
        return getattr(importlib.import_module(f"penstock.{_WHERE[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"penstock.{_MODULES[name]}")
    if name == "data":
        return importlib.import_module("penstock.program.layers").fluid_data
    if name == "embedding":
        return importlib.import_module("penstock.program.layers").embedding
    if name in ("dygraph", "imperative"):
        advice = importlib.import_module("penstock.program.eager").ADVICE
        raise AttributeError(f"module 'penstock' has no attribute {name!r}: {advice}")
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE, *_MODULES, "data", "embedding"})
