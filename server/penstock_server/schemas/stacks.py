"""Python stacks of a replica, as the REST API answers them."""

from __future__ import annotations

from pydantic import Field

from penstock.identity import Role
from penstock_server.schemas.api import Answer, Timestamp


class PythonFrame(Answer):
    """A function that is being called."""

    name: str
    file: str
    line: int = Field(description="at which it is; 0: unknown")
    own: bool = Field(description="of the job's own code, not of a library")


class PythonThread(Answer):
    """A thread of a Python process."""

    name: str
    os_thread_id: int | None
    active: bool = Field(description="it uses a processor")
    owns_gil: bool
    frames: list[PythonFrame] = Field(description="the innermost first")


class PythonProcess(Answer):
    """A Python process of a replica."""

    pid: int
    command: str
    threads: list[PythonThread]
    error: str = Field(description="why there are no threads, and what to do; empty if they were read")


class PythonStacks(Answer):
    """Where the Python processes of a replica are: its entrypoint and those below it. They were not stopped."""

    job_id: str
    replica_id: str
    role: Role
    index: int
    taken_at: Timestamp
    processes: list[PythonProcess]
    skip: int = Field(description="Python processes that were passed over, as was asked")
    num_left: int = Field(description="Python processes behind those that are here: ask for them with `skip`")
