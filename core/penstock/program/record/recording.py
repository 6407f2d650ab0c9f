"""One Program's fake world: its fake tensors, their names and storages, and what was captured.

Invariant: every fake tensor that took part in a recorded call has exactly one name in the Program, and
tensors that share memory have descriptions with the same `storage`.
Owned by the thread that records; a Program is recorded by one thread at a time.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy as shallow
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.compat.torch import (
    disable_current_modes,
    storage_id,
    version_of,
)
from penstock.errors import Bug, ProgramError
from penstock.native import ops as _registered  # noqa: F401 - registers the operators, their shapes and derivatives
from penstock.program.expr import Dim, Expr
from penstock.program.ir import Guard, Operator, Ref, SubBlock, TorchConst, VarDesc
from penstock.program.program import Program
from penstock.program.record.context import current_scope, default_startup_program
from penstock.program.record.fakes import Fake, empty_fake
from penstock.program.record.sizes import Sizes
from penstock.program.record.source import user_line
from penstock.program.record.symbols import SymbolTable
from penstock.program.sequences import batch_symbol

RNG = "@RNG@"
"""Name of int64[3]: program seed, step, first global row of the replica. Executors set it; it is not fed."""

_HINT = 7919  # size hint of symbols: odd, prime, larger than any width that is written by hand


@dataclass(frozen=True, slots=True)
class SparseLookup:
    """A lookup whose tape was cut: the gradient of `leaf` is the rows' gradient of `table`.

    `padding`: the row that is never trained; -1 if there is none.
    """

    table: str
    ids: torch.Tensor
    leaf: torch.Tensor
    module: str
    padding: int


class Recording:
    """The recorder's state for one Program; see the module.

    `origin`: the Recording of the Program that this one was cloned from, over any number of clones, or itself.
    `handle_type`: the class of the user's handles; variable.py, which knows this module, puts itself here.
    """

    handle_type: Callable[[Recording, str, torch.Tensor], Any]
    fix_sizes: Callable[[Recording, Collection[str]], None]
    """Take symbols for the numbers that a script has declared; declared_sizes.py puts itself here."""
    copy_view: Callable[[Recording, str], None]

    def __init__(self, program: Program) -> None:
        self.program = program
        self.origin = self
        # of sizes, for factories, which get them alone; weak, because a Recording refers to its sizes
        self.symbols = SymbolTable(Sizes(weakref.ref(self)))
        self.symbols.recordings.add(self)
        self.handles: dict[str, Any] = {}
        self.declared: dict[str, Any] = {}  # by `Block.create_var`; no part of the Program before their first use
        self.lookups: list[SparseLookup] = []
        self.attributes: dict[str, Any] = {}  # parameter -> its ParamAttr, for optimizers
        self.gradients: dict[str, torch.Tensor] = {}  # `x@GRAD` of intermediate results, by which Fluid fetches them
        self.results: dict[str, torch.Tensor | None] = {}  # `fc_0.tmp_1` of layers; None: of several of one name
        self.error_clips: dict[str, Any] = {}  # variable -> what clips its gradient in the backward pass
        self.changed_gradients: dict[str, Any] = {}  # what a script has clipped -> the gradient; see training/
        self.origins: dict[int, tuple[str, str]] = {}  # autograd sequence number -> (module, source)
        self.modules: list[str] = []
        self.module_names: dict[int, tuple[torch.nn.Module, str]] = {}  # by id: of those that were called
        self.normalises = False  # inside the forward of a normalisation module that keeps statistics
        self.calling = ""  # the torch function that was entered last, for messages
        self.aligns = True  # whether operators of Variables align at the batch, as Fluid's; see alignment.py
        self.detaches = False  # inside a detach of the user's: a variable of its own, which keeps its value
        self.active = 0
        self.open_blocks: list[Any] = []  # that are recorded now, the innermost last; see blocks.py
        self.ended: dict[int, tuple[torch.Tensor, str]] = {}  # what closed blocks have made: tensors by id, names
        self.num_seeds = 0
        self.num_replayed = 0  # operators that were read from text; see replay.py
        self._names: dict[int, tuple[torch.Tensor, str]] = {}
        self._storages: dict[int, tuple[Any, str]] = {}
        self._captured: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._batch: Any = None

    def for_clone(self, clone: Program) -> Recording:
        """Return a Recording of `clone`, a copy of this Program: own handles and names, the same fake tensors."""
        copy = Recording(clone)
        copy.origin = self.origin
        copy.symbols, copy.num_replayed = self.symbols, min(self.num_replayed, len(clone.operators))
        copy.symbols.recordings.add(copy)
        copy.num_seeds, copy._batch, copy.origins = self.num_seeds, self._batch, dict(self.origins)
        kept = clone.variables
        copy.lookups = [look for look in self.lookups if look.table in kept]
        copy.attributes = {n: shallow(a) for n, a in self.attributes.items() if n in kept}
        copy.error_clips = {n: c for n, c in self.error_clips.items() if n in kept}
        copy.gradients, copy.results = dict(self.gradients), dict(self.results)
        copy.changed_gradients = {n: g for n, g in self.changed_gradients.items() if n in kept}
        copy._names = {k: entry for k, entry in self._names.items() if entry[1] in kept}
        copy._storages = {k: entry for k, entry in self._storages.items() if entry[1] in kept}
        named = copy._names
        copy._captured = {k: entry for k, entry in self._captured.items() if id(entry[1]) in named}
        copy.handles = {n: h.for_recording(copy) for n, h in self.handles.items() if n in kept}
        copy.declared = {n: h.for_recording(copy) for n, h in self.declared.items() if n not in self.handles}
        return copy

    def state(self) -> tuple[list[dict[Any, Any]], list[SparseLookup]]:
        """What grows with each call: mappings, and the lookups. For undoing a call that failed."""
        own: list[dict[Any, Any]] = [self.handles, self.attributes, self.origins, self.results]
        return [*own, self._names, self._storages, self._captured], self.lookups

    def named_by_fluid(self, name: str) -> str:
        """Return the variable of a gradient `x@GRAD` of an intermediate result, or of a layer's `fc_0.tmp_1`; or ''."""
        found = self.gradients.get(name, self.results.get(name))
        return self.name_of(found) if found is not None and self.is_named(found) else ""

    def is_ambiguous(self, name: str) -> bool:
        """Whether several layers of one `name=` have a result that Fluid would call so."""
        return name in self.results and self.results[name] is None

    def differentiated(self) -> list[tuple[str, torch.Tensor]]:
        """Intermediate results that autograd knows, by name."""
        names = list(self._names.values())  # that of a view is made anew when it is asked for, which names tensors
        return [(name, tensor) for tensor, name in names if tensor.grad_fn is not None]

    def versions(self) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
        """Return the fake tensors, and how often torch has seen each of them changed in place."""
        tensors = tuple(tensor for tensor, _ in self._names.values() if not tensor.is_inference())
        return tensors, tuple(version_of(tensor) for tensor in tensors)

    # -- sizes -----------------------------------------------------------------------------------

    def fake_of_shape(
        self, shape: Sequence[int], dtype: torch.dtype, *, own_rows: bool = False, open_sizes: Collection[int] = ()
    ) -> torch.Tensor:
        """Return a fake tensor; -1 at position 0 is the batch symbol, every other -1 a symbol of its own.

        `own_rows`: that at position 0, too. `open_sizes`: positions of numbers that another one may be fed for.
        """
        sizes = [
            self._declared_size(d) if i in open_sizes else self._size(d, of_batch=i == 0 and not own_rows)
            for i, d in enumerate(shape)
        ]
        return empty_fake(sizes, None, dtype)

    def fake_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor with the sizes and dtype of another."""
        return empty_fake(list(tensor.shape), None, tensor.dtype)

    def _size(self, dim: int, *, of_batch: bool) -> Any:
        if dim >= 0:
            return int(dim)
        if of_batch:
            self._batch = self._batch if self._batch is not None else self._new_symbol()
            return self._batch
        return self._new_symbol()

    def _new_symbol(self) -> Any:
        symbols = self.program.symbols
        name = self._free_symbol("s")
        symbols.insert(len(symbols) if batch_symbol(self.program) else 0, name)  # the first is the batch
        return self._symbol(name)

    def _free_symbol(self, letter: str) -> str:
        used = {*self.program.symbols, *self.symbols.sizes.equal}
        return next(free for i in itertools.count(len(self.program.symbols)) if (free := f"{letter}{i}") not in used)

    def _declared_size(self, number: int) -> Any:
        """A symbol for a size that was declared as a number; see declared_sizes.py."""
        name = self._free_symbol("f")
        self.program.symbols.append(name)
        self.symbols.sizes.declared[name] = number
        return self.symbols.new(name, number)

    def new_rows_of_positions(self) -> Any:
        """Return the torch.SymInt of a new symbol, of rows apart from the batch; see rows_of_positions.py."""
        name = self._free_symbol("r")
        self.program.symbols.append(name)
        return self._symbol(name)

    def adopt_symbols(self) -> None:
        """Make torch's symbols for those that the Program has already; the first is the batch."""
        sizes = [self._symbol(name) for name in self.program.symbols]
        self._batch = sizes[0] if batch_symbol(self.program) else None

    def _symbol(self, name: str) -> Any:
        return self.symbols.new(name, _HINT + len(self.symbols.sizes.hints) + 1)

    def shape_of(self, tensor: torch.Tensor) -> tuple[Dim, ...]:
        """Return the shape as expressions."""
        return tuple(self.symbols.dim(d) for d in tensor.shape)

    def batch_step(self) -> int:
        """Return what the batches differ by that guards on rests and quotients accept: 2 for `s0 % 2 == 0`."""
        relations = (side for g in self.program.guards if g.relation == "==" for side in (g.left, g.right))
        return math.lcm(*(n for side in relations for n in _divisors(side)))

    def add_guards(self, guards: Sequence[Guard]) -> None:
        """Add the relations that the Program does not have yet; the first line that asked is kept."""
        known = {(g.left, g.relation, g.right) for g in self.program.guards}
        for guard in guards:
            if guard.symbols() & self.symbols.of_data.keys():
                continue  # of torch's own, not of a line of the user's: kernels check the sizes that they get
            if (guard.left, guard.relation, guard.right) not in known:
                self.program.guards.append(guard)
                known.add((guard.left, guard.relation, guard.right))

    # -- names -----------------------------------------------------------------------------------

    def name_of(self, tensor: torch.Tensor) -> str:
        """Return the name of a tensor; a real tensor is captured first. Raises Bug for a stray fake."""
        known = self._names.get(id(tensor))
        if known is not None:
            return known[1]
        if isinstance(tensor, Fake):
            raise Bug(f"a fake tensor of shape {tuple(tensor.shape)} has no name in the program; please report this")
        return self.name_of(self.capture(tensor))

    def name_of_result(self, node: Any) -> str:
        """Return the name of a result of the call that left an autograd node; '' if it has none."""
        return next((name for tensor, name in self._names.values() if tensor.grad_fn is node), "")

    def is_named(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor has a name already."""
        return id(tensor) in self._names

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is one of this fake world, so that it needs no stand-in."""
        return self.is_named(tensor) or isinstance(tensor, Fake)

    def alias(self, tensor: torch.Tensor, name: str) -> None:
        """Let `tensor` stand for the variable `name` too (detach, or the leaf of a cut tape)."""
        self._names[id(tensor)] = (tensor, name)

    def bind(self, tensor: torch.Tensor, var: VarDesc) -> VarDesc:
        """Add `var` to the Program and let `tensor` stand for it; a view gets its base's storage."""
        key = storage_id(tensor)
        root = self._storages.get(key)
        if root is None:
            self._storages[key] = (tensor.untyped_storage(), var.name)
        else:
            var = replace(var, storage=root[1])
        self.program.add_variable(var)
        self.alias(tensor, var.name)
        return var

    def adopt(self, tensor: torch.Tensor, var: VarDesc) -> None:
        """Let `tensor` stand for a variable that the Program has already."""
        self._storages.setdefault(storage_id(tensor), (tensor.untyped_storage(), var.storage))
        self.alias(tensor, var.name)

    def declare_again(self, tensor: torch.Tensor, var: VarDesc) -> None:
        """Let a tensor of other sizes stand for an input, or for what was made of it alone."""
        of_layers = [key for key, value in self.results.items() if value is not None and self._stands_for(value, var)]
        self.results.update(dict.fromkeys(of_layers, tensor))
        self._names = {key: entry for key, entry in self._names.items() if entry[1] != var.name}
        self._storages = {key: entry for key, entry in self._storages.items() if entry[1] != var.name}
        self.program.variables[var.name] = var
        self.program.revision += 1
        self.adopt(tensor, var)
        if var.name in self.handles:
            self.handles[var.name].fake = tensor

    def _stands_for(self, tensor: torch.Tensor, var: VarDesc) -> bool:
        return self.is_named(tensor) and self.name_of(tensor) == var.name

    def rename(self, old: str, new: str) -> None:
        """Let every tensor, storage and handle of `old` stand for `new`."""
        self._names.update({k: (t, new) for k, (t, n) in self._names.items() if n == old})
        self._storages.update({k: (s, new) for k, (s, n) in self._storages.items() if n == old})
        handle = self.handles.pop(old, None)
        if handle is not None:
            handle.name = new
            self.handles[new] = handle

    def drop(self, name: str) -> None:
        """Forget an input that nothing reads."""
        del self.program.variables[name]
        self.handles.pop(name, None)
        for key in [key for key, (_, known) in self._names.items() if known == name]:
            del self._names[key]

    def take_out(self, name: str) -> VarDesc:
        """Remove what a block has made from the Program; return its description."""
        for key in [key for key, (_, known) in self._names.items() if known == name]:
            self.ended[key] = self._names.pop(key)
        for key in [key for key, (_, known) in self._storages.items() if known == name]:
            del self._storages[key]
        self.handles.pop(name, None)
        described: VarDesc = self.program.variables.pop(name)
        return described

    def tensor_of(self, name: str) -> torch.Tensor:
        """Return the fake tensor of a variable. Raises ProgramError if the recorder does not know it."""
        handle = self.handles.get(name)
        if handle is None:
            raise ProgramError(f"variable {name!r} was not recorded here and cannot be an operand", variable=name)
        return handle.fake  # type: ignore[no-any-return]  # Variable.fake

    def fake_of(self, name: str) -> torch.Tensor | None:
        """Return a fake tensor of a variable, which needs no handle; None if the recorder does not know it."""
        handle = self.handles.get(name)
        if handle is not None:
            return handle.fake  # type: ignore[no-any-return]  # Variable.fake
        return next((tensor for tensor, known in self._names.values() if known == name), None)

    def own(self, handle: Any) -> Any:
        """Return this Program's handle for one of a clone's or of the original. Raises ProgramError without one."""
        if handle._recording is self:
            self._refuse_ended(handle)
            return handle
        found = self.handles.get(handle.name) or self.declared.get(handle.name)
        if found is None:
            raise ProgramError(
                f"{user_line()}: {handle.name!r} is not in the program that is recorded now, a clone: it was recorded "
                "elsewhere, or left out for test. Record it before clone(), or under its own guard",
                variable=handle.name,
            )
        return found

    def _refuse_ended(self, handle: Any) -> None:
        if self.ended and id(handle.fake) in self.ended:
            raise ProgramError(
                f"{user_line()}: variable {handle.name!r} was made within a block of control flow, which has ended. "
                "Return it from the block, or write it to a variable from outside (layers.assign)",
                variable=handle.name,
            )

    def describe(self, tensor: torch.Tensor, name: str, **flags: Any) -> VarDesc:
        """Return a description of `tensor` under `name`."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return VarDesc(name, self.shape_of(tensor), dtype, source=user_line(), **flags)

    # -- what comes from outside -------------------------------------------------------------------

    def capture(self, tensor: torch.Tensor, name: str = "") -> torch.Tensor:
        """Return the fake stand-in of a real tensor: a parameter if it wants a gradient, else a constant.

        The value is cloned into the startup Program, so that the user's tensor is never written.
        """
        known = self._captured.get(id(tensor))
        if known is not None:
            return known[1]
        if tensor.device.type == "meta":
            raise ProgramError("a tensor on the meta device has no values; initialise it before recording")
        is_parameter = isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad
        if tensor.requires_grad and not tensor.is_leaf:
            raise ProgramError(
                "an operand is the result of eager operations with gradient; record these too, or detach it"
            )
        name = name or self._free_name("param" if is_parameter else "const")
        with disable_current_modes():  # else making the stand-in would be recorded, and the copy be a fake
            self.program.captured[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
            fake = empty_fake(tensor.shape, None, tensor.dtype)
        fake.requires_grad_(tensor.requires_grad)
        flags = {"persistable": True, "parameter": is_parameter, "trainable": tensor.requires_grad}
        var = self.bind(fake, self.describe(fake, name, **flags))
        self._captured[id(tensor)] = (tensor, fake)
        self._startup_captured(var)
        self.handle(fake)
        return fake

    def _free_name(self, prefix: str) -> str:
        """A name that another program with the same startup program has not, either: each has a value of its own."""
        startup = default_startup_program()
        while (name := self.program.unique(prefix)) in startup.variables:
            pass
        return name

    def _startup_captured(self, var: VarDesc) -> None:
        startup = default_startup_program()
        startup.add_variable(replace(var, source=var.source))
        startup.captured[var.name] = self.program.captured[var.name]
        name = startup.unique_operator("captured")
        startup.append(Operator(name, "penstock.captured", (var.name,), (var.name,), source=var.source))

    def rng(self) -> torch.Tensor:
        """Return the stand-in of the random state (see `RNG`)."""
        if RNG in self.handles:
            return self.tensor_of(RNG)
        fake = empty_fake([3], None, torch.int64)
        self.bind(fake, self.describe(fake, RNG))
        self.handle(fake)
        return fake

    def handle(self, tensor: torch.Tensor) -> Any:
        """Return the user's handle of a tensor's variable."""
        name = self.name_of(tensor)
        found = self.handles.get(name)
        if found is None:
            found = self.handles[name] = self.handle_type(self, name, tensor)
        return found

    # -- arguments -------------------------------------------------------------------------------

    def argument(self, value: Any) -> Any:
        """Return the plain-data form of an operand. Raises ProgramError for what a Program cannot hold."""
        if value is None or isinstance(value, (bool, int, float, str, SubBlock)):
            return value
        if isinstance(value, torch.Tensor):
            return Ref(self.name_of(value))
        if isinstance(value, torch.SymInt):
            return self.symbols.dim(value)
        if isinstance(value, (list, tuple)):
            return tuple(self.argument(v) for v in value)
        for cls, kind in _CONSTS.items():
            if isinstance(value, cls):
                return TorchConst(kind, str(value).removeprefix("torch."))  # type: ignore[arg-type]  # a literal of TorchConst.kind
        raise ProgramError(
            f"{user_line()}: an operand of type {type(value).__name__} ({value}) cannot be recorded; "
            "use numbers, strings, sizes, tensors and lists of them",
        )

    def module_path(self) -> str:
        """Return the dotted path of name scopes and modules that are open now."""
        return ".".join(p for p in (current_scope(), self.modules[-1] if self.modules else "") if p)

    def batch_of(self, shape: tuple[Dim, ...]) -> tuple[int, int]:
        """Return (dimension that the batch runs along, rows of it for one sample); (-1, 1) if none."""
        batch = batch_symbol(self.program)
        for position, dim in enumerate(shape):
            if isinstance(dim, Expr) and batch in dim.symbols():
                return position, max(1, dim.evaluate(dict.fromkeys(dim.symbols(), 1)))
        return -1, 1


def _divisors(size: Dim) -> Iterator[int]:
    if isinstance(size, Expr):
        if size.op in ("//", "%") and isinstance(size.args[1], int):
            yield size.args[1]
        for part in size.args:
            if isinstance(part, Expr):
                yield from _divisors(part)


_CONSTS: dict[type, str] = {
    torch.dtype: "dtype",
    torch.device: "device",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
}
