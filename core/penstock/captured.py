"""`penstock.capture`: an `nn.Module`, its loss and its optimizer become a Program that runs on every replica.

The module is recorded on copies: its parameters and buffers never change, until the user loads what was trained
back (`module.load_state_dict(captured.state_dict())`). Values live in a scope of the result's own. The loss has to be a
mean over rows, as in all data-parallel training here: a replica's gradient counts by its share of the rows.
An optimizer of torch (SGD, Adam, AdamW) becomes Penstock's with the settings that both have. One without a counterpart
is an error that names it, but for those that choose between implementations of the same arithmetic (foreach, fused, …).

The module is called `capture` to its users and `captured` as a file, so that importing it never hides the function.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import FeedError, SpecError
from penstock.exec.executor import Executor
from penstock.exec.feeding import has_batch, share_sizes
from penstock.exec.parallel import ParallelExecutor
from penstock.exec.strategies import BuildStrategy, ExecutionStrategy
from penstock.program.layers import fluid_data
from penstock.program.optimizers import SGD, AdamW, Momentum, Optimizer
from penstock.program.optimizers.adam import TorchAdamOptimizer
from penstock.program.program import Program
from penstock.program.record.context import name_scope, program_guard
from penstock.program.record.entry_points import record_module
from penstock.program.record.opening import recording_of
from penstock.program.record.variable import Variable
from penstock.program.training.regularizers import L2Decay
from penstock.scope import Scope

ROOT = "model"
"""The parameter `a.weight` of the module is the variable `model.a.weight`."""


def capture(
    module: torch.nn.Module,
    loss: Callable[..., Any],
    optimizer: Any,
    example_inputs: Any,
    *,
    num_targets: int | None = None,
    static_inputs: Collection[int] = (),
    seed: int = 0,
    build_strategy: BuildStrategy | None = None,
    exec_strategy: ExecutionStrategy | None = None,
    use_cuda: bool = False,
) -> Captured:
    """Record `loss(module(*inputs), *targets)` and its training; return what runs it.

    `example_inputs`: a tensor or a sequence: the module's inputs, then the targets; only shapes and dtypes count.
    Dimension 0 is the batch, except for those whose position is in `static_inputs`; every other size is fixed.
    `num_targets`: how many of them are targets; by default as many as `loss` needs beside the outputs.
    `optimizer`: one of `penstock.optimizer`, or SGD, Adam or AdamW of torch (an instance over the module's
    parameters, the class, or its name). The module is recorded as it is, training or evaluating.
    Replicas: `CPU_NUM`, or one for each visible GPU with `use_cuda`.

    Raises SpecError for arguments that do not fit, ProgramError for what cannot be recorded; the module is unchanged.
    """
    examples = [example_inputs] if isinstance(example_inputs, torch.Tensor) else list(example_inputs)
    targets = _num_targets(loss) if num_targets is None else num_targets
    if not 0 <= targets < len(examples):
        raise SpecError(
            f"example_inputs has {len(examples)} tensors, of which {targets} are targets; expected at least one "
            "more for the module. Pass the module's inputs and then the targets, or num_targets",
            got=len(examples), expected=targets + 1,
        )  # fmt: skip
    main, startup = Program(seed=seed), Program(seed=seed)
    with program_guard(main, startup):
        feeds = _inputs(examples, len(examples) - targets, static_inputs)
        recording = recording_of(main)
        split = len(feeds) - targets
        outputs = record_module(recording, module, tuple(feeds[:split]), {}, name=ROOT)
        with name_scope("loss"):
            recording.aligns = False  # a function of torch's
            value = loss(outputs, *feeds[split:])
        names = OrderedDict(
            (path, recording.name_of(tensor))
            for path, tensor in module.state_dict(keep_vars=True).items()
            if isinstance(tensor, torch.Tensor)
        )
        chosen, trained = mapped(optimizer, dict(module.named_parameters()))
        if not isinstance(value, Variable):
            raise SpecError(f"loss returned {type(value).__name__}; expected a scalar that depends on the outputs")
        chosen.minimize(value, startup, None if trained is None else [names[path] for path in trained])
    return Captured(main, startup, value, [f.name for f in feeds], names, build_strategy, exec_strategy, use_cuda)


def _num_targets(loss: Callable[..., Any]) -> int:
    call = loss.forward if isinstance(loss, torch.nn.Module) else loss
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError) as error:
        raise SpecError(f"the arguments of loss {loss!r} are not known; pass num_targets") from error
    if any(p.kind == p.VAR_POSITIONAL for p in parameters):
        raise SpecError(f"loss {loss!r} takes any number of arguments; pass num_targets")
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) - 1


def _inputs(examples: Sequence[Any], num_inputs: int, static: Collection[int]) -> list[Variable]:
    found: list[Variable] = []
    for position, example in enumerate(examples):
        name = f"input_{position}" if position < num_inputs else f"target_{position - num_inputs}"
        if not isinstance(example, torch.Tensor):
            raise SpecError(f"example_inputs[{position}] is {type(example).__name__}; expected a tensor")
        sizes: list[int | None] = list(example.shape)
        if position not in static:
            if not sizes:
                raise SpecError(
                    f"example_inputs[{position}] has no dimensions, so none for the batch; "
                    f"put {position} into static_inputs"
                )
            sizes[0] = -1
        found.append(fluid_data(name, sizes, str(example.dtype).removeprefix("torch.")))
    return found


class Captured:
    """A recorded training. `main_program`, `startup_program`, `loss`, `feed_names`, `scope`; `step` trains.

    Not thread-safe: one step at a time. Engine threads start at the first step and end with `close`.
    """

    def __init__(
        self,
        main: Program,
        startup: Program,
        loss: Variable,
        feed_names: list[str],
        names: Mapping[str, str],
        build_strategy: BuildStrategy | None,
        exec_strategy: ExecutionStrategy | None,
        use_cuda: bool = False,
    ) -> None:
        self.main_program, self.startup_program, self.loss, self.feed_names = main, startup, loss, feed_names
        self.scope = Scope()
        self._names, self._strategies, self._use_cuda = names, (build_strategy, exec_strategy), use_cuda
        self._engine: ParallelExecutor | None = None
        Executor().run(startup, scope=self.scope)

    @property
    def executor(self) -> ParallelExecutor:
        """The ParallelExecutor behind `step`, made at the first use."""
        if self._engine is None:
            build, execution = self._strategies
            self._engine = ParallelExecutor(
                self._use_cuda,
                self.loss.name,
                self.main_program,
                scope=self.scope,
                build_strategy=build,
                exec_strategy=execution,
            )
        return self._engine

    def step(self, *inputs: Any) -> float:
        """Train on one batch (inputs, then targets, as tensors or arrays); return the mean loss over its rows.

        Raises FeedError, OperatorError.
        """
        if len(inputs) != len(self.feed_names):
            raise FeedError(
                f"step got {len(inputs)} tensors; expected {len(self.feed_names)}: {', '.join(self.feed_names)}",
                got=len(inputs), expected=len(self.feed_names),
            )  # fmt: skip
        losses = self.executor.run([self.loss], dict(zip(self.feed_names, inputs, strict=True)))[0]
        rows = self._rows(inputs, len(losses))
        return float(sum(float(part) * count for part, count in zip(losses, rows, strict=True)) / sum(rows))

    def _rows(self, inputs: Sequence[Any], active: int) -> list[int]:
        """Rows of each active replica; equal ones where no input has a batch."""
        for name, value in zip(self.feed_names, inputs, strict=True):
            if has_batch(self.main_program, name):
                return share_sizes(len(value), self.executor.device_count)
        return [1] * active

    def state_dict(self) -> OrderedDict[str, torch.Tensor]:
        """Return copies of the values under the module's own names, for `module.load_state_dict`.

        Buffers that each replica has for itself are those of replica 0. Extra state of modules is not part of it.
        """
        found: OrderedDict[str, torch.Tensor] = OrderedDict()
        for path, name in self._names.items():
            tensor = self.scope.find(name)
            if tensor is not None:
                found[path] = tensor.detach().clone()
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take values under the module's names; the optimizer's state stays. Raises SpecError; then nothing changed."""
        missing, unknown = sorted(set(self._names) - set(state)), sorted(set(state) - set(self._names))
        if missing or unknown:
            raise SpecError(
                f"state_dict lacks {missing} and has unknown {unknown}; expected exactly the module's names"
            )
        fresh: dict[str, torch.Tensor] = {}
        for path, name in self._names.items():
            fresh[name] = _fitting(path, state[path], self.scope.find(name))
        for name, tensor in fresh.items():
            self.scope.set(name, tensor)

    def close(self) -> None:
        """Stop the threads. Values stay; a later `step` starts new ones."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def _fitting(path: str, given: Any, present: torch.Tensor | None) -> torch.Tensor:
    if present is None or not isinstance(given, torch.Tensor):
        raise SpecError(f"state_dict[{path!r}] is {type(given).__name__}; expected a tensor")
    if given.shape != present.shape or given.dtype != present.dtype:
        raise SpecError(
            f"state_dict[{path!r}] is {given.dtype}{list(given.shape)}; expected {present.dtype}{list(present.shape)}",
            variable=path,
        )
    return given.detach().cpu().clone(memory_format=torch.contiguous_format)


_CHOICES = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
_Settings = Mapping[str, Any]


def _sgd(settings: _Settings) -> Optimizer:
    rate, decay = float(settings["lr"]), _decay(settings)
    if settings["momentum"] == 0:
        return SGD(rate, regularization=decay)
    return Momentum(rate, float(settings["momentum"]), use_nesterov=bool(settings["nesterov"]), regularization=decay)


def _adam(settings: _Settings) -> Optimizer:
    beta1, beta2 = (float(b) for b in settings["betas"])
    rate, epsilon = float(settings["lr"]), float(settings["eps"])
    return TorchAdamOptimizer(rate, beta1, beta2, epsilon, regularization=_decay(settings))


def _adamw(settings: _Settings) -> Optimizer:
    beta1, beta2 = (float(b) for b in settings["betas"])
    return AdamW(float(settings["lr"]), beta1, beta2, float(settings["eps"]), float(settings["weight_decay"]))


def _decay(settings: _Settings) -> L2Decay | None:
    return L2Decay(float(settings["weight_decay"])) if settings["weight_decay"] else None


@dataclass(frozen=True, slots=True)
class _Kind:
    """How an optimizer of torch is made here. `taken`: settings that `make` takes over; all others must be off."""

    make: Callable[[_Settings], Optimizer]
    taken: frozenset[str]


_ADAM = frozenset({"lr", "betas", "eps", "weight_decay"})
_KINDS: dict[type[torch.optim.Optimizer], _Kind] = {
    torch.optim.SGD: _Kind(_sgd, frozenset({"lr", "momentum", "nesterov", "weight_decay"})),
    torch.optim.Adam: _Kind(_adam, _ADAM),
    torch.optim.AdamW: _Kind(_adamw, _ADAM | {"decoupled_weight_decay"}),
}


def mapped(optimizer: Any, parameters: Mapping[str, torch.nn.Parameter]) -> tuple[Optimizer, list[str] | None]:
    """Return (Penstock optimizer, paths of the parameters that it trains; None for all).

    `optimizer`: Penstock's own, or torch's as an instance, a class or a name. Raises SpecError naming what has no
    counterpart.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer, None
    if isinstance(optimizer, torch.optim.Optimizer):
        return _of_instance(optimizer, parameters)
    kind = getattr(torch.optim, optimizer, None) if isinstance(optimizer, str) else optimizer
    if not (inspect.isclass(kind) and kind in _KINDS):
        raise SpecError(
            f"optimizer is {optimizer!r}; expected an optimizer of penstock.optimizer, or SGD, Adam or AdamW of "
            "torch.optim (an instance, the class, or its name)",
            got=str(optimizer),
        )
    settings = {n: p.default for n, p in inspect.signature(kind).parameters.items() if p.default is not p.empty}
    return _make(kind, settings), None


def _of_instance(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> tuple[Optimizer, list[str]]:
    kind = type(optimizer)
    if kind not in _KINDS:
        raise SpecError(
            f"torch.optim.{kind.__name__} has no counterpart here; expected SGD, Adam or AdamW", got=kind.__name__
        )
    if optimizer.state:
        raise SpecError(
            f"the {kind.__name__} of torch has trained already, and its state is not taken over; pass one that has not"
        )
    first, *rest = optimizer.param_groups
    for number, group in enumerate(rest, 1):
        other = sorted(k for k in first if k not in ("params", "param_names") and group.get(k) != first[k])
        if other:
            raise SpecError(
                f"parameter group {number} of torch's {kind.__name__} differs from group 0 in {other}; expected "
                "the same settings for all parameters"
            )
    paths = {id(p): path for path, p in parameters.items()}
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    if any(id(p) not in paths for p in trained):
        raise SpecError(f"torch's {kind.__name__} trains a parameter that is none of the module's")
    return _make(kind, first), [paths[id(p)] for p in trained]


def _make(kind: type[torch.optim.Optimizer], settings: _Settings) -> Optimizer:
    known = _KINDS[kind]
    wrong = {n: v for n, v in settings.items() if n not in _CHOICES | known.taken and v}
    if wrong:
        listed = ", ".join(f"{n}={v!r}" for n, v in wrong.items())
        raise SpecError(
            f"torch's {kind.__name__} has {listed}, which has no counterpart here; "
            "use an optimizer of penstock.optimizer",
            got=listed,
        )
    return known.make(settings)
