"""Channels between trainers and parameter servers: a step's tensors without the interpreter (`src/ps`).

A trainer's operators use the open `Session` of their remote; a server's threads take each `Request` from an `Answers`.
Importing this registers the operators `penstock::send_ahead`, `send_step`, `recv_step`, `prefetch`, `geo` and
`geo_step` for CPU tensors.
"""

from __future__ import annotations

import torch as _  # noqa: F401 - its libraries are what the native one is linked with

from penstock.native import check_built

check_built("_ps")

from penstock.native._ps import (  # noqa: E402 - a library built for another torch must not be loaded
    AHEAD,
    LOOK_UP,
    NUM_CHANNELS,
    STEP,
    Answers,
    Block,
    BlockWords,
    LocalSteps,
    LogFile,
    Prepared,
    Request,
    SecureSocket,
    Session,
    TlsContext,
    Traffic,
    close_local_steps,
    close_session,
    crc32,
    incoming,
    know_layout,
    load_openssl,
    meets,
    next_number,
    open_local_steps,
    open_session,
    outgoing,
    repeats_step,
)

__all__ = [
    "AHEAD",
    "LOOK_UP",
    "NUM_CHANNELS",
    "STEP",
    "Answers",
    "Block",
    "BlockWords",
    "LocalSteps",
    "LogFile",
    "Prepared",
    "Request",
    "SecureSocket",
    "Session",
    "TlsContext",
    "Traffic",
    "close_local_steps",
    "close_session",
    "crc32",
    "incoming",
    "know_layout",
    "load_openssl",
    "meets",
    "next_number",
    "open_local_steps",
    "open_session",
    "outgoing",
    "repeats_step",
]
