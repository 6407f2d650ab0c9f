"""What of a minimised program stays with the trainers, and what parameter servers do.

Trainer: forward, backward, and gradient clipping, whose norms need all gradients. Server: regularisation and the
update of each parameter, and what all updates share: learning-rate schedule and step counters.
Invariant: what crosses the border are the gradients that `Update.sent` names, and nothing else; checked here.
Pure. Source: DistributeTranspiler (Fluid 1.8), spec 3.2 and 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.errors import ProgramError
from penstock.program.ir import Arg, Operator, Role, VarDesc
from penstock.program.program import Program
from penstock.transpile.schedules import with_schedules

CLIP_SCOPE = "gradient_clip"
LOOKUP = "penstock.lookup_table.default"
_UPDATE = Role.OPTIMIZE | Role.LR_SCHED
_UNSUPPORTED = "Not supported optimizer for distributed training"


@dataclass(frozen=True, slots=True)
class Update:
    """One parameter and what the servers do for it.

    `gradient`: its name in role_vars. `sent`: the variables that the trainer sends, under the names that `operators`
    read them by: (gradient,) or (rows, values); other names than the gradient's where it was clipped.
    `state`: persistables of the parameter's shape, cut as it is. `shared`: persistable numbers that `operators` read.
    `row_wise`: each row is updated from itself alone, so that the parameter may be cut.
    `local`: clip operators of this parameter, which stay.
    """

    parameter: str
    gradient: str
    shape: tuple[int, ...]
    dtype: str
    sparse: bool
    distributed: bool
    sent: tuple[str, ...]
    operators: tuple[Operator, ...]
    state: tuple[str, ...]
    shared: tuple[str, ...]
    row_wise: bool
    local: tuple[Operator, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the parameter."""
        return math.prod(self.shape)


class Partition:
    """The parts of one minimised Program. `updates`: in the order in which the optimizers go through the parameters.

    `shared`: operators that run once a step, before all updates, with the persistable numbers `shared_state` that they
    write. Raises ProgramError for a program without updates, and naming what no server could do.
    `by_trainers`: each trainer updates by itself, and computes the rates (GEO).
    """

    def __init__(self, program: Program, *, by_trainers: bool = False) -> None:
        self.program = program = program if by_trainers else with_schedules(program)
        operators = program.global_block().operators
        self.compute = tuple(op for op in operators if not op.role & _UPDATE)
        self.local = tuple(op for op in operators if op.role & _UPDATE and is_clip(op))
        remote = [op for op in operators if op.role & _UPDATE and not is_clip(op)]
        self.shared = tuple(op for op in remote if not op.role_vars)
        pairs = list(dict.fromkeys(pair for op in remote for pair in op.role_vars))
        if not pairs:
            raise ProgramError(
                "the program updates no parameter, so there is nothing to distribute. Call optimizer.minimize(loss) "
                "before transpile, in the same program"
            )
        self._refuse_fused(remote)
        _refuse_second(pairs)
        if not by_trainers:
            self._refuse_foreign_numbers()
            self._refuse_states_in_trainers({parameter for parameter, _ in pairs}, remote)
        self.shared_state = self._shared_state()
        self.updates = tuple(self._update(parameter, gradient, remote) for parameter, gradient in pairs)

    def update(self, parameter: str) -> Update:
        """Return what is done for a parameter. Raises ProgramError for one that is not updated."""
        for one in self.updates:
            if one.parameter == parameter:
                return one
        raise ProgramError(
            f"{parameter!r} is not updated by the program; updated are {[u.parameter for u in self.updates]}",
            variable=parameter,
        )

    def lookups(self, parameter: str) -> tuple[Operator, ...]:
        """Return the forward lookups of a table."""
        return tuple(op for op in self.compute if op.type == LOOKUP and op.input_names()[0] == parameter)

    # -- checks ------------------------------------------------------------------------------------

    def _refuse_fused(self, remote: Iterable[Operator]) -> None:
        for op in remote:
            if len({parameter for parameter, _ in op.role_vars}) > 1:
                raise ProgramError(
                    f"{_UNSUPPORTED}: operator {op.name!r} ({op.source}) updates {[p for p, _ in op.role_vars]} in one "
                    "go, and they may be on different servers",
                    operator=op.name,
                )

    def _refuse_foreign_numbers(self) -> None:
        made = {n for op in self.shared for n in op.output_names()}
        for op in self.shared:
            for name in op.input_names():
                if name not in made and not _is_number(self.program.variables[name]):
                    raise ProgramError(
                        f"{_UNSUPPORTED}: operator {op.name!r} ({op.source}) {_reads_foreign(op, name)}",
                        operator=op.name,
                        variable=name,
                    )

    def _refuse_states_in_trainers(self, parameters: set[str], remote: Iterable[Operator]) -> None:
        """Refuse a program whose backward pass reads what only servers would write, such as a momentum."""
        written = {name for op in remote if op.role_vars for name in op.output_arg_names} - parameters
        for op in self.compute:
            for name in op.input_names():
                if name in written and self.program.variables[name].persistable:
                    raise ProgramError(
                        f"{_UNSUPPORTED}: operator {op.name!r} ({op.source}) of the trainers reads {name!r}, which the "
                        "servers would update: DGCMomentumOptimizer trains without servers, or with GEO",
                        operator=op.name,
                        variable=name,
                    )

    def _shared_state(self) -> tuple[str, ...]:
        written = dict.fromkeys(n for op in self.shared for n in op.output_arg_names)
        return tuple(n for n in written if self.program.variables[n].persistable)

    def _update(self, parameter: str, gradient: str, remote: Iterable[Operator]) -> Update:
        variables = self.program.variables
        var = variables[parameter]
        shape = tuple(int(str(d)) for d in var.shape)
        operators = tuple(op for op in remote if (parameter, gradient) in op.role_vars)
        local = tuple(op for op in self.local if (parameter, gradient) in op.role_vars)
        sparse = variables[gradient].kind == "selected_rows"
        kept, numbers = self._states(var, operators)
        return Update(
            parameter, gradient, shape, var.dtype, sparse, var.distributed,
            self._sent(variables[gradient], operators, local), operators, kept, numbers,
            _row_wise(operators, variables, shape), local,
        )  # fmt: skip

    def _states(self, param: VarDesc, operators: Iterable[Operator]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Split the persistables that an update uses into those that are cut like the parameter, and numbers."""
        variables = self.program.variables
        made = (n for op in operators for n in op.output_names() if variables[n].storage == n)  # a view writes nothing
        written = {*made, *(variables[n].storage for op in operators for n in op.writes)}
        used = dict.fromkeys(variables[n].storage for op in operators for n in op.input_names())
        kept, numbers = [], []
        for name in used:
            var = variables[name]
            if not var.persistable or name == param.name:
                continue
            if var.shape == param.shape and (name in written or not _is_number(var)):
                kept.append(name)
            elif _is_number(var) and name not in written:
                numbers.append(name)
            else:
                raise ProgramError(
                    f"{_UNSUPPORTED}: the update of {param.name!r} {list(param.shape)} keeps {name!r} "
                    f"{list(var.shape)}; state has to have the parameter's shape, to be cut as it is, or to be a "
                    "number that all updates share",
                    variable=name,
                )
        return tuple(kept), tuple(numbers)

    def _sent(self, gradient: VarDesc, operators: Iterable[Operator], local: tuple[Operator, ...]) -> tuple[str, ...]:
        """Return what the server-side operators read that is neither theirs nor persistable: what has to be sent."""
        variables = self.program.variables
        made = {n for op in (*self.shared, *operators) for n in op.output_names()}
        inputs = list(dict.fromkeys(n for op in operators for n in op.input_names() if n not in made))
        asked = [n for n in inputs if not variables[variables[n].storage].persistable]
        if gradient.kind == "selected_rows":
            known = {gradient.rows, gradient.values, *(n for op in local for n in op.output_names())}
            if gradient.rows not in asked or len(asked) != 2 or not set(asked) <= known:
                raise _foreign(gradient.name, asked, [gradient.rows, gradient.values])
            return gradient.rows, next(n for n in asked if n != gradient.rows)
        known = {gradient.name, *(n for op in local for n in op.output_names())}
        if len(asked) != 1 or not set(asked) <= known:
            raise _foreign(gradient.name, asked, [gradient.name])
        return (asked[0],)


def _refuse_second(pairs: Iterable[tuple[str, str]]) -> None:
    """Raise ProgramError for a parameter that two losses update: a server's round has one gradient of each."""
    seen: dict[str, str] = {}
    for parameter, gradient in pairs:
        if seen.setdefault(parameter, gradient) != gradient:
            raise ProgramError(
                f"{_UNSUPPORTED}: {parameter!r} is updated with {seen[parameter]!r} and with {gradient!r}, and servers "
                "take one gradient a step. Add the losses and minimize the sum, or give each loss its own parameters "
                "by parameter_list",
                variable=parameter,
            )


def is_clip(op: Operator) -> bool:
    """Whether an operator clips gradients, and so stays with the trainer."""
    return op.module.endswith(f".{CLIP_SCOPE}")


def _reads_foreign(op: Operator, name: str) -> str:
    if op.role & Role.LR_SCHED:
        return (
            f"computes a learning rate of {name!r}, which is no single number; servers keep single numbers for rates. "
            "Use fluid.layers.piecewise_decay, or fluid.layers.Switch"
        )
    return (
        f"belongs to no parameter and reads {name!r}, which is no persistable number; servers have parameters of "
        "their own alone"
    )


def _foreign(gradient: str, asked: list[str], expected: list[str]) -> ProgramError:
    return ProgramError(
        f"{_UNSUPPORTED}: the update with {gradient!r} reads {asked} of the trainer; expected {expected} alone, or "
        "what gradient clipping makes of it",
        variable=gradient,
    )


def _is_number(var: VarDesc) -> bool:
    return var.persistable and all(d == 1 for d in var.shape)


def _row_wise(operators: Iterable[Operator], variables: Mapping[str, VarDesc], shape: tuple[int, ...]) -> bool:
    """Whether no operator sums over elements of different rows, or has the parameter's sizes written into it."""
    return not any(_mixes_rows(op, variables) or _names_sizes(op.args, shape) for op in operators)


def _mixes_rows(op: Operator, variables: Mapping[str, VarDesc]) -> bool:
    """A result with fewer dimensions than its largest operand; a cut of a vector makes vectors of it, no numbers.

    Operands of one element (a learning rate of shape [1]) have no rows to mix.
    """
    shapes = [variables[n].shape for n in op.input_names() if n in variables]
    rank = max((len(shape) for shape in shapes if any(d != 1 for d in shape)), default=0)
    return any(len(variables[n].shape) < rank for n in op.output_names())


def _names_sizes(args: tuple[Arg, ...], shape: tuple[int, ...]) -> bool:
    return len(shape) > 0 and any(isinstance(a, tuple) and a == shape for a in args)
