"""Peers that time themselves: a process in an environment of its own that answers a word with seconds.

A line of JSON goes in, what to do; a line comes out, {"seconds"}. The first line says that the peer is ready. Nothing
waits for ever, and after the `with` block, or a failure at its beginning, the process is gone.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from bench.peers import ROOT
from bench.peers.lines import LineReader
from bench.peers.remote import child_environment

START_LIMIT_S = 300.0
REPLY_LIMIT_S = 120.0


class TimedPeer:
    """The process, within a `with` block. Raises RuntimeError, with the command, if it fails or takes too long."""

    def __init__(self, command: Sequence[str], *, threads: int) -> None:
        self._command, self._threads = command, threads

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env={**child_environment(os.environ, "installed"), "OMP_NUM_THREADS": str(self._threads)},
        )
        assert self._process.stdout is not None
        self._lines = LineReader(self._process.stdout)
        try:
            self._reply(START_LIMIT_S)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    def ask(self, what: str) -> float:
        """Have it done; return the seconds that it took, as the peer measured them."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")
        self._process.stdin.flush()
        return float(self._reply(REPLY_LIMIT_S)["seconds"])

    def _reply(self, limit_s: float) -> dict[str, Any]:
        try:
            line = self._lines.line(limit_s)
        except TimeoutError as error:
            raise RuntimeError(f"the peer {error}: {shlex.join(self._command)}") from error
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"the peer ended with {code}; to see why: {shlex.join(self._command)}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _stop(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
