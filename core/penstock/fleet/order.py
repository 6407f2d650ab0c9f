"""The order of fleet's calls: init, distributed_optimizer, minimize, then what the process's role does. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import SpecError
from penstock.fleet.position import Role

LIFE = (
    "fleet.init(role); fleet.distributed_optimizer(optimizer, strategy).minimize(loss); then, if fleet.is_server(): "
    "fleet.init_server(); fleet.run_server(); else: fleet.init_worker(); exe.run(fleet.startup_program); "
    "exe.run(fleet.main_program, …); fleet.stop_worker()"
)


class OrderError(SpecError):
    """A call of fleet's that comes too early, twice, or in the wrong role."""

    code = "order_error"


@dataclass(frozen=True, slots=True)
class CallRule:
    """When a call may be made: after `needs`, before each of `until`, by `role` (None: either), once or repeatedly."""

    needs: str = ""
    role: Role | None = None
    once: bool = False
    until: tuple[str, ...] = ()


RULES: Mapping[str, CallRule] = {
    "init": CallRule(),
    "distributed_optimizer": CallRule("init"),
    "minimize": CallRule("distributed_optimizer", until=("init_server", "init_worker")),
    "main_program": CallRule("minimize"),
    "startup_program": CallRule("minimize"),
    "init_server": CallRule("minimize", Role.SERVER, once=True),
    "run_server": CallRule("init_server", Role.SERVER, once=True),
    "init_worker": CallRule("minimize", Role.WORKER, once=True),
    "stop_worker": CallRule("init_worker", Role.WORKER, once=True),
    "barrier_worker": CallRule("init_worker", Role.WORKER),
    "all_reduce_worker": CallRule("init_worker", Role.WORKER),
    "save_persistables": CallRule("init_worker", Role.WORKER),
    "save_inference_model": CallRule("init_worker", Role.WORKER),
}


class Calls:
    """The calls that were made so far."""

    def __init__(self) -> None:
        self._made: set[str] = set()

    def check(self, call: str, role: Role | None) -> None:
        """Raise OrderError unless `call` may be made now by a process of `role`."""
        rule = RULES[call]
        if call == "init" and "init_worker" in self._made and "stop_worker" not in self._made:
            raise OrderError("fleet.init() is called while this worker runs; call fleet.stop_worker() first")
        if rule.needs and rule.needs not in self._made:
            raise OrderError(f"fleet: {call} comes before {rule.needs}. The order is: {LIFE}")
        if rule.role is not None and role != rule.role:
            mine = "server" if role == Role.SERVER else "worker"
            raise OrderError(
                f"fleet.{call}() is for {rule.role.name.lower()}s, but the role maker says that this process is a "
                f"{mine}. The order is: {LIFE}"
            )
        begun = next((other for other in rule.until if other in self._made), None)
        if begun is not None:
            raise OrderError(
                f"fleet: {call} comes after {begun}, which has begun with the program before; call fleet.init(role) to "
                "begin with another one"
            )
        if rule.once and call in self._made:
            raise OrderError(f"fleet: {call} is called twice; call fleet.init(role) to begin with another program")

    def note(self, call: str) -> None:
        """Count a call as made: it was, and it has not failed."""
        if call == "init":
            self._made.clear()
        self._made.add(call)
