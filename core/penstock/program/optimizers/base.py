"""The base of all optimizers: order of recording, learning rate, state, and the two forms of an update.

A rule (`_rule`) changes a parameter and its state in place. For a dense gradient it works on the tensors themselves;
for a sparse one on copies of the rows that are used, which are then written back: rows that the batch did not use keep
their value and their state (lazily, as torch's SparseAdam). Where a kernel does this in one pass, it is used.

State lives in persistable variables named `<optimizer>.<state>.<parameter>`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import torch

from penstock.compat.torch import set_versions
from penstock.errors import ProgramError
from penstock.program.ir import Role
from penstock.program.operator_types import BlockOperator, in_fluids_names
from penstock.program.optimizers.derived import Hooks, is_derived
from penstock.program.program import Program
from penstock.program.record.context import name_scope, program_guard, role
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable, recording_modes
from penstock.program.training.backward import Gradient, append_backward, check_loss
from penstock.program.training.clipping import Clip, check_clip, clip_of, prepare_clips
from penstock.program.training.gradients import PendingGradient, prefix_of_state
from penstock.program.training.parameters import constant_state
from penstock.program.training.regularizers import Regularizer, regularize, regularizer_of
from penstock.program.training.schedules import computed_rate

Pair = tuple[Variable, Gradient]


State = dict[str, torch.Tensor]


class Scaling(Protocol):
    """Divides gradients before anything else is done to them."""

    def prepare(self, pending: Sequence[PendingGradient]) -> Callable[[], None]: ...


class Merging(Protocol):
    """Puts sums over several runs in the place of gradients; updates count in the last of these runs alone."""

    def prepare(self, prefix: str, pending: Sequence[PendingGradient]) -> None: ...

    def count(self) -> torch.Tensor: ...

    def add(self, pending: Sequence[PendingGradient]) -> None: ...

    def around(self, one: PendingGradient, state: State, update: Callable[[State], None]) -> None: ...


class Minimizer:
    """What has a backward pass and updates, which `minimize` records one after the other."""

    def minimize(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Sequence[str | Variable] | None = None,
        no_grad_set: Iterable[str | Variable] | None = None,
    ) -> tuple[list[BlockOperator], list[Pair]]:
        """Record backward pass and updates; return (update operators, (parameter, gradient) pairs)."""
        check_loss(loss, f"{type(self).__name__}.minimize")
        with program_guard(loss.program, startup_program):
            pairs = self.backward(loss, startup_program, parameter_list, no_grad_set)
            return self.apply_gradients(pairs) if pairs else [], pairs

    def backward(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Sequence[str | Variable] | None = None,
        no_grad_set: Iterable[str | Variable] | None = None,
    ) -> list[Pair]:
        """Record the backward pass alone."""
        raise NotImplementedError

    def apply_gradients(self, params_grads: Sequence[Pair]) -> list[BlockOperator]:
        """Record the updates for given gradients; return their operators."""
        raise NotImplementedError


def attribute_of_inner(wrapper: Minimizer, name: str) -> Any:
    """Return an attribute that a wrapper has from its inner optimizer, `_optimizer`.

    Raises AttributeError for names of Python's protocols, and while there is none yet, as in a copy that is being made.
    """
    if name == "_optimizer" or (name.startswith("__") and name.endswith("__")):
        raise AttributeError(f"{type(wrapper).__name__!r} object has no attribute {name!r}", name=name, obj=wrapper)
    return getattr(wrapper._optimizer, name)  # type: ignore[attr-defined]  # of every wrapper


class Optimizer(Hooks, Minimizer):
    """Base: see the module. `_states`: name -> first value of what is kept beside each parameter.

    `parameter_list`: parameters, or their names, that `minimize` and `backward` train if given none; None: all. A
    regularizer in its place, where Fluid 1.5 and 1.6 have it, is the regularization.
    """

    kind = "optimizer"
    counts_steps: ClassVar[bool] = False
    sparse_kernel: ClassVar[bool] = False
    _states: Mapping[str, float] = {}

    def __init__(
        self,
        learning_rate: float | Variable,
        parameter_list: Sequence[str | Variable] | None = None,
        regularization: Regularizer | None = None,
        grad_clip: Clip | None = None,
        name: str | None = None,
    ) -> None:
        check_clip(grad_clip)
        if regularization is None and hasattr(parameter_list, "term"):
            parameter_list, regularization = None, cast("Regularizer", parameter_list)
        self._parameter_list = self._trained(parameter_list)
        if regularization is not None and not hasattr(regularization, "term"):
            raise ProgramError(
                f"{user_line()}: {type(self).__name__}: regularization is {regularization!r}; expected L1Decay, L2Decay"
            )
        self._learning_rate = learning_rate
        self._regularization, self._grad_clip = regularization, grad_clip
        self._name = name
        self._scaling: Scaling | None = None  # of a mixed precision optimizer, while it records
        self._merged: Merging | None = None  # of a GradientMergeOptimizer, while it records

    def _trained(self, given: Any) -> list[str | Variable] | None:
        if given is None:
            return None
        if isinstance(given, (str, Variable)) or not isinstance(given, Iterable):
            raise ProgramError(
                f"{user_line()}: {type(self).__name__}: parameter_list is {given!r}; expected a list of parameters or "
                "their names. As in Fluid 1.8 it stands before use_nesterov and regularization: give those by name"
            )
        return list(given)

    # -- what an optimizer defines -----------------------------------------------------------------

    def _rule(self, p: torch.Tensor, g: torch.Tensor, lr: torch.Tensor, state: State) -> None:
        """Record the update of `p` and of its state in place. `state["step"]` counts this step, where it is kept."""
        raise NotImplementedError

    def _dense(self, one: PendingGradient, lr: torch.Tensor, state: State) -> None:
        self._rule(one.param.fake, one.value, lr, state)

    def _sparse_kernel(self, one: PendingGradient, lr: torch.Tensor, state: State) -> None:
        """Record the kernel that applies rows as they are (only where `sparse_kernel`)."""
        raise NotImplementedError

    def _before_exchange(self, prefix: str, pending: Sequence[PendingGradient], states: Mapping[str, State]) -> None:
        """Record what a replica does to its own gradients."""

    def _after_exchange(self, pending: Sequence[PendingGradient]) -> Sequence[PendingGradient]:
        """Return the gradients that are clipped and decayed after their exchange."""
        return pending

    def _after_updates(self) -> None:
        """Record what follows all updates."""

    # -- Fluid's methods ---------------------------------------------------------------------------

    def backward(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Sequence[str | Variable] | None = None,
        no_grad_set: Iterable[str | Variable] | None = None,
    ) -> list[Pair]:
        """Record the backward pass alone. `parameter_list`: what to train; None: what the optimizer was made with."""
        return append_backward(loss, parameter_list or self._parameter_list, no_grad_set)

    def apply_gradients(self, params_grads: Sequence[Pair]) -> list[BlockOperator]:
        """Record clipping, regularisation and updates for given gradients; return their operators.

        The backward pass of another loss may follow: it reads the parameters as they are then, as in Fluid.
        """
        given: Sequence[tuple[Variable, Gradient | None]] = params_grads
        pairs = [(param, gradient) for param, gradient in given if gradient is not None]
        if not pairs:
            raise ProgramError(f"{user_line()}: {type(self).__name__} got no gradients to apply")
        program = pairs[0][0].program
        for param, _ in pairs:
            if program.variables[param.name].buffer:  # each replica has its own, and one of them updates it in Reduce
                raise ProgramError(
                    f"{user_line()}: {type(self).__name__} updates {param.name!r}, which this program writes in its "
                    "forward pass, too. Write it in a program of its own, which is run before or after this one",
                    variable=param.name,
                )
        before = len(program.operators)
        prefix = prefix_of_state(program, self.kind, self._name)
        versions = recording_of(program).versions()
        with name_scope(prefix):
            self._record(prefix, [PendingGradient(p, g, prefix) for p, g in pairs])
        set_versions(*versions)
        return in_fluids_names(program.operators[before:])

    # -- recording ---------------------------------------------------------------------------------

    def _record(self, prefix: str, pending: Sequence[PendingGradient]) -> None:
        # State first: creating it records into the startup program, which has no roles.
        kinds = {one.param.desc.dtype for one in pending}
        rate_variable = self._rate(prefix, "float64" if "float64" in kinds else "float32")
        self._rate_variable, rate = rate_variable, rate_variable.fake
        step = constant_state(f"{prefix}.step", 0.0).fake if self.counts_steps else None
        states = {one.param.name: self._state_of(one, prefix, step) for one in pending}
        if is_derived(self):
            self._begin(prefix, pending)
        self._before_exchange(prefix, pending, states)
        changed = self._after_exchange(pending)
        for one in pending:
            if not self.sparse_kernel or self._changes(one):
                one.reserve()
        unscale = self._scaling.prepare(pending) if self._scaling is not None else None
        merged = self._merged
        if merged is not None:
            merged.prepare(prefix, pending)
        clips = prepare_clips(changed, self._grad_clip, prefix)
        with torch.no_grad(), recording_modes(recording_of(pending[0].param.program)), role(Role.OPTIMIZE):
            due = merged.count() if merged is not None else 1.0
            if step is not None:
                step.add_(due)
            if unscale is not None:
                unscale()
            if merged is not None:
                merged.add(pending)
            clips()
            regularize(changed, self._regularization)
            for one in pending if not is_derived(self) else ():
                with one.role():
                    self._update_or_wait(one, _scalar(rate, one.attribute.learning_rate), states[one.param.name])
            self._after_updates()

        if is_derived(self):
            with torch.no_grad(), role(Role.OPTIMIZE):
                self._append_all(pending)

    def _changes(self, one: PendingGradient) -> bool:
        return clip_of(one, self._grad_clip) is not None or regularizer_of(one, self._regularization) is not None

    def _state_of(self, one: PendingGradient, prefix: str, step: torch.Tensor | None) -> State:
        sizes, name = [int(d) for d in one.param.fake.shape], one.param.name
        state = {
            key: constant_state(f"{prefix}.{key}.{name}", first, one.param.desc.dtype, sizes).fake
            for key, first in self._states.items()
        }
        return state if step is None else {**state, "step": step}

    def _rate(self, prefix: str, dtype: str) -> Variable:
        given: Any = self._learning_rate
        if not isinstance(given, Variable):
            if isinstance(given, (str, bytes)) or not hasattr(given, "__float__") or np.size(given) != 1:
                raise ProgramError(
                    f"{user_line()}: {type(self).__name__}: learning rate is {given!r}; expected one number, or a "
                    "schedule such as "
                    "layers.exponential_decay"
                )
            return constant_state(f"{prefix}.learning_rate", float(given), dtype)
        if given.desc.dtype in ("float16", "bfloat16"):
            raise ProgramError(
                f"{user_line()}: {type(self).__name__}: learning rate {given!r} has 16 bits, and updates compute "
                "with one of 32 or 64: give them fluid.layers.cast(rate, 'float32'), or make it with dtype='float32'",
                variable=given.name,
            )
        computed = None if given.persistable else computed_rate(prefix, given)
        if computed is not None:
            return computed
        if not given.persistable or given.fake.numel() != 1:
            raise ProgramError(
                f"{user_line()}: {type(self).__name__}: learning rate {given!r} must be one persistable number, as "
                "a schedule (layers.exponential_decay, …) or layers.create_global_var(persistable=True) gives, or an "
                "input of one number (fluid.data(name, [1]))",
                variable=given.name,
            )
        return given

    def _update_or_wait(self, one: PendingGradient, lr: torch.Tensor, state: State) -> None:
        update = partial(self._update, one, lr)
        if self._merged is not None:
            self._merged.around(one, state, update)
        else:
            update(state)

    def _update(self, one: PendingGradient, lr: torch.Tensor, state: State) -> None:
        if one.rows is None:
            self._dense(one, lr, state)
        elif one.is_raw and self.sparse_kernel:
            self._sparse_kernel(one, lr, state)
        else:
            self._by_rows(one, one.rows, lr, state)

    def _by_rows(self, one: PendingGradient, rows: torch.Tensor, lr: torch.Tensor, state: State) -> None:
        merged = one.value
        tables = {key: state[key] for key in self._states}
        copies = {key: table.index_select(0, rows) for key, table in tables.items()}
        p = one.param_rows()
        self._rule(p, merged, lr, {**state, **copies})
        # A row that appears more than once is written more than once, with the same bits.
        one.param.fake.index_copy_(0, rows, p)
        for key, table in tables.items():
            table.index_copy_(0, rows, copies[key])


def _scalar(rate: torch.Tensor, factor: float) -> torch.Tensor:
    """The learning rate of one parameter, without dimensions so that it never changes a dtype."""
    rate = rate if rate.dim() == 0 else rate.reshape(())
    return rate if factor == 1.0 else rate * factor
