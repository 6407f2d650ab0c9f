"""NewTypes for identifiers, so that a job id is never passed where a node id is meant."""

from typing import NewType

JobId = NewType("JobId", str)
"""UUIDv7 text of a job."""
NodeId = NewType("NodeId", str)
"""UUIDv7 text of a node."""
ReplicaId = NewType("ReplicaId", str)
"""UUIDv7 text of one process of one attempt of a job."""
StreamId = NewType("StreamId", int)
"""Number (u32, given by the server) that stands for a replica in telemetry frames."""
Epoch = NewType("Epoch", int)
"""Fencing number of an attempt: the first attempt has epoch 1, every retry one more."""
GraphHash = NewType("GraphHash", str)
"""SHA-256, lower-case hex, of a graph document's canonical JSON."""
