"""A TCP proxy that can fail: cut what is connected, swallow answers, or fall silent with connections open."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """Passes connections to `port` on. `mute`: passes no answers. `overheard`: all that came, if it `listens`.

    `to`: the host of `port`. `at`: where it listens, by default at any port of this host.
    """

    def __init__(
        self, port: int, *, to: str = "127.0.0.1", at: tuple[str, int] = ("127.0.0.1", 0), listens: bool = False
    ) -> None:
        self._listens, self.overheard = listens, bytearray()
        self._to = (to, port)
        self.mute = threading.Event()
        self.muted = threading.Event()  # an answer was swallowed
        self._socket = socket.create_server(at)
        self.endpoint = f"{at[0]}:{self._socket.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.num_connections = self._half_open = 0
        self._start(self._accept)

    def _start(self, run: object, *args: object) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)  # type: ignore[arg-type]  # any callable
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._socket.accept()
            except OSError:
                return  # closed
            self.num_connections += 1
            try:
                far = socket.create_connection(self._to)
            except OSError:
                near.close()  # nobody listens there now
                continue
            for one in (near, far):  # as those do whose bytes pass through
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open += [near, far]
            self._sockets += [near, far]
            self._start(self._pass_on, near, far, self.num_connections, False)
            self._start(self._pass_on, far, near, self.num_connections, True)

    def _pass_on(self, source: socket.socket, target: socket.socket, number: int, answers: bool) -> None:
        with contextlib.suppress(OSError):  # cut
            while data := source.recv(1 << 16):
                self.overheard += data if self._listens else b""
                if answers and self.mute.is_set():
                    self.muted.set()
                elif number > self._half_open:
                    target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def go_half_open(self) -> None:
        """From now on nothing passes over the connections that there are, and nobody is told."""
        self._half_open = self.num_connections

    def lose(self) -> None:
        """Break all connections, and with them the answers that `mute` holds back; what connects anew has answers."""
        self.go_half_open()
        self.mute.clear()
        self.cut()

    def cut(self) -> None:
        """Break all connections."""
        pairs, self._open = self._open, []
        for one in pairs:
            with contextlib.suppress(OSError):  # broken already
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._threads[0].join()
        self.cut()
        for thread in self._threads[1:]:
            thread.join()
        for one in self._sockets:
            one.close()
