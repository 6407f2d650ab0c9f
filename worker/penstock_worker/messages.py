"""Reading and making the agent's messages (`penstock.protocol.agent`).

Of the desired replicas an unreadable one is refused alone: the others must not wait for it.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from penstock.errors import PeerError, UserError
from penstock.machine import memory
from penstock.machine.findings import Finding
from penstock.protocol.agent import (
    FROM_SERVER,
    MAX_FINDING_TEXT,
    MAX_FINDINGS,
    Desired,
    DesiredSet,
    DiskSpace,
    FromServer,
    Heartbeat,
    Hello,
    LogBytes,
    MachineFinding,
    PilotTerms,
    Refused,
    ReplicaReport,
    RunningReplica,
)
from penstock.protocol.clocks import ClockOffset
from penstock.settings import NODE_ADDRESS


def parse(text: str) -> FromServer:
    """Read one message of the server. Raises PeerError that names the field.

    Not by `validate_json`: that refuses the whole text for half a surrogate pair in one replica's argument.
    """
    try:
        fields = json.loads(text)
        if isinstance(fields, dict) and fields.get("type") == "desired" and isinstance(fields.get("replicas"), list):
            return _desired_set(fields["replicas"], fields)
        return FROM_SERVER.validate_python(fields)
    except ValidationError as error:
        raise PeerError(f"the server sent a message that the agent cannot read: {_words(error)}") from error
    except (ValueError, RecursionError) as error:
        raise PeerError(f"the server sent a message that is no JSON: {error}") from error


def _desired_set(orders: list[Any], fields: dict[str, Any]) -> DesiredSet:
    """Part what can be read from what cannot. Raises ValidationError for an order without a readable id and epoch."""
    readable: list[Desired] = []
    refused: list[Refused] = []
    for order in orders:
        try:
            readable.append(Desired.model_validate(order))
        except ValidationError as error:
            detail = f"this node cannot read its order: {_words(error)}"
            refused.append(Refused.model_validate(order).model_copy(update={"detail": detail}))
    return DesiredSet.model_validate({**fields, "replicas": readable, "refused": refused})


def stub(order: Refused) -> Desired:
    """Return what stands for an order that cannot be read: enough to report the replica, never to run it."""
    return Desired(
        replica_id=order.replica_id, job_id="", job_name="", role="trainer", index=0, epoch=order.epoch, stream=0,
        entrypoint=["(unreadable)"],
    )  # fmt: skip


def _words(error: ValidationError) -> str:
    first = error.errors()[0]
    place = "/".join(str(part) for part in first["loc"])
    what = first["msg"].removeprefix("Value error, ")
    return (f"{place}: {what}" if place else what).encode("utf-8", "replace").decode("utf-8")


def hello(
    *,
    version: str,
    boot_id: str,
    reports: list[ReplicaReport],
    address: str = "",
    ports: Sequence[int] = (),
    findings: Sequence[Finding] = (),
    instance: str = "",
    pilot: PilotTerms | None = None,
    labels: Mapping[str, str] | None = None,
) -> Hello:
    """Return the agent's first message: what runs here, how the node is reached, which ports pservers may get.

    `findings`: those about the machine that are not ok; long texts are cut to what the server takes. Raises UserError
    for an address that no server takes.
    """
    found = [{name: _sendable(text) for name, text in asdict(one).items()} for one in findings[:MAX_FINDINGS]]
    try:
        return Hello(
            version=version,
            boot_id=boot_id,
            replicas=[RunningReplica.model_validate(report.model_dump()) for report in reports],
            address=address,
            ports=list(ports),
            findings=[MachineFinding.model_validate(one) for one in found],
            instance=instance,
            pilot=pilot,
            takes_stacks=True,
            records=True,
            labels=None if labels is None else dict(labels),
        )
    except ValidationError as error:
        raise UserError(
            f"this node cannot register with the address {address[:80]!r} ({NODE_ADDRESS.name} if it is set): "
            f"{_words(error)}"
        ) from error


def _sendable(text: str) -> str:
    """Return text that the server takes: paths may hold bytes that are no text, and a refused hello costs the node."""
    return text[:MAX_FINDING_TEXT].encode("utf-8", "replace").decode("utf-8").replace("\0", "?")


def log(report: ReplicaReport, offset: int, chunk: bytes) -> LogBytes:
    """Return a piece of a replica's log."""
    text = base64.b64encode(chunk).decode("ascii")
    return LogBytes(replica_id=report.replica_id, epoch=report.epoch, offset=offset, text_b64=text)


def explanation(body: bytes | bytearray | None) -> str:
    """Return what a problem document says of this node's certificate, and what to do; '' for any other body."""
    try:
        problem = json.loads(body or b"{}")
    except ValueError:
        return ""
    if not isinstance(problem, dict) or not str(problem.get("code", "")).startswith("certificate_"):
        return ""
    return f"{problem.get('detail')}; {problem.get('hint')}"


def text_of(message: str | bytes) -> str:
    """Return a message of the server. Raises PeerError for a binary one."""
    if isinstance(message, bytes):
        raise PeerError("the server sent a binary message; an agent expects JSON text")
    return message


def heartbeat(leaving: str, ends_in_s: float | None, clock: ClockOffset | None, folder: Path) -> str:
    """Return a heartbeat with the machine's load. `leaving`: why a pilot drains, or ''; `folder`: the agent's state.

    `ends_in_s`: until it stops what runs here.
    """
    message = Heartbeat(
        cpu_percent=psutil.cpu_percent(), memory_used_bytes=memory.used_bytes(psutil.virtual_memory().used)
    )
    also = {"leaving": leaving, "ends_in_s": ends_in_s, "clock": clock, "disk": _disk(folder)}
    return message.model_copy(update={name: value for name, value in also.items() if value}).encode()


def _disk(folder: Path) -> DiskSpace | None:
    try:
        found = shutil.disk_usage(folder)
    except OSError:  # a heartbeat goes on without what only informs
        return None
    return DiskSpace(free_bytes=found.free, total_bytes=found.total)
