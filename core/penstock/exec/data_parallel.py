"""Run a Program as a graph on several replicas in the native engine: the heart of ParallelExecutor.

One `run`: feeds are checked and split, the plan for these sizes is found or lowered, persistables are
bound, the engine runs the step without the interpreter lock, fetches are merged. The engine's first
error becomes an OperatorError that names the operator, its operands' shapes and the user's line.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from penstock import telemetry
from penstock.errors import FetchError, PenstockError, Unavailable
from penstock.exec import devices, diagnostics
from penstock.exec.devices import DeviceTrace, on_default_streams, on_gpus
from penstock.exec.diagnostics import blamed, explained, operand_of
from penstock.exec.fed import Feeds
from penstock.exec.feeding import check_guards, merge, resolved_seed, takes_from_reader
from penstock.exec.fetching import SelectedRowsValue, as_array, fetch_names
from penstock.exec.lowering import Lowered, bind, lower, resize, set_random_states, static_shapes
from penstock.exec.matrix_rate import matrix_gflops
from penstock.exec.memory import ReplicaMemory
from penstock.exec.pass_choice import settled
from penstock.exec.places import num_cores
from penstock.exec.sequences import as_lod_tensors, element_of, elements_of, with_their_lengths
from penstock.exec.shown_graphs import ShownGraphs, write_drawings
from penstock.exec.step_graphs import StepGraphs
from penstock.exec.temporaries import ReleasePolicy, Statistics, Temporaries, statistics
from penstock.exec.trainers import SharedSteps, Trainers, signature
from penstock.graph.across import STEP
from penstock.graph.operands import Shares
from penstock.graph.passes import PassChoice, run_graph_passes, run_sized_passes
from penstock.graph.passes.without_rows import without_rows
from penstock.graph.ssa import Graph, Mode
from penstock.lod_tensor import LoDTensor
from penstock.machine.capability import capability
from penstock.native.engine import Engine, EngineError, EngineStateError
from penstock.program import legality
from penstock.program.initializers import SEED
from penstock.program.ir import Guard
from penstock.program.kernels import check_writes, operator_error
from penstock.program.program import Program
from penstock.program.sequences import row_symbols
from penstock.settings import LOCAL_TABLES

if TYPE_CHECKING:
    from penstock.protocol.graphdoc import Threads

_MAX_PLANS = 32


class DataParallel:
    """`program` on `num_replicas` replicas. `num_threads`: pool size, 0 for four a replica. `cores`: 0 for all.

    `step_graphs`: steps on one GPU may be captured as CUDA graphs.

    Not thread-safe: one run at a time. Plans are kept for the 32 most recent combinations of sizes.
    """

    def __init__(
        self,
        program: Program,
        memory: ReplicaMemory,
        *,
        mode: Mode,
        num_replicas: int,
        num_threads: int = 0,
        loss_name: str | None = None,
        scale_loss: bool = True,
        choice: PassChoice = PassChoice(),  # noqa: B008 - frozen
        retention: ReleasePolicy = ReleasePolicy(),  # noqa: B008 - frozen
        name: str = "program",
        cores: int = 0,
        trainers: Trainers | None = None,
        step_graphs: bool = True,
    ) -> None:
        self.program, self.memory, self.mode, self.num_replicas = program, memory, mode, num_replicas
        self._across = None if trainers is None else trainers.across(mean=scale_loss)
        self._together = None if trainers is None else SharedSteps(trainers, program, self._run_without_rows)
        self.loss_name, self.scale_loss, self.name = loss_name, scale_loss, name
        cores = cores or (num_cores() if trainers is None else trainers.group.cores)
        self.num_threads = num_threads or 4 * num_replicas
        at_once = num_replicas if num_threads == 0 else max(num_threads, 1)
        self.max_running = max(1, min(at_once, self.num_threads, cores))
        self.intra_op_threads = max(1, cores // self.max_running)
        self.choice = settled(
            choice, devices=memory.devices, at_once=self.max_running, intra_op=self.intra_op_threads,
            rings=() if self._across is None else self._across.rings,
        )  # fmt: skip
        self.has_trainers = trainers is not None
        self.engine = Engine(self.num_threads, max_running=self.max_running, intra_op_threads=self.intra_op_threads)
        self._graphs: dict[int, Graph] = {}
        self._plans: OrderedDict[tuple[Any, ...], Lowered] = OrderedDict()
        shared = self._across is not None and self._across.kind == "ring" and capability("memfd").present
        self.temporaries = Temporaries(program, self.choice, retention, shared=shared)
        self._times = DeviceTrace(self.engine) if on_gpus(memory.devices) else None
        self._watch = telemetry.session().watch(self._times or self.engine, name=name, threads=self._threads)
        self._shown = ShownGraphs(self._watch, name=name, num_threads=self.num_threads)
        captures = step_graphs and on_gpus(memory.devices) and num_replicas == 1 and trainers is None
        self._trace = self._times if self._watch.is_watched else None
        self._step_graphs = StepGraphs(memory.devices[0], name, self._trace) if captures else None
        if self._trace is not None:
            atexit.register(_report_last, weakref.ref(self))  # before the session's own, which was registered earlier
        self.last_step = -1
        self._revision = -1
        self._idle: Lowered | None = None
        self._writes = self._drawn = False
        self._follow_program()

    def _threads(self) -> Threads | None:
        """What runs the graphs; None on GPUs. Measures once in a process."""
        if on_gpus(self.memory.devices):
            return None
        from penstock.protocol.graphdoc import Threads  # of a watched process: it loads pydantic

        return Threads(self.engine.num_workers, self.intra_op_threads, matrix_gflops())

    # -- one step --------------------------------------------------------------------------------

    def run(
        self,
        feed: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        fetch_list: Sequence[Any] | None,
        *,
        schedule_seed: int = 0,
    ) -> list[list[torch.Tensor]]:
        """Run one step; return, for each fetch, the tensor of each active replica (not copied)."""
        start = time.time_ns()
        self._follow_program()
        if self._together is not None:
            self._together.begin(self.memory.scope)
        fed = self._feeds.read(feed)
        names = self._expand(fetch_names(self.program, fetch_list))
        rows = fed.rows
        lowered = self._plan(fed.bindings, rows, tuple(names))
        bind(lowered, self.program, self.memory)
        fed.put(lowered, self.memory)
        step = self.last_step = self.memory.scope.next_step(self.program)
        first = 0 if self._together is None else self._together.announce(lowered, rows)
        if lowered.random_states:
            set_random_states(lowered, resolved_seed(self.program), step, rows, first)
        self._shown.show(lowered, self.program, rows, step)
        with on_default_streams(self.memory.devices):
            if lowered.card_feeds is not None:
                lowered.card_feeds.send(lowered.plan)
            self._execute(lowered, step, schedule_seed)
            if self._together is not None:
                self._together.done(lowered)
            fetched = [self._fetch(lowered, name, slots) for name, slots in lowered.fetches]
        for slot in lowered.passing:  # Python owns these now: the next step need not ask for its lock to replace them
            lowered.plan.clear(slot)
        self.temporaries.after(lowered, self._plans.values(), fetches=bool(names))
        report = partial(
            self._watch.step, step=step, start_ns=start, end_ns=time.time_ns(), samples=sum(rows),
            loss=self._loss(names, fetched, rows),
        )  # fmt: skip
        if self._trace is None:
            report()
        else:
            self._harvest(waits=False)
            self._trace.report(step, report)
        return fetched

    def _follow_program(self) -> None:
        """Check the Program, and forget what was derived from it, when it has changed since the last time."""
        if self._revision == self.program.revision:
            return
        legality.check(self.program, tables_are_whole=LOCAL_TABLES.read())
        check_writes(self.program)
        self._revision = self.program.revision
        variables = self.program.variables
        self._writes = any(
            variables[variables[w].storage].persistable for op in self.program.operators for w in op.writes
        )
        self._feeds = Feeds(
            self.program, self.num_replicas, fed_loss_gradient=self.choice.fed_loss_gradient, scope=self.memory.scope
        )
        self._row_symbols = frozenset(row_symbols(self.program))
        self._row_guards = [g for g in self.program.guards if g.symbols() & self._row_symbols]
        self._graphs.clear()
        self._harvest(waits=True)
        self._plans.clear()
        self._idle = None
        self._shown.forget()

    def _expand(self, names: list[str]) -> list[str]:
        """A sparse gradient is fetched as its two parts."""
        out: list[str] = []
        for name in names:
            var = self.program.variables[name]
            out += [var.rows, var.values] if var.kind == "selected_rows" else [name]
        return out

    def begin_together(self) -> None:
        """Begin with the other trainers, if there are some: a pass may have no batch here. All of them call it."""
        if self._together is not None:
            self._follow_program()
            self._together.begin(self.memory.scope)
            self._together.offer(signature(self.graph(1), self.program))

    def end_together(self) -> None:
        """Take part in the other trainers' steps until the data of all has ended. All of them call it."""
        if self._together is not None:
            self._together.join()

    def _run_without_rows(self, announced: torch.Tensor) -> None:
        """Take part in a step of the other trainers when the data here has ended; `announced`: the ranks' rows."""
        if self._idle is None:
            graph = without_rows(
                self.graph(1), self.program, updates=self._across is None or not self._across.parameters
            )
            self._idle = lower(self.program, graph, self.shares([{}], [0]), (), self.memory)
        lowered = self._idle
        bind(lowered, self.program, self.memory)
        lowered.plan.set(lowered.slots[STEP], announced)
        self.last_step = self.memory.scope.next_step(self.program)
        self._execute(lowered, self.last_step, 0)

    def _execute(self, lowered: Lowered, step: int, schedule_seed: int) -> None:
        try:
            self._try_execute(lowered, step, schedule_seed)
        except PenstockError as error:
            lost = None if self._together is None else self._together.failed(error)
            if lost is None:
                raise
            raise lost from error

    def _try_execute(self, lowered: Lowered, step: int, schedule_seed: int) -> None:
        try:
            if diagnostics.checks_results():
                diagnostics.run_checked(lowered, self.program)
            else:
                self._launch(lowered, step, schedule_seed)
        except EngineStateError as error:
            raise Unavailable(f"the step cannot run: {error}. Make another ParallelExecutor") from error
        except EngineError as error:
            if error.op_index < 0:  # no operator's fault
                raise Unavailable(f"the step was not finished: {error.message}") from error
            handle = lowered.graph.handles[error.op_index]
            op, message = blamed(handle, error.message)
            shapes = static_shapes(self.program, op, lowered.graph, lowered.now.bindings[handle.rows_of])
            message = explained(op, message, lambda key: operand_of(lowered, handle, key))
            raise operator_error(op, message, shapes, max(handle.replica, 0)) from error
        if self._writes:
            self.memory.written()
        for name, slot in lowered.made_persistables:
            value = lowered.plan.get(slot)
            if value is not None:
                self.memory.scope.set(name, value)

    def _launch(self, lowered: Lowered, step: int, schedule_seed: int) -> None:
        if lowered.streams is None:
            self.temporaries.before(lowered)
            self.engine.run(lowered.plan, step, schedule_seed=schedule_seed)
            return
        self._harvest(waits=False)
        if self._step_graphs is not None and self._step_graphs.run(lowered, step):
            return
        lowered.streams.run(step, lambda: self.engine.run(lowered.plan, step, schedule_seed=schedule_seed))

    def _harvest(self, *, waits: bool) -> None:
        """Have telemetry get the times of the steps that have ended on the devices, or of all."""
        for plan in self._plans.values() if self._trace is not None else ():
            for streams in (plan.streams, *(plan.step_graph.streams if plan.step_graph is not None else ())):
                if streams is not None:
                    streams.harvest(waits=waits)

    def _fetch(self, lowered: Lowered, name: str, slots: list[int]) -> list[torch.Tensor]:
        values = [lowered.plan.get(slot) for slot in slots]
        if not values or any(v is None for v in values):
            raise FetchError(
                f"fetch {name!r}: no operator of the graph makes it in this run. A ParallelExecutor fetches what its "
                "operators make, its inputs, and its parameters",
                variable=name,
            )
        return devices.fetched(values, self.memory.devices)  # type: ignore[arg-type]  # None was refused

    def _loss(self, names: list[str], fetched: list[list[torch.Tensor]], rows: list[int]) -> float | None:
        if self.loss_name is None or self.loss_name not in names:
            return None
        parts = fetched[names.index(self.loss_name)]
        if any(p.numel() != 1 for p in parts):
            return None
        return sum(float(p) * r for p, r in zip(parts, rows, strict=True)) / max(sum(rows), 1)

    # -- plans -----------------------------------------------------------------------------------

    def graph(self, active: int) -> Graph:
        """Return the graph for `active` replicas with rows."""
        if active not in self._graphs:
            built = devices.build_for(
                self.memory.devices, self.program, mode=self.mode, num_replicas=self.num_replicas, active=active,
                across=self._across,
            )  # fmt: skip
            self._graphs[active] = run_graph_passes(built, self.program, self.choice, recorded=self._watch.is_watched)
        return self._graphs[active]

    def sized_graph(self, shares: Shares, fetches: Sequence[str] = ()) -> Graph:
        """Return the graph that a step of these sizes runs: the one for its replicas after the passes on sizes."""
        graph = self.graph(len(shares.bindings))
        return run_sized_passes(
            graph, self.program, self.choice, shares, fetches, recorded=self._watch.is_watched
        )  # fmt: skip

    def shares(self, bindings: list[dict[str, int]], rows: list[int]) -> Shares:
        """Return what differs between replicas: sizes, and the gradient of the loss (rows / all rows)."""
        total = max(sum(rows), 1)
        scales = [r / total if self.scale_loss else 1.0 for r in rows]
        seed = resolved_seed(self.program)
        return Shares([{**b, SEED: seed} for b in bindings], scales)

    def _plan(self, bindings: list[dict[str, int]], rows: list[int], fetches: tuple[str, ...]) -> Lowered:
        """Return the plan for these sizes; one of other rows of ragged inputs is set for them."""
        varies = self._row_symbols
        fixed = tuple(tuple(sorted((s, n) for s, n in b.items() if s not in varies)) for b in bindings)
        key = (fixed, tuple(rows), fetches)
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = self._lowered(bindings, rows, fetches)
            if len(self._plans) > _MAX_PLANS:
                self._harvest(waits=True)
                self._plans.popitem(last=False)
            return found
        self._plans.move_to_end(key)
        if varies:
            self._check_guards(self._row_guards, bindings)
            resize(found, self.shares(bindings, rows))
        return found

    def _lowered(self, bindings: list[dict[str, int]], rows: list[int], fetches: tuple[str, ...]) -> Lowered:
        self._check_guards(self.program.guards, bindings)
        shares = self.shares(bindings, rows)
        graph = self.sized_graph(shares, fetches)
        lowered = lower(self.program, graph, shares, fetches, self.memory, self.temporaries.stays(graph), self._trace)
        if self.choice.graphviz_path and not self._drawn:
            write_drawings(self.program, graph, self.choice, shares)
            self._drawn = True
        return lowered

    @staticmethod
    def _check_guards(guards: Sequence[Guard], bindings: Sequence[Mapping[str, int]]) -> None:
        for own in bindings:
            check_guards(guards, own)

    def statistics(self) -> Statistics:
        """Return what this executor's steps, plans and tensors amount to now."""
        return statistics(self.temporaries, list(self._plans.values()))

    @property
    def newest_graph(self) -> Graph | None:
        """The graph of the plan that was used last, to whose handles the engine's trace refers."""
        return next(reversed(self._plans.values())).graph if self._plans else None

    @property
    def is_watched(self) -> bool:
        """Whether telemetry drains the trace, so that nothing else may."""
        return self._watch.is_watched

    @property
    def has_plans(self) -> bool:
        """Whether a plan is kept."""
        return bool(self._plans)

    def drop_plans(self) -> None:
        """Release the plans and what their slots hold."""
        self._harvest(waits=True)
        self._plans.clear()
        self.temporaries.drop()

    def close(self) -> None:
        """Stop the threads and release the plans."""
        with ExitStack() as stack:  # all of it, also if the cards have failed
            stack.callback(self.engine.close)
            if self._step_graphs is not None:
                stack.callback(self._step_graphs.close)
            stack.callback(self.drop_plans)
            stack.callback(self._watch.close)
            self._harvest(waits=True)


def _report_last(executor: weakref.ref[DataParallel]) -> None:
    """Report the last steps of a script that ends without closing its executor."""
    core = executor()
    if core is not None:
        core._harvest(waits=True)


def run_fed(
    core: DataParallel,
    feed: Any,
    fetch_list: Sequence[Any] | None,
    num_iterations: int,
    *,
    return_numpy: bool,
    merged: bool,
) -> list[Any]:
    """Run, and return what a user gets: arrays, or LoDTensors, of ragged variables with their lengths if merged."""
    if return_numpy or not merged:
        return results(core.program, fetch_list, _fetched(core, feed, fetch_list, num_iterations), return_numpy, merged)
    names = fetch_names(core.program, fetch_list)
    wanted = with_their_lengths(core.program, names)
    found = results(core.program, wanted, _fetched(core, feed, wanted, num_iterations), False, True)
    return as_lod_tensors(core.program, names, found)


def _fetched(
    core: DataParallel, feed: Any, fetch_list: Sequence[Any] | None, num_iterations: int
) -> list[list[torch.Tensor]]:
    """Run one iteration on what is fed; with a reader, `num_iterations` on its batches, and fetch from the last.

    Raises EOFException, also after some of the iterations: those have updated, and their fetches are lost.
    """
    if not takes_from_reader(core.program, feed):
        return core.run(feed, fetch_list)
    reader = core.program.reader
    fetched = []
    for left in reversed(range(num_iterations)):
        fetched = core.run(reader.next_feeds(feed, core.num_replicas), [] if left else fetch_list)
        reader.used()
    return fetched


def results(
    program: Program,
    fetch_list: Sequence[Any] | None,
    fetched: list[list[torch.Tensor]],
    return_numpy: bool,
    merged: bool,
) -> list[Any]:
    """Return what a user gets: merged along dimension 0, or a list with one entry for each active replica."""
    parts = iter(fetched)
    out: list[Any] = []
    for name in fetch_names(program, fetch_list):
        var = program.variables[name]
        if var.kind == "selected_rows":
            rows, values = (_value(name, next(parts), return_numpy, True) for _ in range(2))
            out.append(SelectedRowsValue(rows, values, int(str(var.shape[0]))))
        elif var.kind == "array":
            out.append(_array(name, [elements_of(part) for part in next(parts)], return_numpy, merged))
        else:
            out.append(_value(name, [element_of(var, part) for part in next(parts)], return_numpy, merged))
    return out


def _array(name: str, parts: list[list[torch.Tensor]], return_numpy: bool, merged: bool) -> list[Any]:
    """A list of the elements of an array: each merged over the replicas, or one list for each replica."""
    if not merged:
        return [[as_array(one) if return_numpy else LoDTensor(one) for one in part] for part in parts]
    if len({len(part) for part in parts}) > 1:
        raise FetchError(
            f"fetch {name!r}: the arrays of the replicas have {[len(part) for part in parts]} elements and cannot be "
            "merged; use Executor.run(…, return_merged=False) to get each",
            variable=name,
        )
    return [_value(name, list(column), return_numpy, True) for column in zip(*parts, strict=True)]


def _value(name: str, parts: list[torch.Tensor], return_numpy: bool, merged: bool) -> Any:
    if merged:
        sizes = {tuple(p.shape[1:]) for p in parts}
        if len(sizes) > 1:
            raise FetchError(
                f"fetch {name!r}: replicas made shapes {[list(p.shape) for p in parts]}, which cannot be merged along "
                "dimension 0; use Executor.run(…, return_merged=False) to get each",
                variable=name,
            )
        tensor = merge(parts)
        return as_array(tensor) if return_numpy else tensor
    copies = [p.reshape(1).clone() if p.dim() == 0 else p.clone() for p in parts]
    return [as_array(c) if return_numpy else LoDTensor(c) for c in copies]
