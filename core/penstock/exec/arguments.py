"""What ParallelExecutor and CompiledProgram are given, checked for the mistakes of a first script. Pure."""

from __future__ import annotations

from penstock.errors import SpecError
from penstock.exec.strategies import BuildStrategy, ExecutionStrategy
from penstock.program.eager import advice
from penstock.program.program import Program
from penstock.program.record.variable import Variable
from penstock.program.strict_fields import say_once
from penstock.ps.remote import REMOTE_TYPES


def check_arguments(program: object, loss_name: object, build: object, execution: object) -> None:
    """Raise SpecError for an argument of the wrong kind, or a field that the program is not for.

    It names what to pass instead.
    """
    if not isinstance(program, Program):
        raise SpecError(
            f"the program is a {type(program).__name__}; expected a fluid.Program, e.g. fluid.default_main_program()"
            f"{advice(program)}",
            got=program,
        )
    if isinstance(loss_name, Variable):
        raise SpecError(
            f"loss_name is the variable {loss_name.name!r} itself; pass its name: loss_name=loss.name", got=loss_name
        )
    if loss_name is not None and not isinstance(loss_name, str):
        raise SpecError(f"loss_name is {loss_name!r}; expected the name of the loss, loss.name", got=loss_name)
    for name, given, kind in (
        ("build_strategy", build, BuildStrategy),
        ("exec_strategy", execution, ExecutionStrategy),
    ):
        if not isinstance(given, kind):
            raise SpecError(f"{name} is a {type(given).__name__}; expected a fluid.{kind.__name__}", got=given)
    if isinstance(build, BuildStrategy) and isinstance(execution, ExecutionStrategy):
        _check_fields_of_trainers(program, build, execution)


def _check_fields_of_trainers(program: Program, build: BuildStrategy, execution: ExecutionStrategy) -> None:
    """Hold what fleet's strategies set to programs that talk to parameter servers.

    There both fields hold by themselves: replicas of one trainer go in step and push their mean once, and trainers
    wait for each other only as the program's own operators say.
    """
    if any(op.type in REMOTE_TYPES for op in program.operators):
        return
    if build.async_mode:
        raise SpecError(
            "BuildStrategy.async_mode is True, but the program talks to no parameter servers: replicas that do not "
            "wait for each other train something else, so it is refused instead of ignored. Leave it False; gradients "
            "are exchanged in every step"
        )
    if execution.use_thread_barrier:
        say_once(
            "ExecutionStrategy.use_thread_barrier = True has no effect: this program talks to no parameter servers"
        )
