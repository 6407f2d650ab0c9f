"""Executor: a plain loop over a Program's operators, in order.

It is the recorder's oracle against torch eager, and the engine's to the bit; its matmuls run the kernels that an engine
takes for them, so that bits equal torch's with FLAGS_matrix_kernels=torch alone.

Temporaries live for one run; persistable variables live in the scope. Operators run under no-grad with
torch's own number of intra-op threads.
"""

from __future__ import annotations

import logging
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from penstock.compat.torch import schema_of
from penstock.distributed.collective import COLLECTIVE
from penstock.errors import FeedError, FetchError, ProgramError, SpecError, UserError
from penstock.exec import diagnostics
from penstock.exec.devices import kernel_on, moved, on_device
from penstock.exec.diagnostics import explained
from penstock.exec.fed_constants import ProgramCopies
from penstock.exec.fed_state import set_state, state_in
from penstock.exec.feeding import as_tensors, check_guards, resolved_seed, takes_from_reader
from penstock.exec.fetching import SelectedRowsValue, as_array, fetch_names
from penstock.exec.matmuls import Matmuls
from penstock.exec.one_exchange import with_one_exchange
from penstock.exec.parallel import CompiledProgram
from penstock.exec.pass_choice import matrix_settings
from penstock.exec.places import CPUPlace, Place, device_of
from penstock.exec.sequences import as_lod_tensors, element_of, elements_of, with_their_lengths
from penstock.lod_tensor import LoDTensor
from penstock.logger import warn_once
from penstock.program import legality
from penstock.program.eager import advice
from penstock.program.initializers import SEED
from penstock.program.ir import Operator
from penstock.program.kernels import CAPTURED, bind_symbols, check_writes, concrete, operator_error, resolve, shape_text
from penstock.program.memory_optimize import releases
from penstock.program.program import Program
from penstock.program.pruning import pruned_for
from penstock.program.record.context import default_main_program, program_runs
from penstock.program.record.recording import RNG
from penstock.program.record.variable import dtype_named
from penstock.ps import remote_ops as _remote_ops  # noqa: F401 - registers the operators that talk to servers
from penstock.ps.remote import LISTEN_AND_SERV
from penstock.scope import Scope, global_scope, tensor_of
from penstock.serving.remote_use import RemoteUse
from penstock.settings import LOCAL_TABLES

_log = logging.getLogger(__name__)
_Prepared = tuple[int, Operator, Any]
"""Number of an operator in its Program, the operator, and its kernel."""

Hook = Callable[[Operator, list[Any], Callable[[], Any]], Any]
"""Called for each operator with its operands and a function that runs it; returns the result."""


class Executor:
    """Runs Programs one operator at a time. `place`: CPUPlace() or CUDAPlace(i)."""

    def __init__(self, place: Place | None = None) -> None:
        self.place = place or CPUPlace()
        self._device = device_of(self.place)
        self._checked: dict[tuple[int, bool], tuple[Program, int, list[_Prepared], Matmuls | None]] = {}
        self._copies = ProgramCopies()
        self._collective: dict[tuple[int, int], tuple[Program, Scope, Any]] = {}
        self._remotes = RemoteUse()
        self._closed = False

    def run(
        self,
        program: Any = None,
        feed: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        fetch_list: Sequence[Any] | None = None,
        feed_var_name: str = "feed",
        fetch_var_name: str = "fetch",
        scope: Scope | None = None,
        return_numpy: bool = True,
        use_program_cache: bool = True,
        return_merged: bool = True,
        use_prune: bool = False,
    ) -> list[Any]:
        """Run a Program once and return what was fetched, in order; a scalar is fetched as shape [1].

        `feed`: inputs, persistable variables, and constants of `layers.fill_constant`, which it takes the place of.
        `use_prune`: run what the fetches need, without updates, unless the list has what `minimize` returned; feeds
        that this does not need are left out.

        Raises FeedError, FetchError, ProgramError, OperatorError. On failure parameters that operators before
        the failing one have updated keep their new values.
        """
        if self._closed:
            raise UserError("this Executor was closed; make another one")
        if hasattr(program, "_run_compiled"):
            if use_prune:
                raise SpecError(
                    "use_prune=True is for a plain Program; compile what Program.clone(for_test=True) gives"
                )
            self._remotes.note(program._program)
            return list(program._run_compiled(self, feed, fetch_list, scope, return_numpy, return_merged))
        if isinstance(feed, (list, tuple)):
            if len(feed) > 1:
                raise FeedError(f"a plain Program takes one feed dict; got a list of {len(feed)}")
            feed = feed[0] if feed else None
        given: Any = {} if feed is None else feed
        chosen = default_main_program() if program is None else program
        if not isinstance(chosen, Program):
            raise SpecError(
                f"Executor.run is given a {type(chosen).__name__} as its program; expected a fluid.Program or "
                f"fluid.CompiledProgram (None: the default main program){advice(chosen)}",
                got=chosen,
            )
        if use_prune:
            chosen, given, fetch_list = self._pruned(chosen, given, fetch_list)
        return self.run_program(self._copies.for_feed(chosen, given), given, fetch_list, scope, return_numpy)

    def _pruned(
        self, program: Program, feed: Mapping[str, Any], fetch_list: Sequence[Any] | None
    ) -> tuple[Program, Mapping[str, Any], Sequence[Any] | None]:
        """What a fetch list needs of a program and of its feed; all of it, if the list has what `minimize` returned."""
        listed = list(fetch_list) if isinstance(fetch_list, (list, tuple)) else [fetch_list]
        fetches = [one for one in listed if one is not None and not isinstance(one, tuple)]
        if len(fetches) < len(listed):
            return program, feed, fetches
        if program.reader is not None:
            raise SpecError("use_prune=True is for a program that is fed, not one that takes its batches from a reader")
        program_runs(program)
        names = tuple(fetch_names(program, fetches))
        cut = self._copies.copy(program, ("cut", *names), lambda: pruned_for(program, names))
        return cut, {n: v for n, v in feed.items() if n in cut.variables or n not in program.variables}, fetches

    def run_program(
        self,
        program: Program,
        feed: Mapping[str, Any],
        fetch_list: Sequence[Any] | None,
        scope: Scope | None = None,
        return_numpy: bool = True,
        hook: Hook | None = None,
    ) -> list[Any]:
        """`run` for a plain Program; `hook` sees every operator (see `exec.audit`)."""
        scope = scope or global_scope()
        program_runs(program)
        watched = hook is not None or diagnostics.checks_results()
        prepared, matmuls = self._prepare(program, fuses=not watched and program.memory_mark is None)
        if prepared and prepared[0][1].type == LISTEN_AND_SERV:
            from penstock.serving.server import serve_program  # loads a server, which other programs do without

            serve_program(program, scope)
            return []
        if prepared and prepared[0][1].type == COLLECTIVE:
            return list(self._compiled(program, scope)._run_compiled(self, feed, fetch_list, scope, return_numpy, True))
        self._remotes.note(program)
        if hook is None and diagnostics.checks_results():
            hook = diagnostics.hook_of(program)
        is_read = takes_from_reader(program, feed)
        if is_read:
            feed = program.reader.next_feed(feed)
        states, feed = state_in(program, feed, scope)
        fed = as_tensors(program, feed)
        tensors = {n: t.to(self._device) for n, t in fed.items()}
        bindings = bind_symbols(program, tensors)
        check_guards(program.guards, bindings)
        wanted = fetch_names(program, fetch_list)
        if states:
            set_state(scope, states[0])
        names = wanted if return_numpy else with_their_lengths(program, wanted)
        seed, step = resolved_seed(program), scope.next_step(program)
        values: dict[str, Any] = {**tensors, RNG: torch.tensor([seed, step, 0], dtype=torch.int64)}
        bindings[SEED] = seed
        chosen = {} if matmuls is None else matmuls.chosen(bindings)
        over = releases(program, names)
        with torch.no_grad():
            for index, op, kernel in prepared:
                self._run_operator(program, op, chosen.get(index, kernel), values, bindings, scope, hook)
                for name in over[index]:
                    values.pop(name, None)
        if any(program.variables[program.variables[w].storage].persistable for _, op, _ in prepared for w in op.writes):
            scope.written_by(self)
        if is_read:
            program.reader.used()
        found = [_fetched(program, name, values, scope, return_numpy, self._device) for name in names]
        return found if return_numpy else as_lod_tensors(program, wanted, found)

    def _compiled(self, program: Program, scope: Scope) -> Any:
        """The graph of a program that several processes train (mode "collective"), which runs it with them."""
        key = (id(program), id(scope))
        if key not in self._collective:
            self._collective[key] = (program, scope, CompiledProgram(program))
        return self._collective[key][2]

    def _prepare(self, program: Program, *, fuses: bool) -> tuple[list[_Prepared], Matmuls | None]:
        """Return what runs. `fuses`: the exchange with servers may be one push and one pull."""
        known = self._checked.get((id(program), fuses))
        if known is not None and known[0] is program and known[1] == program.revision:
            return known[2:]
        legality.check(program, tables_are_whole=LOCAL_TABLES.read())
        check_writes(program)
        operators = with_one_exchange(program) if fuses else list(enumerate(program.global_block().operators))
        prepared = [
            (number, op, None if op.type == CAPTURED else kernel_on(resolve(op), self._device))
            for number, op in operators
        ]
        matmuls = None
        if self._device.type == "cpu":
            matmuls = Matmuls(program, matrix_settings(at_once=1, intra_op=torch.get_num_threads()))
        self._checked[id(program), fuses] = (program, program.revision, prepared, matmuls)
        return prepared, matmuls

    def _run_operator(
        self,
        program: Program,
        op: Operator,
        kernel: Any,
        values: dict[str, Any],
        bindings: Mapping[str, int],
        scope: Scope,
        hook: Hook | None,
    ) -> None:
        if op.type == CAPTURED:
            key = str(op.args[0])
            if key not in program.captured:
                raise ProgramError(
                    f"the value of {key!r} was taken from a tensor or module when the program was recorded, and a "
                    "program's text does not hold it. Load it with fluid.io.load_persistables instead",
                    variable=key,
                )
            made = program.captured[key].to(self._device, copy=True)
            _store(program, op.output_names()[0], made, values, scope)
            return

        def lookup(name: str) -> Any:
            return _value(program, name, values, scope, self._device)

        args = [concrete(a, bindings, lookup) for a in op.args]
        kwargs = {k: concrete(v, bindings, lookup) for k, v in op.kwargs}
        if self._device.type != "cpu":
            on_device(schema_of(kernel), args, kwargs, self._device)

        def call() -> Any:
            try:
                return kernel(*args, **kwargs)
            except SpecError:  # a setting of this process, such as a network interface; not the operator's operands
                raise
            except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
                shapes = {n: shape_text(lookup(n)) for n in op.input_names()}
                raise operator_error(op, explained(op, str(error), lookup), shapes) from error

        result = call() if hook is None else hook(op, [*args, *kwargs.values()], call)
        for name, value in zip(op.outputs, result if isinstance(result, tuple) else (result,), strict=False):
            _store(program, name, moved(value, self._device), values, scope)

    def train_from_dataset(
        self,
        program: Any = None,
        dataset: Any = None,
        scope: Scope | None = None,
        thread: int = 0,
        debug: bool = False,
        fetch_list: Sequence[Any] | None = None,
        fetch_info: Sequence[str] | None = None,
        print_period: int = 100,
        fetch_handler: Any = None,
        checkpoints: Any = None,
    ) -> None:
        """Train on each batch of a data set once. `thread`: Hogwild threads, 0 for those of `dataset.set_thread`.

        `fetch_list` is printed every `print_period` batches of the first thread, with the texts of `fetch_info`.
        `debug`: print where the time goes. `fetch_handler`: a fluid.FetchHandler. See `exec.dataset_pass`.
        `checkpoints`: a fluid.io.CheckpointManager, which counts the batches and saves with the data set's position.
        """
        shown = (debug, fetch_list or (), fetch_info, print_period, fetch_handler, checkpoints)
        self._from_dataset(program, dataset, scope, thread, shown, trains=True)

    def infer_from_dataset(
        self,
        program: Any = None,
        dataset: Any = None,
        scope: Scope | None = None,
        thread: int = 0,
        debug: bool = False,
        fetch_list: Sequence[Any] | None = None,
        fetch_info: Sequence[str] | None = None,
        print_period: int = 100,
        fetch_handler: Any = None,
    ) -> None:
        """Run each batch of a data set once without updates: a training program runs as its clone for tests."""
        shown = (debug, fetch_list or (), fetch_info, print_period, fetch_handler)
        self._from_dataset(program, dataset, scope, thread, shown, trains=False)

    def _from_dataset(
        self, program: Any, dataset: Any, scope: Scope | None, thread: int, shown: tuple[Any, ...], *, trains: bool
    ) -> None:
        if self._closed:
            raise UserError("this Executor was closed; make another one")
        from penstock.exec.dataset_pass import Wanted, run_from_dataset  # data sets, and the client of servers

        run_from_dataset(self, program, dataset, scope, thread, Wanted(*shown), trains=trains)

    def close(self) -> None:
        """End the use of this Executor. A trainer leaves the parameter servers of the programs that it ran."""
        self._closed = True
        self._checked.clear()
        self._remotes.close()


def _value(program: Program, name: str, values: Mapping[str, Any], scope: Scope, device: torch.device) -> Any:
    if name in values:
        return values[name]
    return tensor_of(scope, program, name, device)


def _store(program: Program, name: Any, value: Any, values: dict[str, Any], scope: Scope) -> None:
    if name is None:
        return
    if isinstance(name, tuple):
        for n, v in zip(name, value, strict=True):
            _store(program, n, v, values, scope)
    elif program.variables[name].persistable:
        scope.set(name, value)
        other = scope.initialised_by(program, name)
        if other is not None:
            advice = "If they are two models, give each its own fluid.Scope() or name their parameters"
            text = f"variable {name!r} of another program is made anew in the same scope. {advice}"
            warn_once(_log, text, other, about="same scope")
    else:
        values[name] = value


def _fetched(
    program: Program, name: str, values: Mapping[str, Any], scope: Scope, return_numpy: bool, device: torch.device
) -> Any:
    var = program.variables[name]
    if var.kind == "selected_rows":
        parts = [_fetched(program, n, values, scope, return_numpy, device) for n in (var.rows, var.values)]
        return SelectedRowsValue(parts[0], parts[1], int(str(var.shape[0])))
    if name not in values and not var.persistable:
        raise FetchError(
            f"fetch {name!r}: no operator of this run made it (is it a feed that was not fed?)", variable=name
        )
    if var.kind == "array":
        elements = elements_of(_value(program, name, values, scope, device))
        return [as_array(one) for one in elements] if return_numpy else elements
    tensor = element_of(var, _value(program, name, values, scope, device).cpu())
    tensor = tensor.detach().clone().reshape(1) if tensor.dim() == 0 else tensor.detach().clone()
    return as_array(tensor) if return_numpy else tensor


def _as_lodtensor(data: Any, place: Any, dtype: Any = None) -> LoDTensor:
    """Return an array as a LoDTensor (Fluid's name); of anything else, such as a tuple, the numbers as `dtype`.

    One number becomes [1]. Raises SpecError for a list, which has no sizes of its own, for a number without a dtype,
    and for what holds no numbers.
    """
    if isinstance(data, list):
        raise SpecError(
            "_as_lodtensor is given a list: make it an array, or use fluid.create_lod_tensor for sequences", got=data
        )
    tensor = LoDTensor()
    tensor.set(data if isinstance(data, np.ndarray) else _of_dtype(data, dtype), place)
    return tensor


def _of_dtype(data: Any, dtype: Any) -> Any:
    try:
        rows = data.detach() if isinstance(data, torch.Tensor) else np.array(data)
    except ValueError as error:
        raise SpecError(f"_as_lodtensor is given {data!r}, no array of numbers: {error}", got=data) from error
    if isinstance(rows, np.ndarray) and rows.dtype.kind not in "biufc":
        raise SpecError(f"_as_lodtensor is given {data!r}, a {type(data).__name__}; expected numbers", got=data)
    if isinstance(data, (numbers.Number, np.generic)):
        if dtype is None:
            raise SpecError("_as_lodtensor is given a number without a dtype: name one, such as 'float32'", got=data)
        rows = rows.reshape(1)
    return rows if dtype is None else torch.as_tensor(rows).to(dtype_named(dtype))


def as_numpy(fetched: Any) -> Any:
    """Return what was fetched, or found in a scope, as an array; of a list, a list of arrays."""
    if isinstance(fetched, (list, tuple)):
        return [as_numpy(one) for one in fetched]
    return np.asarray(fetched)


def _fetch_var(name: str, scope: Scope | None = None, return_numpy: bool = True) -> Any:
    """Return a variable of a scope: a copy as an array, or the tensor. Raises ProgramError for one without a value."""
    found = (scope or global_scope()).find(str(name))
    if found is None:
        raise ProgramError(f"_fetch_var: {name!r} has no value in the scope; run the startup program first")
    return found.detach().cpu().numpy().copy() if return_numpy else found
