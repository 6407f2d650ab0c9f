"""A receiver of webhooks on a real socket: notes what comes, answers as the test says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.waiting import until_answer


@dataclass
class Receiver:
    """What came, and what is answered: `answers` first to last, then 200. `held`: no answer while it is clear."""

    url: str = ""
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    held: threading.Event = field(default_factory=threading.Event)

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.got]

    def ids(self) -> set[str]:
        return {headers["webhook-id"] for headers, _ in self.got}

    async def received(self, count: int) -> list[dict[str, Any]]:
        """Return the bodies once there are so many."""

        async def bodies() -> list[dict[str, Any]]:
            return self.bodies()

        return await until_answer(bodies, lambda found: len(found) >= count)


@contextmanager
def receiving(*answers: int, holds: bool = False, drips: bool = False) -> Iterator[Receiver]:
    """Listen on a free port of this machine. `drips`: an answer without end, a byte at a time."""
    receiver = Receiver(answers=list(answers))
    if not holds:
        receiver.held.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the name that the base class calls
            body = self.rfile.read(size := int(self.headers["content-length"]))
            if len(body) < size:  # the sender was killed within it
                return
            receiver.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
            receiver.held.wait()
            self.send_response(receiver.answers.pop(0) if receiver.answers else 200)
            self.send_header("Location", receiver.url)
            self.send_header("Content-Length", "1000000000" if drips else "0")
            try:
                self.end_headers()
                while drips and not over.is_set():
                    self.wfile.write(b".")
                    time.sleep(0.01)
            except OSError:  # the other side closed
                return

        def log_message(self, format: str, *args: object) -> None:
            pass

    over = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        receiver.url = f"http://127.0.0.1:{server.server_port}/hook"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield receiver
        finally:
            over.set()
            receiver.held.set()
            server.shutdown()
            thread.join()
