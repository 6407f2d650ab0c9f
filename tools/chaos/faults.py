"""Faults of a world's parts. Each begins with its call and ends with what the call returns; both note the outage."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

from tools.chaos.parts import Running, signal_process
from tools.chaos.plan import Fault
from tools.chaos.world import World

from penstock.errors import PenstockError
from penstock.process import proc
from penstock.protocol.states import TERMINAL_JOB

End = Callable[[], None]


class Faults:
    """Begins faults in a world. Of one part a second fault begins when the first is over: it is left out before."""

    def __init__(self, world: World, draw: random.Random) -> None:
        self._world, self._draw = world, draw
        self._busy: set[object] = set()
        self._begin: dict[str, Callable[[Fault], End | None]] = {
            "agent killed": self._kill_agent,
            "agent stopped": self._stop_agent,
            "server killed": self._kill_server,
            "server stopped": self._stop_server,
            "guard killed": self._kill_guard,
            "replica killed": self._kill_replica,
            "replica stopped": self._stop_replica,
            "partition": lambda fault: self._cut(fault, "partition"),
            "deafened": lambda fault: self._cut(fault, "deafen"),
            "silenced": lambda fault: self._cut(fault, "silence"),
            "job cancelled": self._cancel,
        }

    @property
    def is_server_down(self) -> bool:
        """Whether a fault holds the server: a call would wait for it."""
        return "server" in self._busy

    def begin(self, fault: Fault) -> End | None:
        """Begin a fault; return what ends it, or None if there is nothing that it could hit now."""
        return self._begin[fault.what](fault)

    def _holding(self, part: object, number: int | None, end: End) -> End:
        self._busy.add(part)
        began = time.time()

        def over() -> None:
            end()
            self._world.note_outage(number, began)
            self._busy.discard(part)

        return over

    def _kill_agent(self, fault: Fault) -> End | None:
        part = ("agent", fault.number)
        if part in self._busy:
            return None
        self._world.agents[fault.number].kill()
        return self._holding(part, fault.number, lambda: self._world.start_agent(fault.number))

    def _stop_agent(self, fault: Fault) -> End | None:
        part, agent = ("agent", fault.number), self._world.agents[fault.number]
        if part in self._busy:
            return None
        agent.send(signal.SIGSTOP)
        return self._holding(part, fault.number, lambda: agent.send(signal.SIGCONT))

    def _kill_server(self, _: Fault) -> End | None:
        if "server" in self._busy:
            return None
        self._world.server.kill()
        return self._holding("server", None, self._world.start_server)

    def _stop_server(self, _: Fault) -> End | None:
        if "server" in self._busy:
            return None
        self._world.server.send(signal.SIGSTOP)
        return self._holding("server", None, lambda: self._world.server.send(signal.SIGCONT))

    def _cut(self, fault: Fault, how: str) -> End | None:
        part = ("link", fault.number)
        if part in self._busy or not self._world.links:
            return None
        link = self._world.links[fault.number]
        getattr(link, how)()
        return self._holding(part, fault.number, link.heal)

    def _one_running(self, fault: Fault) -> Running | None:
        found = self._world.running(fault.number)
        return self._draw.choice(found) if found else None

    def _kill_guard(self, fault: Fault) -> End | None:
        found = self._one_running(fault)
        if found is not None:
            signal_process(found.guard, signal.SIGKILL)
        return None if found is None else _nothing

    def _kill_replica(self, fault: Fault) -> End | None:
        found = self._one_running(fault)
        if found is not None:
            signal_process(found.child, signal.SIGKILL)
        return None if found is None else _nothing

    def _stop_replica(self, fault: Fault) -> End | None:
        found = self._one_running(fault)
        ticks = None if found is None else proc.start_ticks(found.child)
        if found is None or ticks is None:
            return None
        child = found.child
        signal_process(child, signal.SIGSTOP)
        return lambda: signal_process(child, signal.SIGCONT) if proc.is_alive(child, ticks) else None

    def _cancel(self, _: Fault) -> End | None:
        if self.is_server_down:
            return None
        try:
            with self._world.client() as client:
                active = [job["id"] for job in client.jobs() if job["state"] not in TERMINAL_JOB]
                if not active:
                    return None
                client.cancel(self._draw.choice(sorted(active)))
        except PenstockError:  # the server is down, or cut off: a cancellation is not what is tried then
            return None
        return _nothing


def _nothing() -> None:
    """End a fault that has no duration."""
