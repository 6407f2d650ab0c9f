"""`append_backward`: torch.autograd.grad under the recorder, so that backward operators are torch's own.

The gradient of parameter w is the variable `w@GRAD`: dense and contiguous, written by one operator and
read by no other operator in the backward pass (a copy is recorded where torch would share it), so that a
gradient exchange may write it in place. Of a sparse table it is a SelectedRows variable: its parts
`w@GRAD@ROWS` (int64[n]) and `w@GRAD@VALUES` ([n, d]); rows may repeat, and are never merged here.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from penstock.compat.torch import gradients as torch_gradients
from penstock.compat.torch import storage_id
from penstock.errors import ArgumentError, ProgramError
from penstock.program.eager import advice, words
from penstock.program.ir import Role, VarDesc, unknown_variable
from penstock.program.program import Program
from penstock.program.record.context import name_scope, role
from penstock.program.record.failures import described
from penstock.program.record.opening import recording_of
from penstock.program.record.recording import Recording
from penstock.program.record.renaming import rename_recorded
from penstock.program.record.replay import refuse_gradients_through_text
from penstock.program.record.savepoint import undone_on_failure
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable, recording_in, recording_modes
from penstock.program.training.recomputation import checkpoint_names, recompute
from penstock.program.training.tape import leaves_of, overwritten_values_named, refuse_lost_gradients


def grad_name(name: str) -> str:
    """Return the name of the gradient of `name`."""
    return f"{name}@GRAD"


def _free_name(program: Program, name: str) -> str:
    """Return the name of the next gradient of `name`: of a second loss `name@GRAD_0`, as Fluid has it."""
    first = grad_name(name)
    later = (f"{first}_{number}" for number in itertools.count())
    return next(one for one in itertools.chain([first], later) if one not in program.variables)


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """Handle of a sparse gradient: `rows` int64[n], `values` [n, d], of a table with `height` rows."""

    name: str
    rows: Variable
    values: Variable
    height: int
    is_data: ClassVar[bool] = False
    persistable: ClassVar[bool] = False

    def for_recording(self, recording: Recording) -> SelectedRows:
        """Return the handle of the same gradient in a clone of its Program."""
        return replace(self, rows=self.rows.for_recording(recording), values=self.values.for_recording(recording))


_log = logging.getLogger(__name__)
Gradient = Variable | SelectedRows
Rows = tuple[torch.Tensor, torch.Tensor]
"""Ids and the rows of a gradient that are theirs."""


def check_loss(loss: Any, what: str) -> None:
    """Raise ProgramError unless `loss` is a variable with one element."""
    if not isinstance(loss, Variable):
        raise ArgumentError(
            f"{user_line()}: {what} needs the variable of the loss, as a layer returned it; got {words(loss)}"
            f"{advice(loss)}"
        )
    if any(d != 1 for d in loss.desc.shape):
        raise ProgramError(
            f"{user_line()}: {what} needs a scalar loss, but {loss.name!r} is {described(loss.fake)} "
            f"(made at {loss.desc.source}). Take its mean or sum first",
            variable=loss.name,
        )


def append_backward(
    loss: Variable,
    parameter_list: Sequence[str | Variable] | None = None,
    no_grad_set: Iterable[str | Variable] | None = None,
    callbacks: object = None,
    checkpoints: Sequence[str | Variable] | None = None,
) -> list[tuple[Variable, Gradient]]:
    """Record the backward pass of a scalar loss; return (parameter, gradient) pairs in order of creation.

    `checkpoints`: variables of the forward pass; what lies between them is computed again (recomputation.py).

    Other variables that gradients were asked for (`stop_gradient = False`) have theirs in the Program, as `x@GRAD`.
    A loss that depends on no trainable parameter has no backward pass, as in Fluid; a warning says so. Raises
    ProgramError if the loss is no scalar, and for a name in `parameter_list` that the program does not have.
    """
    check_loss(loss, "append_backward")
    given: tuple[Any, Any] = (parameter_list, no_grad_set)  # each is read more than once
    parameter_list, no_grad_set = (list(names) if isinstance(names, Iterator) else names for names in given)
    _check_named("append_backward", parameter_list=parameter_list, no_grad_set=no_grad_set, checkpoints=checkpoints)
    if callbacks is not None and not isinstance(callbacks, (list, tuple)):
        raise ArgumentError(f"{user_line()}: append_backward: callbacks is {callbacks!r}; expected None or a list")
    recording = recording_in(loss) or recording_of(loss.program)
    loss, program = recording.own(loss), recording.program
    dense, tables = _wanted(program, parameter_list, no_grad_set or ())
    if recording.num_replayed:
        refuse_gradients_through_text(recording, loss.name, [*dense, *tables])
    lookups = [look for look in recording.lookups if look.table in tables]
    mixed = _used_otherwise(recording, loss, tables)
    dense += mixed
    leaves = [program.handle(n).fake for n in dense] + [look.leaf for look in lookups]
    opened = _opened(recording, loss, no_grad_set or ()) if parameter_list is None else {}
    if not (leaves or opened) or not loss.fake.requires_grad:
        _log.warning("%s: the loss %r depends on no trainable parameter, so nothing is learned", user_line(), loss.name)
        return []
    before = len(program.operators)
    with undone_on_failure(recording, renames=True), recording_modes(recording):
        _mark_loss(program, loss.name)
        with role(Role.BACKWARD | Role.LOSS):
            seed = torch.ops.penstock.scale_loss_grad(loss.fake.detach(), 1.0)
            rename_recorded(recording, seed, _free_name(program, loss.name))
        with role(Role.BACKWARD):
            # The tape is kept, since another loss may share the forward pass; fakes hold no memory.
            wanted = [*leaves, *opened.values()]
            refuse_lost_gradients(recording, [loss.fake], wanted)
            with (
                overwritten_values_named(repr(loss.name)),
                _clipped_on_the_way(recording),
                _named_on_the_way(recording),
            ):
                grads = torch_gradients(loss.fake, seed, wanted)
            for name, grad in zip(opened, grads[len(leaves) :], strict=True):
                if grad is not None:  # a copy: the same memory may be the gradient of a parameter
                    made = grad.clone(memory_format=torch.contiguous_format)
                    rename_recorded(recording, made, grad_name(name))
                    recording.handle(made)
            pairs = _name_gradients(recording, dense, lookups, list(grads[: len(leaves)]), before)
        if checkpoints:
            recompute(program, checkpoint_names(program, checkpoints), before)
        _warn_of_updated(program, before, loss.name)
    return [(program.handle(p), g) for p, g in pairs]


def _check_named(what: str, **given: Any) -> None:
    """Raise ArgumentError for what is no collection of variables or their names, nor None."""
    for argument, values in given.items():
        whole = values is None or (isinstance(values, Collection) and not isinstance(values, (str, Variable)))
        if not whole or not all(isinstance(getattr(value, "name", value), str) for value in values or ()):
            raise ArgumentError(
                f"{user_line()}: {what}: {argument} is {values!r}; expected a list or a set of variables or names"
            )


@contextmanager
def _clipped_on_the_way(recording: Recording) -> Iterator[None]:
    """Clip the gradients of variables that have an `error_clip`, as soon as they are whole."""
    found = [(recording.handles[name], clip) for name, clip in recording.error_clips.items() if clip is not None]
    hooks = [variable.fake.register_hook(clip.clipped) for variable, clip in found if variable.fake.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _named_on_the_way(recording: Recording) -> Iterator[None]:
    """Note the gradients of intermediate results as soon as they are whole, for those who fetch them by name."""

    noted: dict[str, torch.Tensor] = {}

    def note(name: str, gradient: torch.Tensor) -> None:
        if recording.is_named(gradient):
            noted[grad_name(name)] = gradient

    found: list[tuple[str, Any]] = list(recording.differentiated())
    hooks = [tensor.register_hook(partial(note, name)) for name, tensor in found]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for name, gradient in noted.items():  # of several losses the first, as `w@GRAD` is its
        recording.gradients.setdefault(name, gradient)


def _opened(recording: Recording, loss: Variable, refused: Iterable[Any]) -> dict[str, torch.Tensor]:
    """Variables, by name, that are no parameters and that the loss depends on by an opened gradient; without a second
    gradient where a loss before had one."""
    program, names = recording.program, {v if isinstance(v, str) else v.name for v in refused}
    cut = {id(look.leaf) for look in recording.lookups}
    found = {recording.name_of(leaf): leaf for leaf in leaves_of(loss.fake)
             if recording.is_named(leaf) and id(leaf) not in cut}  # fmt: skip
    return {
        name: leaf
        for name, leaf in found.items()
        if not program.variables[name].parameter and name not in names and grad_name(name) not in program.variables
    }


def _warn_of_updated(program: Program, before: int, loss: str) -> None:
    """Log it if the backward pass recorded since `before` reads what an update of another loss has written."""
    storage = {name: var.storage for name, var in program.variables.items()}
    updated = {storage[n] for op in program.operators[:before] if op.role & Role.OPTIMIZE for n in op.writes}
    read = {n: op for op in program.operators[before:] for n in op.input_names() if storage.get(n) in updated}
    if read:
        _log.warning(
            "%s: the backward pass of %r reads %r as the update of another loss has left it, with activations from "
            "before, as in Fluid. For gradients at one point call backward for each loss, and apply_gradients then",
            user_line(), loss, min(read),
        )  # fmt: skip


def _wanted(program: Program, chosen: Any, refused: Iterable[Any]) -> tuple[list[str], set[str]]:
    names = {v if isinstance(v, str) else v.name for v in refused}
    picked = None if chosen is None else {v if isinstance(v, str) else v.name for v in chosen}
    for name in sorted(picked - program.variables.keys()) if picked is not None else ():
        known = [v.name for v in program.parameters()]
        raise ProgramError(
            f"{user_line()}: append_backward: parameter_list: {unknown_variable(name, known)}",
            variable=name,
        )
    sparse = {look.table for look in recording_of(program).lookups}
    trainable = [
        v.name
        for v in program.parameters()
        if v.trainable and v.name not in names and (picked is None or v.name in picked)
    ]
    return [n for n in trainable if n not in sparse], {n for n in trainable if n in sparse}


def _used_otherwise(recording: Recording, loss: Variable, tables: set[str]) -> list[str]:
    """Return the sparse tables that the loss uses other than by lookups, too: their gradients are dense, as in Fluid.

    Raises ProgramError for one whose rows servers alone have, and for a tensor that autograd saw without its stand-in.
    """
    found: list[str] = []
    for leaf in leaves_of(loss.fake):
        if not recording.is_named(leaf):
            raise ProgramError(
                f"loss {loss.name!r} depends on a tensor of shape {list(leaf.shape)} that autograd knows and the "
                "program does not, so it would not be trained: it was handed to an autograd.Function or another call "
                "that torch hides. Hold it in the module that uses it, or detach it"
            )
        table = recording.name_of(leaf)
        if table not in tables:
            continue
        source = recording.program.variables[table].source
        if recording.program.variables[table].distributed:
            raise ProgramError(
                f"table {table!r} (created at {source}) is distributed, but it is used in other operations than "
                "lookups, too. Use is_distributed=False for it",
                variable=table,
            )
        found.append(table)
        _log.warning(
            "table %r (created at %s) is used by sparse lookups and in other operations too: its gradient is dense, "
            "and each step updates all of its rows",
            table, source,
        )  # fmt: skip
    return found


def _mark_loss(program: Program, loss: str) -> None:
    for i in range(len(program.operators) - 1, -1, -1):
        op = program.operators[i]
        if loss in op.output_names():
            program.operators[i] = replace(op, role=op.role | Role.LOSS)
            return


def _name_gradients(
    recording: Recording, dense: list[str], lookups: list[Any], grads: list[Any], before: int
) -> list[tuple[str, Gradient]]:
    pairs: dict[str, Gradient] = {}
    rows: dict[str, list[Rows]] = {}
    modules = {look.table: look.module for look in lookups}
    memories = Counter(storage_id(grad) for grad in grads if grad is not None)
    whole = {name: grad for name, grad in zip(dense, grads, strict=False) if name in modules}
    for name, grad in zip(dense, grads, strict=False):
        if grad is not None and name not in modules:
            # Where torch gives several parameters one memory each gets a copy, made before any is exchanged.
            private = memories[storage_id(grad)] == 1 and _private(recording, grad, before)
            pairs[name] = _dense_gradient(recording, name, grad, private)
    for look, grad in zip(lookups, grads[len(dense) :], strict=True):
        if grad is not None:
            with name_scope(look.module):
                rows.setdefault(look.table, []).append(_rows(look, grad))
    for table in whole:
        rows.setdefault(table, [])  # of lookups that the loss does not use
    for table, parts in rows.items():
        with name_scope(modules[table]):
            if table in whole:
                pairs[table] = _with_rows(recording, table, whole[table], parts)
            else:
                pairs[table] = _sparse_gradient(recording, table, parts)
    order = {v.name: i for i, v in enumerate(recording.program.parameters())}
    return sorted(pairs.items(), key=lambda item: order[item[0]])


def _with_rows(recording: Recording, table: str, grad: torch.Tensor, parts: list[Rows]) -> Variable:
    """The gradient of a table: what other operations give, and what lookups give to some rows."""
    for ids, values in parts:
        grad = grad.index_add(0, ids, values)
    return _dense_gradient(recording, table, grad, private=bool(parts))


def _dense_gradient(recording: Recording, name: str, grad: torch.Tensor, private: bool) -> Variable:
    if not private:
        grad = grad.clone(memory_format=torch.contiguous_format)
    own = _free_name(recording.program, name)
    rename_recorded(recording, grad, own)
    _pair(recording.program, own, name)
    return recording.handle(grad)  # type: ignore[no-any-return]  # a Variable


def _private(recording: Recording, grad: torch.Tensor, before: int) -> bool:
    """Whether a gradient is contiguous, covers its memory, and nothing but views of it is read anywhere."""
    program = recording.program
    var = program.variables[recording.name_of(grad)]
    root = program.variables[var.storage]
    if "@GRAD" in var.name or root.persistable or root.feed or root.shape == () or not grad.is_contiguous():
        return False
    group = {v.name for v in program.variables.values() if v.storage == root.name}
    if any("@GRAD" in n for n in group) or grad.untyped_storage().nbytes() != grad.numel() * grad.element_size():
        return False
    readers = [op for op in program.operators if group & set(op.input_names())]
    made_before = any(root.name in op.output_names() for op in program.operators[:before])
    return not made_before and all(group >= set(op.output_names()) and not op.writes for op in readers)


def _sparse_gradient(recording: Recording, table: str, parts: list[Rows]) -> SelectedRows:
    program, name = recording.program, _free_name(recording.program, table)
    rows = torch.cat([p[0] for p in parts]) if len(parts) > 1 else parts[0][0].clone()
    values = torch.cat([p[1] for p in parts]) if len(parts) > 1 else parts[0][1].clone()
    rename_recorded(recording, rows, f"{name}@ROWS")
    rename_recorded(recording, values, f"{name}@VALUES")
    for part in (f"{name}@ROWS", f"{name}@VALUES"):
        _pair(program, part, table, name)
    base = program.variables[table]
    program.add_variable(
        VarDesc(
            name,
            base.shape,
            base.dtype,
            "selected_rows",
            rows=f"{name}@ROWS",
            values=f"{name}@VALUES",
            source=base.source,
        )
    )
    handle = SelectedRows(name, recording.handle(rows), recording.handle(values), int(str(base.shape[0])))
    recording.handles[name] = handle
    return handle


def _pair(program: Program, made: str, parameter: str, gradient: str = "") -> None:
    for i in range(len(program.operators) - 1, -1, -1):
        op = program.operators[i]
        if made in op.output_names():
            program.operators[i] = replace(op, role_vars=(*op.role_vars, (parameter, gradient or made)))
            return


def gradients(
    targets: Variable | Sequence[Variable],
    inputs: Variable | Sequence[Variable],
    target_gradients: Any = None,
    no_grad_set: Iterable[str | Variable] | None = None,
) -> list[Variable | None]:
    """Record the gradients of the sum of `targets` for each input: any variables that want one (`stop_gradient=False`).

    `target_gradients`: weights of the targets' elements, a variable or None for each. What is returned may be used in
    further layers and losses, and differentiated again. None stands for an input that no target depends on.
    Raises ProgramError. Source: fluid.gradients (Fluid 1.8).
    """
    _check_named("gradients", no_grad_set=no_grad_set)
    wanted = {v if isinstance(v, str) else v.name for v in no_grad_set or ()}
    sums, sources = _listed(targets), _listed(inputs)
    weights = _listed(target_gradients) if target_gradients is not None else [None] * len(sums)
    if not all(isinstance(value, Variable) for value in (*sums, *sources, *(w for w in weights if w is not None))):
        raise ArgumentError(
            f"{user_line()}: gradients is given targets {sums}, inputs {sources}, weights {weights}; expected variables"
        )
    if len(weights) != len(sums):
        raise ProgramError(f"{user_line()}: {len(weights)} target_gradients are given for {len(sums)} targets")
    closed = [v.name for v in sources if not v.fake.requires_grad and v.name not in wanted]
    if closed or not all(v.fake.requires_grad for v in sums):
        named = closed or [v.name for v in sums if not v.fake.requires_grad]
        raise ProgramError(
            f"{user_line()}: gradients stop at {', '.join(map(repr, named))}; "
            "set stop_gradient = False before it is used"
        )
    recording = recording_of(sums[0].program)
    with undone_on_failure(recording), recording_modes(recording):
        seeds = [torch.ones_like(v.fake) if w is None else w.fake for v, w in zip(sums, weights, strict=True)]
        open_sources = [v for v in sources if v.name not in wanted]
        leaves: list[torch.Tensor] = [v.fake for v in open_sources]
        lookups = _lookups_of(recording, {v.name for v in open_sources})
        leaves += [look.leaf for look in lookups]
        results: list[torch.Tensor] = [v.fake for v in sums]
        refuse_lost_gradients(recording, results, leaves)
        with overwritten_values_named(", ".join(repr(v.name) for v in sums)):
            found = torch_gradients(results, seeds, leaves, create_graph=True) if leaves else ()
        split = len(open_sources)
        whole = _with_lookups(open_sources, list(found[:split]), lookups, found[split:])
        own = iter(whole)
        made = [None if v.name in wanted else next(own) for v in sources]
        return [None if grad is None else recording.handle(grad) for grad in made]


calc_gradient = gradients


def _lookups_of(recording: Recording, tables: Collection[str]) -> list[Any]:
    """The sparse lookups of tables. Raises ProgramError for a table whose rows servers alone have."""
    found = [look for look in recording.lookups if look.table in tables]
    for look in found:
        if recording.program.variables[look.table].distributed:
            raise ProgramError(
                f"{user_line()}: gradients of table {look.table!r}, which is distributed: its rows are on servers. Use "
                "is_distributed=False for it, or append_backward",
                variable=look.table,
            )
    return found


def _with_lookups(
    sources: Sequence[Variable], whole: list[torch.Tensor | None], lookups: Sequence[Any],
    rows: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:  # fmt: skip
    """The gradients of sources, with what sparse lookups of them give to rows."""
    for look, grad in zip(lookups, rows, strict=True):
        for at, source in enumerate(sources):
            if grad is not None and source.name == look.table:
                with name_scope(look.module):
                    before = whole[at]
                    total = torch.zeros_like(source.fake) if before is None else before
                    ids, values = _rows(look, grad)
                    whole[at] = total.index_add(0, ids, values)
    return whole


def _rows(look: Any, grad: torch.Tensor) -> Rows:
    """Ids [n] and gradients [n, d] of a lookup, 0 for the row that is never trained."""
    if look.padding >= 0:
        grad = grad.masked_fill((look.ids == look.padding).unsqueeze(-1), 0.0)
    return look.ids.reshape(-1), grad.reshape(-1, grad.shape[-1])


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


__all__ = ["Gradient", "SelectedRows", "append_backward", "calc_gradient", "grad_name", "gradients"]
