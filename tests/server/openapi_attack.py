"""A run of schemathesis over the whole OpenAPI document of an application, in process: every phase, every check."""

from __future__ import annotations

import gzip
import io
import itertools
import tarfile
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import schemathesis
from hypothesis import strategies as st
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import events, from_schema
from schemathesis.python import asgi

from penstock_server.app import create_app
from penstock_server.clock import SystemClock
from penstock_server.settings import Settings

MAX_KEY = 255
ALL_PHASES = ("examples", "coverage", "fuzzing", "stateful")
EXPECTED = ("2xx", "401", "403", "404", "409", "5xx")
_count = itertools.count()


def _workdir(content: bytes) -> bytes:
    """Return a tar.gz with one file."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        entry = tarfile.TarInfo("train.py")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return gzip.compress(packed.getvalue(), mtime=0)


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case[Any], kwargs: dict[str, Any]) -> None:
    """Give each request a key of its own: that a key belongs to one body is no schema's to say."""
    key = case.headers.get("idempotency-key")
    if isinstance(key, str) and 0 < len(key) <= MAX_KEY and key.isascii():
        case.headers["idempotency-key"] = f"{key[: MAX_KEY - 12]}{next(_count):012}"


# What the media type says and a schema cannot: these bytes are a gzip stream.
schemathesis.openapi.media_type("application/gzip", st.binary(max_size=64).map(_workdir))


class _Hasty(SystemClock):
    """A minute between any two looks: no request waits for long, and wrong tokens are forgiven."""

    def __init__(self) -> None:
        self._looks = itertools.count()

    def monotonic(self) -> float:
        return super().monotonic() + 60.0 * next(self._looks)


@dataclass(slots=True)
class Outcome:
    """What a run found. `failures`: text by operation and check; `cases`: requests of each phase."""

    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    cases: Counter[str] = field(default_factory=Counter)
    operations: set[str] = field(default_factory=set)
    statuses: Counter[int] = field(default_factory=Counter)

    def take(self, event: events.EngineEvent) -> None:
        """Note what one event says."""
        if isinstance(event, events.ScenarioFinished):
            self._take_scenario(event)
        elif isinstance(event, events.NonFatalError):
            self.errors.append(f"{event.label}: {event.info.message}")
        elif isinstance(event, events.FatalError):
            self.errors.append(repr(event.exception))

    def _take_scenario(self, event: events.ScenarioFinished) -> None:
        recorder = event.recorder
        self.cases[event.phase.value] += len(recorder.cases)
        for interaction in recorder.interactions.values():
            if interaction.response is not None:
                self.statuses[interaction.response.status_code] += 1
        for case_id, checks in recorder.checks.items():
            operation = recorder.cases[case_id].value.operation.label
            self.operations.add(operation)
            for check in checks:
                if check.failure_info is not None:
                    failure = check.failure_info
                    text = f"{failure.failure.title}: {failure.failure.message}\n{failure.code_sample}"
                    self.failures.setdefault((operation, check.name), text)


def attack(state_dir: Path, *, authenticated: bool, examples: int, phases: Collection[str]) -> Outcome:
    """Run some phases against a new server, `examples` generated requests an operation; deterministic."""
    app = create_app(Settings(state_dir=state_dir), clock=_Hasty())
    outcome = Outcome()
    try:
        with asgi.get_client(cast(Any, app)) as client:
            client.get("/healthz")  # starts the application
            token = (state_dir / "admin.token").read_text().strip()
            bearer = {"Authorization": f"Bearer {token}"}
            config = SchemathesisConfig.from_dict(
                {
                    "continue-on-failure": True,
                    "base-url": "http://127.0.0.1",  # a host that is the server's own
                    # 412 says, as 409 does, that a valid request does not fit the present state.
                    "checks": {"positive_data_acceptance": {"expected-statuses": [*EXPECTED, 412]}},
                    "phases": {name: {"enabled": name in phases} for name in ALL_PHASES},
                    "generation": {"max-examples": examples, "deterministic": True, "database": "none"},
                    **({"headers": bearer} if authenticated else {}),
                }
            )
            schema = schemathesis.openapi.from_asgi("/openapi.json", app, config=config, headers=bearer)
        for event in from_schema(schema).execute():
            outcome.take(event)
    finally:
        asgi.shutdown_lifespans()
    return outcome
