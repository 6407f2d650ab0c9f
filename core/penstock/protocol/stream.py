"""Messages of the browser's websocket, both ways (docs/protocol.md), and the schemas that the page's types come from.

What a browser sends is validated. What it receives is plain data, typed here alone: REST objects in it are rendered
already, and each message goes to many browsers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, WithJsonSchema
from typing_extensions import TypedDict  # pydantic reads typing's own only from Python 3.12 on

from penstock.protocol.graphdoc import GraphDocument
from penstock.protocol.wire import Message, Offset, Short

Part = Literal["state", "metrics", "logs", "ops", "sync"]
ALL_PARTS: tuple[Part, ...] = ("state", "metrics", "logs", "ops", "sync")

# Browser to server


class SubscribeJobs(Message):
    """Follow the list of jobs and the nodes."""

    type: Literal["subscribe"]
    id: int
    topic: Literal["jobs"]


class SubscribeJob(Message):
    """Follow one job."""

    type: Literal["subscribe"]
    id: int
    topic: Literal["job"]
    job_id: Short
    parts: list[Part] = Field(default_factory=lambda: list(ALL_PARTS))
    log_offsets: dict[str, Offset] = Field(default_factory=dict)


class SubscribeServer(Message):
    """Follow the conditions of the server."""

    type: Literal["subscribe"]
    id: int
    topic: Literal["server"]


class Unsubscribe(Message):
    """Stop following."""

    type: Literal["unsubscribe"]
    id: int


class Credit(Message):
    """How far an older dashboard has painted: accepted, and ignored."""

    type: Literal["credit"]


Subscribe = Annotated[SubscribeJobs | SubscribeJob | SubscribeServer, Field(discriminator="topic")]
FromBrowser = Annotated[Subscribe | Unsubscribe | Credit, Field(union_mode="left_to_right")]
FROM_BROWSER: TypeAdapter[SubscribeJobs | SubscribeJob | SubscribeServer | Unsubscribe | Credit] = TypeAdapter(
    FromBrowser
)

# Server to browser

REST = "x-rest"
"""Key of a schema that stands for one of the REST API's."""
Job = Annotated[dict[str, Any], WithJsonSchema({REST: "Job"})]
Progress = Annotated[dict[str, Any], WithJsonSchema({REST: "Progress"})]
Node = Annotated[dict[str, Any], WithJsonSchema({REST: "Node"})]
Event = Annotated[dict[str, Any], WithJsonSchema({REST: "Event"})]
Condition = Annotated[dict[str, Any], WithJsonSchema({REST: "ServerCondition"})]


class Points(TypedDict):
    """Points of one series, by time."""

    step: list[int]
    time_ns: list[int]
    value: list[float]


class StreamGraph(TypedDict):
    """The graph that the frames of a stream index from now on."""

    replica_id: str
    stream: int
    hash: str


class JobsSnapshot(TypedDict):
    """The newest jobs and those that go on. `more`: there are older ones, `total` in all."""

    type: Literal["snapshot"]
    id: int
    jobs: list[Job]
    nodes: list[Node]
    total: int
    more: bool


class JobSnapshot(TypedDict):
    """One job as it is when the subscription begins."""

    type: Literal["snapshot"]
    id: int
    job: Job
    metrics: dict[str, Points]
    graphs: list[StreamGraph]
    nodes: list[Node]


class JobChanged(TypedDict):
    """A job as it is now."""

    type: Literal["job"]
    id: int
    job: Job


class Figures(TypedDict):
    """What a job reports while it runs. `latest`: the newest values of its series, of which others stay as they are;
    `progress` None: as before."""

    latest: dict[str, float]
    progress: Progress | None
    eta_s: float | None


class FiguresChanged(TypedDict):
    """The figures of jobs as they are now, by job; the rest of each job is as before."""

    type: Literal["figures"]
    id: int
    jobs: dict[str, Figures]


class NodesChanged(TypedDict):
    """All nodes as they are now."""

    type: Literal["nodes"]
    id: int
    nodes: list[Node]


class MetricsAdded(TypedDict):
    """Points behind those that were sent."""

    type: Literal["metrics"]
    id: int
    series: dict[str, Points]


class MediaAdded(TypedDict):
    """A table or histogram of this name was stored; `GET /jobs/{id}/media` has it."""

    type: Literal["media"]
    id: int
    name: str


class LogAdded(TypedDict):
    """A piece of a replica's log from a byte offset. `times`: (byte offset, Unix ms), ascending: what begins there came
    then, by the server's clock; the first may lie before the piece."""

    type: Literal["log"]
    id: int
    replica_id: str
    offset: int
    text: str
    times: list[tuple[int, int]]


class GraphUsed(StreamGraph):
    """A stream uses another graph; it stands among the frames."""

    type: Literal["graph"]
    id: int


class Gap(TypedDict):
    """Rows that were lost, by kind of frame."""

    type: Literal["gap"]
    id: int
    dropped: dict[str, int]


class Degraded(TypedDict):
    """The browser is behind and gets less; `reason` null: it has caught up."""

    type: Literal["degraded"]
    id: int
    reason: str | None


class EventAdded(TypedDict):
    """A change of state."""

    type: Literal["event"]
    id: int
    event: Event


class ConditionsChanged(TypedDict):
    """All conditions of the server as they are now; none: all is well."""

    type: Literal["conditions"]
    id: int
    conditions: list[Condition]


class SubscriptionFailed(TypedDict):
    """The database could not be read for a subscription, which has ended: subscribe again."""

    type: Literal["unavailable"]
    id: int
    detail: str


ServerMessage = (
    JobsSnapshot
    | JobSnapshot
    | JobChanged
    | FiguresChanged
    | NodesChanged
    | MetricsAdded
    | MediaAdded
    | LogAdded
    | GraphUsed
    | Gap
    | Degraded
    | EventAdded
    | ConditionsChanged
    | SubscriptionFailed
)


def schemas(ref_template: str) -> dict[str, Any]:
    """Return the JSON schemas of what a browser receives, by name, `ServerMessage` and `GraphDocument` among them."""
    messages = TypeAdapter(ServerMessage).json_schema(ref_template=ref_template, mode="serialization")
    document = GraphDocument.model_json_schema(ref_template=ref_template, mode="serialization")
    found = {**messages.pop("$defs"), "ServerMessage": messages, **document.pop("$defs"), "GraphDocument": document}
    return {name: _resolved(schema, ref_template) for name, schema in found.items()}


def _resolved(schema: Any, ref_template: str) -> Any:
    if isinstance(schema, list):
        return [_resolved(item, ref_template) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if REST in schema:
        return {"$ref": ref_template.format(model=schema[REST])}
    return {key: _resolved(item, ref_template) for key, item in schema.items()}
