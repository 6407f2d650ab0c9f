"""The job description: what a person submits. Errors carry JSON pointers (see `pointer`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from penstock.errors import SpecError
from penstock.protocol.contract import Mode, reserved

RetryClass = Literal["infra", "user", "hang"]
OnDisconnect = Literal["continue", "stop"]

MAX_PAUSE_S = 128.0
"""The longest pause before an attempt: one that ends later is of a clock that was set back."""
LABEL_KEY = r"^[a-z0-9]([a-z0-9._/-]{0,61}[a-z0-9])?$"
LABEL_VALUE = r"^([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?$"
MAX_LABELS = 64
NAME = r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$"
_MEMORY = r"^ *([0-9]{1,15}) *(B|KiB|MiB|GiB|TiB|kB|MB|GB|TB)? *$"
_UNIT = {
    None: 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
    "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip


def memory_bytes(text: str) -> int:
    """Return the bytes that `text` ("2GiB", "512 MB", "1024") stands for. Raises ValueError."""
    match = re.fullmatch(_MEMORY, text)
    if match is None:
        raise ValueError(f"memory is {text!r}; write a whole number and a unit, such as '2GiB'")
    return int(match[1]) * _UNIT[match[2]]


def storable(text: str) -> str:
    """Return `text`. Raises ValueError if a database, UTF-8 or an argument vector cannot hold it."""
    if "\0" in text:
        raise ValueError("holds a NUL character; leave it out")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X}"
        raise ValueError(f"holds half a surrogate pair, {found}, which is no character; leave it out") from error
    return text


Text = Annotated[str, AfterValidator(storable), Field(json_schema_extra={"pattern": "^[^\\u0000]*$"})]
"""Text that can be stored. The schema cannot say that it has to be UTF-8; JSON that is not is refused as such."""


Labels = Annotated[
    dict[Annotated[str, StringConstraints(pattern=LABEL_KEY)], Annotated[str, StringConstraints(pattern=LABEL_VALUE)]],
    Field(max_length=MAX_LABELS, json_schema_extra={"additionalProperties": False}),
]
"""Labels of a node, or those that a job asks for: keys of at most 63 characters, and values, which may be empty."""


def labels_of(texts: Sequence[str]) -> dict[str, str]:
    """Return the labels that KEY=VALUE texts give to a node. Raises SpecError."""
    found: dict[str, str] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or re.fullmatch(LABEL_KEY, key) is None or re.fullmatch(LABEL_VALUE, value) is None:
            raise SpecError(
                f"--label {text!r} is no label; write KEY=VALUE: a key of lower-case letters, digits, '.', '_', '-', "
                "'/', and a value of letters, digits, '.', '_' and '-', each of at most 63 characters"
            )
        if found.setdefault(key, value) != value:
            raise SpecError(f"--label {key} is given as {found[key]!r} and as {value!r}; a node has one value of a key")
    if len(found) > MAX_LABELS:
        raise SpecError(f"{len(found)} labels are given; a node has at most {MAX_LABELS}")
    return found


class Strict(BaseModel):
    """Base of what a person sends: a field that is not known is an error, and so is text or a truth for a number.

    Pydantic would convert those; then the server would take what its JSON Schema forbids.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers(cls, value: object, info: ValidationInfo) -> object:
        assert info.field_name is not None  # of a field's validator
        if cls.model_fields[info.field_name].annotation in _NUMBERS and isinstance(value, bool | str):
            raise ValueError(f"is {value!r}; write a number")
        return value


_NUMBERS = (int, int | None, float, float | None)


class Resources(Strict):
    """How many replicas of one role, and what each of them needs."""

    count: int = Field(1, ge=0, le=10_000, description="number of replicas")
    cpus: int = Field(1, ge=0, le=4096, description="cores of each replica; 0: it shares those of others")
    gpus: int = Field(0, ge=0, le=64, description="GPUs of each replica")
    memory: str = Field(
        "1GiB", description="memory of each replica, e.g. '2GiB'", json_schema_extra={"pattern": _MEMORY}
    )

    @field_validator("memory")
    @classmethod
    def _memory(cls, value: str) -> str:
        memory_bytes(value)
        return value


WindowS = Annotated[
    float | None,
    Field(
        ge=1, le=366 * 86400,
        description="seconds after which a restart counts against max_restarts no more; default: it always counts",
    ),
]  # fmt: skip


class RestartBudget(Strict):
    """The restarts of one class of failures, counted apart from all others, and the back-off before its attempts."""

    max_restarts: int = Field(3, ge=0, le=1000)
    window_s: WindowS = None
    first_pause_s: float = Field(
        1.0, ge=0, le=MAX_PAUSE_S,
        description="seconds before the next attempt when two in a row failed within 30 s; doubled with each more",
    )  # fmt: skip
    longest_pause_s: float = Field(MAX_PAUSE_S, ge=0, le=MAX_PAUSE_S, description="seconds up to which it is doubled")


class RestartBudgets(Strict):
    """Budgets by class. A class that has one need not be in `on`."""

    infra: RestartBudget | None = None
    user: RestartBudget | None = None
    hang: RestartBudget | None = None
    preempted: RestartBudget | None = Field(None, description="default: as often as nodes leave")


class Restart(Strict):
    """When a failed attempt is followed by another. An attempt of which nothing had started never counts.

    `on`: "infra", faults of machines: a lost node, a full disk, a killed process guard; "user": the script's own;
    "hang": no trainer has ended a step for 8 times their median and 60 s. Without that, a hang is only reported.
    These share `max_restarts`, but for classes that have one of `budgets`. A preempted attempt takes no restart
    without a budget; how long a job waits for capacity, `max_wait_s` of the job limits.
    """

    max_restarts: int = Field(3, ge=0, le=1000)
    window_s: WindowS = None
    on: list[RetryClass] = ["infra"]
    budgets: RestartBudgets = Field(default_factory=RestartBudgets)


class Checkpoint(Strict):
    """How often a checkpoint is written, how many are retained, and how long a preempted attempt has to write one."""

    every_steps: int = Field(500, ge=1)
    keep: int = Field(3, ge=1)
    preempt_grace_s: float = Field(
        30.0, ge=0, le=3600,
        description="seconds that a preempted attempt has to save at a step boundary before it is stopped; 0: none",
    )  # fmt: skip


class ReplicaLimits(Strict):
    """What each replica may take. By control groups where the agent may make them, else for each process alone."""

    memory: str | None = Field(
        None,
        description="of all processes of a replica, e.g. '2GiB'; more ends it",
        json_schema_extra={"pattern": _MEMORY},
    )
    processes: int | None = Field(None, ge=1, le=4_194_304, description="processes and threads of a replica")
    open_files: int | None = Field(None, ge=16, le=1 << 20, description="open files of each process")
    cpus: float | None = Field(
        None, ge=0.01, le=65_536, description="processor time of all processes of a replica, in cores"
    )

    @field_validator("memory")
    @classmethod
    def _memory(cls, value: str | None) -> str | None:
        if value is not None:
            memory_bytes(value)
        return value


def _roles_by_mode(mode: JsonValue, pservers: JsonValue, *required: JsonValue) -> JsonValue:
    trainers: JsonValue = {"properties": {"count": {"minimum": 1}}}
    properties: JsonValue = {"mode": mode, "trainers": trainers, "pservers": pservers}
    return {"properties": properties, "required": list(required)}


_BY_MODE: list[JsonValue] = [
    _roles_by_mode({"const": "pserver"}, {"properties": {"count": {"minimum": 1}}}, "mode", "pservers"),
    _roles_by_mode(
        {"enum": [mode for mode in get_args(Mode) if mode != "pserver"]},
        {"properties": {"count": {"const": 0}}, "required": ["count"]},
    ),
]
"""How many replicas of each role a job of a mode has, in JSON Schema. `JobSpec` checks it with messages of its own."""


class JobSpec(Strict):
    """A job: an entrypoint, how many replicas run it in which role, and what happens on failure."""

    model_config = ConfigDict(json_schema_extra={"anyOf": _BY_MODE})

    name: Annotated[str, StringConstraints(pattern=NAME)] = Field(
        description="lower-case letters, digits, '.', '_' and '-'; at most 63 characters"
    )
    entrypoint: list[Text] = Field(min_length=1, description="program and arguments; no shell is involved")
    workdir: Text | None = Field(
        None, description="folder on the submitter's machine; the command line packs it into a snapshot"
    )
    snapshot: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] | None = Field(
        None, description="SHA-256 of an uploaded tar.gz in which the entrypoint runs"
    )
    project: Annotated[str, StringConstraints(pattern=NAME)] = Field(
        "default", description="whose job it is: projects share the nodes, and may have quotas"
    )
    priority: int = Field(0, ge=-1000, le=1000, description="jobs of a project with a higher one are placed first")
    node_selector: Labels = Field(
        default_factory=dict, description="labels that each node of the job must have, by key"
    )
    mode: Mode = "local"
    trainers: Resources = Field(default_factory=lambda: Resources(count=1))
    pservers: Resources = Field(default_factory=lambda: Resources(count=0))
    env: dict[Text, Text] = Field(
        default_factory=dict, json_schema_extra={"propertyNames": {"pattern": "^[^=\\u0000]+$"}}
    )
    restart: Restart = Field(default_factory=Restart)
    checkpoint: Checkpoint | None = None
    limits: ReplicaLimits | None = Field(None, description="what each replica may take; by default what there is")
    max_duration_s: float | None = Field(
        None, gt=0, le=366 * 86400,
        description="seconds that an attempt may take from its placement on; one that takes longer ends the job. "
        "A node that leaves before that is not used",
    )  # fmt: skip
    max_wait_s: float | None = Field(
        None, gt=0, le=366 * 86400,
        description="seconds for which the job, or another attempt of it, waits to be placed; then it fails "
        "(no_capacity). Default: as long as it takes",
    )  # fmt: skip
    stop_grace_s: float = Field(5.0, ge=0, le=600, description="seconds between SIGTERM and SIGKILL")
    on_disconnect: OnDisconnect = Field(
        "continue",
        description="what replicas do when their node hears nothing from the server for the lease and its grace: "
        "'continue' until it is back, or 'stop'",
    )

    @model_validator(mode="after")
    def _roles(self) -> JobSpec:
        if self.trainers.count < 1:
            raise ValueError("trainers.count is 0; a job needs at least one trainer")
        if self.mode == "pserver" and self.pservers.count < 1:
            raise ValueError("mode is 'pserver' but pservers.count is 0; ask for at least one pserver")
        if self.mode != "pserver" and self.pservers.count:
            raise ValueError(f"mode is {self.mode!r} but pservers.count is {self.pservers.count}; use mode 'pserver'")
        if any("=" in key or not key for key in self.env):
            raise ValueError("a name in env is empty or holds '='")
        return self


def without_reserved(spec: JobSpec) -> JobSpec:
    """Return `spec`. Raises ValidationError, at each variable of `env` that an agent would override silently.

    Asked where a job is submitted, not by `JobSpec` itself: a job that is stored already has to stay readable.
    """
    found = sorted(spec.env.keys() & reserved(spec.mode, gpus=spec.trainers.gpus))
    if found:
        raise ValidationError.from_exception_data("JobSpec", [_reserved(name, spec.env) for name in found])
    return spec


def _reserved(name: str, env: dict[str, str]) -> InitErrorDetails:
    said = "{name} gives a process its place in the job, and is set by the agent; leave it out"
    error = PydanticCustomError("reserved_variable", said, {"name": name})
    return InitErrorDetails(type=error, loc=("env", name), input=env)  # not its value, which may be a secret


SubmittedSpec = Annotated[JobSpec, AfterValidator(without_reserved)]


def pointer(loc: tuple[int | str, ...]) -> str:
    """Return the JSON pointer (RFC 6901) of a pydantic error location."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in loc)
