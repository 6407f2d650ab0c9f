"""What torch is at a moment: each name of its modules and classes, its settings, and what some calls give.

`python -m tests.program.torch_state` prints, as JSON, how torch differs once Penstock was imported and has recorded.
"""

from __future__ import annotations

import json
import logging
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

CONTAINERS = (dict, list, set, WeakKeyDictionary, WeakValueDictionary)
OWN_NAMESPACES = {"penstock", "penstock_composed"}
"""Operators that are registered when Penstock is imported, and stay: torch takes back no kernel of C++."""

SETTINGS: dict[str, Callable[[], Any]] = {
    "threads": torch.get_num_threads,
    "threads between operators": torch.get_num_interop_threads,
    "gradients": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "anomaly mode": torch.is_anomaly_enabled,
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "warns if not deterministic": torch.is_deterministic_algorithms_warn_only_enabled,
    "float32 products": torch.get_float32_matmul_precision,
    "autocast": lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    "oneDNN": lambda: (torch.backends.mkldnn.enabled, torch.backends.mkldnn.is_available()),  # type: ignore[no-untyped-call]  # torch
    "filters of loggers": lambda: {
        name: list(logger.filters)
        for name, logger in logging.root.manager.loggerDict.items()
        if name.startswith("torch") and isinstance(logger, logging.Logger) and logger.filters
    },
    "operators": lambda: sorted(
        name for name in torch._C._dispatch_get_all_op_names() if name.partition("::")[0] not in OWN_NAMESPACES
    ),
}
"""Name -> how it is read."""


OF_TORCH = {
    "torch._subclasses.meta_utils.DESCRIBER_NEXT_ID": "the number of the next fake tensor",
    "torch._subclasses.fake_tensor.FakeTensorMode.cache_hits": "shapes that a mode has found in its cache",
    "torch._subclasses.fake_tensor.FakeTensorMode.cache_misses": "shapes that it has not",
    "torch.utils.hooks.RemovableHandle.next_id": "the number of the next hook",
}
"""What torch counts for itself, over the whole process -> what."""

_OPERATORS = "Penstock's operators are registered when it is imported, and torch has no public way to take them back"
_MEMO = "what torch has looked up for an operator, at its first call"
GROWS = {
    "torch.library._defs": _OPERATORS,
    "torch.library._impls": _OPERATORS,
    "torch.library._keep_alive": _OPERATORS,
    "torch.ops._dir": _OPERATORS,
    "torch.ops.loaded_libraries": _OPERATORS,
    "torch.fx.operator_schemas._SCHEMA_TO_SIGNATURE_CACHE": _MEMO,
    "torch.jit._builtins._builtin_table": _MEMO,
    "torch.utils._stats.simple_call_counter": _MEMO,
    "torch._subclasses.fake_impls.FAST_OP_IMPLEMENTATIONS": _MEMO,
    "torch._subclasses.fake_tensor.FakeTensorMode.cache": _MEMO,
    "torch._subclasses.fake_tensor.FakeTensorMode.cache_bypasses": _MEMO,
}
"""Containers of torch's modules that have more entries after a recording -> why."""


def calls() -> dict[str, Any]:
    """Return what some of the functions that a recording replaces give, on tensors."""
    counted: list[int] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        counted.append(1)
        return x * 2.0

    x = torch.ones(2, 3, requires_grad=True)
    checkpoint(block, x, use_reentrant=False).sum().backward()
    checkpoint(block, x, use_reentrant=True).sum().backward()
    layer = nn.Linear(3, 1)
    with torch.no_grad():
        layer.weight.fill_(0.5), layer.bias.fill_(1.0)
    return {
        "checkpoints": (len(counted), x.grad.tolist() if x.grad is not None else None),
        "module": layer(torch.ones(2, 3)).tolist(),
        "zeros": torch.zeros(2, 1).tolist(),
        "dropout": nn.functional.dropout(torch.ones(4), 0.5, training=False).tolist(),
        "pickled": pickle.loads(pickle.dumps(torch.zeros)) is torch.zeros,  # noqa: S301 - our own bytes
        "a class of one's own": nn.functional.relu(Own()),  # type: ignore[arg-type]  # it stands for a tensor
    }


class Own:
    """What torch's functions hand over to."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> str:
        return f"handed over {func.__name__}"


@dataclass(frozen=True, slots=True)
class State:
    """`names`: 'torch.nn.modules.module.Module.__call__' -> the object itself, which it keeps alive.

    `sizes`: how many entries the containers among them have.
    """

    names: dict[str, Any]
    sizes: dict[str, int]
    settings: dict[str, Any]
    calls: dict[str, Any]


def state() -> State:
    """Return the state of all of torch that is loaded."""
    outcomes = calls()
    names: dict[str, Any] = {}
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] == "torch":
            for name, value in list(vars(module).items()):
                names[f"{path}.{name}"] = value
                if issubclass(type(value), type) and value.__module__ == path:
                    names |= {f"{path}.{name}.{own}": held for own, held in list(vars(value).items())}
    sizes = {name: len(value) for name, value in names.items() if issubclass(type(value), CONTAINERS)}
    return State(names, sizes, {name: read() for name, read in SETTINGS.items()}, outcomes)


def differences(before: State, after: State) -> list[str]:
    """List what is another one, is gone, or was added to what had been loaded; submodules may be added."""
    found = [name for name, value in before.names.items() if after.names.get(name, after) is not value]
    found += [name for name, size in before.sizes.items() if after.sizes.get(name) != size and name not in GROWS]
    known = {name.rpartition(".")[0] for name in before.names}
    found += [
        name
        for name, value in after.names.items()
        if name not in before.names and name.rpartition(".")[0] in known and not isinstance(value, ModuleType)
    ]
    for old, new in ((before.settings, after.settings), (before.calls, after.calls)):
        found += [name for name in old if old[name] != new[name]]
    return [name for name in found if name not in OF_TORCH]


class Net(nn.Module):
    """A bit of what a recording replaces names of torch for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5))
        self.norm, self.attention = nn.BatchNorm1d(3), nn.MultiheadAttention(4, 1, dropout=0.1)

    def forward(self, x: Any) -> Any:
        for use_reentrant in (False, True):
            x = checkpoint(self.inner, x, use_reentrant=use_reentrant)
        x = self.norm(x)
        return self.attention(x, x, x)[0]


def recorded() -> None:
    """Record what every patch is made for: modules, sizes, checkpoints, dropout; and an optimizer."""
    import penstock as fluid  # here: torch is looked at before it is imported

    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        _record(fluid)
    fluid.Executor(fluid.CPUPlace()).run(startup, scope=fluid.Scope())


def _record(fluid: Any) -> None:
    x = fluid.layers.data("x", [3, 4])
    z = Net()(x) + torch.zeros(x.shape[0], 1, 4)
    fluid.optimizer.Adam(0.1).minimize(fluid.layers.fc(z, 1).mean())


def defaults() -> Iterator[bool]:
    """Record into the default Programs twice; tell whether torch is patched, before and after each of them runs."""
    import penstock as fluid  # as above

    for _ in range(2):
        _record(fluid)
        fluid.Executor(fluid.CPUPlace()).run(fluid.Program())
        yield is_patched()
        for program in (fluid.default_startup_program(), fluid.default_main_program()):
            fluid.Executor(fluid.CPUPlace()).run(program, feed={"x": torch.ones(2, 3, 4)} if program.feeds() else {})
            yield is_patched()


def is_patched() -> bool:
    """Whether one of the names that a recording replaces is Penstock's."""
    return "penstock" in getattr(torch.zeros, "__globals__", {}).get("__name__", "")


if __name__ == "__main__":
    torch.export.export(nn.Linear(2, 2), (torch.ones(3, 2),))  # loads what torch itself loads late
    first = state()
    recorded()
    by_guard = differences(first, state())
    patched = list(defaults())
    json.dump({"guard": by_guard, "patched": patched, "defaults": differences(first, state())}, sys.stdout)
