"""Capabilities: the optional things of a machine, each probed at most once in a process, each with a fallback.

A probe exercises the thing and checks the result, so a thing that exists and gives wrong results is absent too. Code
that uses an optional thing asks `capability(name).present` and has a path without it; it never looks at the platform.
PENSTOCK_ABSENT, a comma-separated list of names, declares capabilities absent: a way out for users, and how a test
reaches a fallback in another process. A note is a probe for the report alone, which nothing asks for: declaring it
absent would change nothing, so PENSTOCK_ABSENT refuses it. Nothing here imports torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.errors import SpecError
from penstock.settings import ABSENT

Probe = Callable[[], str]


@dataclass(frozen=True, slots=True)
class Capability:
    """The result of a probe.

    detail: what was found, or why it is absent; one line. fallback: what is used instead where it is absent.
    """

    name: str
    present: bool
    detail: str
    fallback: str


class Absent(Exception):  # not in the tree of errors: it never leaves `Registry.capability`
    """Raised by a probe, with the reason, where the thing does not exist or gives wrong results."""


class Registry:
    """Probes by name, and their results. Thread-safe; a probe runs on the thread that asks first.

    Names with a dot belong to a group (`matrix.onednn`) that may register later than the first question; they are
    checked against PENSTOCK_ABSENT once one of their group is there.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = environ
        self._probes: dict[str, tuple[Probe, str]] = {}
        self._notes: set[str] = set()
        self._found: dict[str, Capability] = {}
        self._lock = threading.RLock()  # a probe may ask for another capability

    def probe(self, name: str, *, fallback: str) -> Callable[[Probe], Probe]:
        """Register a function that returns what it found or raises `Absent`; any other exception means absent too."""

        def register(function: Probe) -> Probe:
            with self._lock:
                self._probes[name] = (function, fallback)
                self._found.pop(name, None)
            return function

        return register

    def note(self, name: str, *, meaning: str) -> Callable[[Probe], Probe]:
        """Register a probe for the report alone. `meaning`: what its absence means to the user."""
        self._notes.add(name)
        return self.probe(name, fallback=meaning)

    def notes(self) -> frozenset[str]:
        """Return the names of the notes."""
        return frozenset(self._notes)

    def capability(self, name: str) -> Capability:
        """Return the result of a probe, which runs at the first call. Raises SpecError for an unknown name."""
        with self._lock:
            if name not in self._found:
                self._found[name] = self._probed(name)
            return self._found[name]

    def names(self) -> tuple[str, ...]:
        """Return the names of all that are registered, in that order; nothing is probed."""
        with self._lock:
            return tuple(self._probes)

    def capabilities(self) -> tuple[Capability, ...]:
        """Return all, in the order of their registration. Raises SpecError if PENSTOCK_ABSENT names an unknown one."""
        with self._lock:
            return tuple(self.capability(name) for name in self._probes)

    def forget(self) -> None:
        """Forget all results: the next question probes again, and reads PENSTOCK_ABSENT again."""
        with self._lock:
            self._found.clear()

    def _probed(self, name: str) -> Capability:
        if name not in self._probes:
            raise SpecError(f"capability {name!r} is unknown; expected one of {self._known()}", got=name)
        function, fallback = self._probes[name]
        if name in self._declared_absent():
            return Capability(name, present=False, detail=f"declared absent by {ABSENT}", fallback=fallback)
        try:
            return Capability(name, present=True, detail=_one_line(function()), fallback=fallback)
        except Absent as absent:
            return Capability(name, present=False, detail=_one_line(str(absent)), fallback=fallback)
        except Exception as error:  # noqa: BLE001  # recorded: whatever a probe meets, the fallback is used
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            return Capability(name, present=False, detail=_one_line(text), fallback=fallback)

    def _declared_absent(self) -> set[str]:
        names = set(ABSENT.read(self._environ))
        unknown = sorted(name for name in names - self._probes.keys() if not self._may_register_later(name))
        if unknown:
            raise SpecError(
                f"{ABSENT} names {', '.join(unknown)}, but there is no such capability; expected a comma-separated "
                f"list of {self._known()}",
                got=ABSENT.text(self._environ),
            )
        if refused := sorted(names & self._notes):
            raise SpecError(
                f"{ABSENT} names {', '.join(refused)}, which is for the report of penstock doctor alone: declaring it "
                f"absent would change nothing; expected a comma-separated list of {self._known()}",
                got=ABSENT.text(self._environ),
            )
        return names

    def _may_register_later(self, name: str) -> bool:
        group, dot, _ = name.partition(".")
        return bool(dot) and not any(known.startswith(f"{group}.") for known in self._probes)

    def _known(self) -> str:
        return ", ".join(sorted(self._probes.keys() - self._notes))


def _one_line(text: str) -> str:
    return " ".join(text.split())


_registry = Registry()
probe = _registry.probe
note = _registry.note
notes = _registry.notes
capability = _registry.capability
names = _registry.names
capabilities = _registry.capabilities
forget = _registry.forget
