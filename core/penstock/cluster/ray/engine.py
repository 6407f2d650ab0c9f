"""The provisioner of Ray: a gang's handle is the name of its actor, `GANG.ID`.

Runs on a node of the cluster, with the cluster's versions of Ray and Python, as each of Ray's drivers has to. Actors
are in a namespace of the cluster's name. What reaches the pilots, join token included, can be read by all who can use
that Ray, which knows no users.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import signal
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from penstock.cluster.provisioner import EngineAway, Pilot, Request
from penstock.cluster.ray import states
from penstock.errors import SpecError
from penstock.settings import JOIN_TOKEN

ANSWER_S = 10.0
"""How long the actor of a gang may take to answer; it may be on its way to another node."""
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True, slots=True)
class Options:
    """`address`: of Ray, as `ray.init` takes it. `python`: on the nodes, '' for the interpreter of Ray's workers.

    `pilot_dir`: on the nodes, for the pilots' own folders; variables are expanded there; '' for the temporary folder.
    """

    address: str = "auto"
    namespace: str = "penstock-ray"
    strategy: str = "PACK"
    python: str = ""
    pilot_dir: str = ""


class Ray:
    """Connects when it is used first. Raises SpecError if Ray is not installed, or differs from the cluster's."""

    engine = "Ray"

    def __init__(self, options: Options) -> None:
        if options.address.startswith("ray://"):
            raise SpecError(
                f"{options.address}: Ray Client has not what pilots need; run this on a node of the cluster, "
                "with --address auto or HOST:PORT of its head"
            )
        if options.strategy not in STRATEGIES:
            raise SpecError(f"--strategy is {options.strategy!r}; expected one of {', '.join(STRATEGIES)}")
        self._options = options
        self._is_connected = False

    def close(self) -> None:
        """Disconnect from Ray. Gangs go on."""
        if self._is_connected:
            _imported().shutdown()
            self._is_connected = False

    def plan(self, request: Request) -> str:
        """Return placement group and actors, without the token."""
        gang = self._gang(request, f"{request.name}.ID")
        shown = {**gang, "environ": dict.fromkeys(gang["environ"], "<secret>")}
        where = f"in namespace {self._options.namespace!r} of Ray at {self._options.address!r}"
        return f"{where}:\n{json.dumps(shown, indent=1)}"

    def launch(self, request: Request) -> str:
        """Start the actor of the gang, unless there is one whose pilots have not all ended; it does the rest."""
        ray = self._connected()
        from penstock.cluster.ray import actors  # imports Ray, which is optional

        for handle in states.handles_of(request.name, self.names()):
            found, ended = states.gang_and_count(handle), self._ended(handle)
            if ended is None or (found is not None and len(ended) < found[1]):
                return handle
        handle = states.new_handle(request.name, request.count, secrets.token_hex(4))
        ray.cloudpickle.register_pickle_by_value(actors)
        made = ray.remote(actors.Gang).options(
            name=handle, lifetime="detached", num_cpus=0, max_restarts=-1, max_task_retries=-1
        )
        self._call(made.remote, self._gang(request, handle))
        return handle

    def poll(self, handle: str) -> tuple[Pilot, ...]:
        """Read Ray's tables; the actor of the gang adds which pilots have ended, and how."""
        ray = self._connected()
        found = states.gang_and_count(handle)
        if found is None:
            return ()
        if handle not in self.names():
            self._remove_group(handle)  # another process killed the actor that would have
            return ()
        nodes = {one["NodeID"]: one["NodeManagerAddress"] for one in self._call(ray.nodes) if one["Alive"]}
        room = states.free(self._call(ray.available_resources), self._call(ray.cluster_resources))
        return states.pilots(*found, self._group(handle), self._ended(handle) or {}, nodes, room)

    def cancel(self, handle: str, names: Collection[str] = ()) -> None:
        """Send it to the actor of the gang, which ends pilots in order while this process goes on, or ends."""
        ray = self._connected()
        found = states.gang_and_count(handle)
        if found is None:
            return
        indices = sorted(int(name.rpartition("-")[2]) for name in names) or list(range(found[1]))
        with suppress(ValueError):
            gang = self._call(ray.get_actor, handle)
            # waits, so that what was sent does not end with this process
            self._answer(gang.cancel.remote(indices))

    def _gang(self, request: Request, handle: str) -> dict[str, Any]:
        lock = hashlib.sha256(request.url.encode()).hexdigest()[:8]
        return {
            "gang": request.name, "handle": handle, "count": request.count, "bundle": states.bundle(request),
            "strategy": self._options.strategy, "python": self._options.python, "agent": request.agent_arguments(),
            "environ": {JOIN_TOKEN.name: request.token}, "pilot_dir": self._options.pilot_dir,
            "lock": f"penstock-{lock}",
        }  # fmt: skip

    def _connected(self) -> Any:
        ray = _imported()
        if not self._is_connected:
            options = self._options
            handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
            try:
                ray.init(
                    address=options.address, namespace=options.namespace, log_to_driver=False,
                    logging_level=logging.WARNING,
                )  # fmt: skip
            except ConnectionError as error:
                raise EngineAway(
                    f"no Ray at {options.address!r} ({error}); run this on a node of the cluster ('ray start')"
                ) from error
            except RuntimeError as error:  # other versions of Ray or Python
                raise SpecError(f"Ray at {options.address!r} refuses this process: {error}") from error
            for number, handler in handlers.items():  # Ray's own would end the process with status 143
                signal.signal(number, handler)
            self._is_connected = True
        return ray

    def names(self) -> set[str]:
        """Return the names of the actors of this cluster: gangs (the handles) and pilots."""
        ray = self._connected()
        return set(self._call(ray.util.list_named_actors))

    def _ended(self, handle: str) -> dict[int, str] | None:
        """Return which pilots have ended, and how; None if the actor of the gang does not answer."""
        ray = self._connected()
        try:
            answer: dict[int, str] = self._answer(ray.get_actor(handle).report.remote())
        except (ValueError, EngineAway):
            return None
        return answer

    def _group(self, handle: str) -> states.Group:
        ray = self._connected()
        try:
            group = self._call(ray.util.get_placement_group, handle)
        except ValueError:
            return states.Group()
        return states.group(self._call(ray.util.placement_group_table, group))

    def _remove_group(self, handle: str) -> None:
        ray = self._connected()
        with suppress(ValueError):
            self._call(ray.util.remove_placement_group, self._call(ray.util.get_placement_group, handle))

    def _answer(self, reference: object) -> Any:
        return self._call(self._connected().get, reference, timeout=ANSWER_S)

    def _call(self, function: Callable[..., Any], *arguments: object, **options: object) -> Any:
        """Call a function of Ray. Raises EngineAway for whatever Ray could not do."""
        ray = self._connected()
        try:
            return function(*arguments, **options)
        except ray.exceptions.RayError as error:
            raise EngineAway(f"Ray at {self._options.address!r} has not answered: {error}") from error


def _imported() -> Any:
    try:
        import ray  # optional: the extra `ray`
    except ImportError as error:
        raise SpecError(f"'penstock cluster ray' needs Ray: pip install 'penstock[ray]' ({error})") from error
    return ray
