"""The thread that sends: it owns the connection, and redials with growing pauses. Training never waits for it.

The outbox is shared with the drain thread under one condition. A frame whose sending failed is sent again on the next
connection. So are figures that a server has not confirmed as stored, or an agent as written to its disk: those that the
kernel had taken and a dying agent had not read. Other frames of these are lost: a hole in the sequence numbers. A
process that ends while no agent answers leaves its figures in a file (`leave`), which the next agent reads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from penstock.backoff import Backoff
from penstock.errors import PeerError, Unavailable
from penstock.protocol.frames import Kind
from penstock.telemetry.link import Link
from penstock.telemetry.outbox import Outbox, Parcel
from penstock.telemetry.tally import Tally

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0
_log = logging.getLogger(__name__)


class Sender:
    """Sends an outbox over whatever `dial` opens, until closed. `on_end`: called if it ends earlier (refused).

    `leave`: opens what takes the rest when nothing can be dialled at the end.
    """

    def __init__(
        self,
        outbox: Outbox,
        dial: Callable[[], Link],
        *,
        on_end: Callable[[], None],
        leave: Callable[[], Link] | None = None,
    ) -> None:
        self._outbox = outbox
        self._dial = dial
        self._on_end = on_end
        self._leave = leave
        self._changed = threading.Condition()
        self._closing = False
        self._redial = False
        self._is_logged = False
        self._thread = threading.Thread(target=self._run, name="penstock-telemetry-send", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def post(
        self, items: Iterable[Parcel], *, lost_events: int = 0, counted: Mapping[Kind, Tally] | None = None
    ) -> None:
        """Put frames into the outbox and wake the thread. `counted`: tallies as they are with these frames passed."""
        with self._changed:
            for item in items:
                self._outbox.put(item)
            self._outbox.count_dropped(Kind.OP_EVENTS, lost_events)
            for kind, tally in (counted or {}).items():
                self._outbox.counted(kind, tally)
            self._changed.notify()

    def edit(self, change: Callable[[Outbox], None], *, redial: bool = False) -> None:
        """Change the outbox under its lock. `redial`: send GOODBYE on the open connection, and open another."""
        with self._changed:
            change(self._outbox)
            self._redial = self._redial or redial
            self._changed.notify()

    def close(self, *, timeout_s: float) -> bool:
        """Send what is there, then end. Returns False if that took longer: the thread is a daemon."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._dial_and_serve()
        except Exception:  # noqa: BLE001 - a boundary: a fault of the telemetry must not end the training
            _log.exception("sending telemetry failed and is switched off; training goes on")
            self._on_end()

    def _dial_and_serve(self) -> None:
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            last = self._closing  # a dial that began after `close` is the last one
            try:
                link = self._dial()
            except PeerError as error:
                _log.warning("%s. Training goes on unwatched.", error)
                self._on_end()
                return
            except Unavailable as error:
                if self._rest(error, backoff.wait_s(), last=last):
                    self._leave_rest()
                    return
                continue
            backoff.reset()
            if self._serve(link):
                return

    def _rest(self, error: Unavailable, pause_s: float, *, last: bool) -> bool:
        """Wait before the next dial, or until the session closes; return True if there is none."""
        if not self._is_logged:
            _log.warning("%s. Training goes on; telemetry is kept and sent when it is back.", error)
            self._is_logged = True
        with self._changed:
            if not last:
                self._changed.wait_for(lambda: self._closing, pause_s)
        return last

    def _leave_rest(self) -> None:
        if self._leave is None:
            return
        try:
            self._serve(self._leave())
        except Unavailable as error:
            _log.warning("%s.", error)

    def _serve(self, link: Link) -> bool:
        """Send until the session closes (True) or the connection breaks (False)."""
        with self._changed:
            self._outbox.connected(stream=link.stream, epoch=link.epoch, keeps=link.confirms)
            self._redial = False
        self._is_logged = False
        try:
            while True:
                item, done = self._next(link.idle_s, link.stored_seq)
                if item is not None:
                    self._send(link, item)
                elif done:
                    return self._ended(link)
                else:
                    link.idle()
        except Unavailable as error:
            _log.debug("%s. Training goes on; dialling again.", error)
            time.sleep(FIRST_PAUSE_S)  # a peer that accepts and hangs up at once must not make this thread spin
            return False
        finally:
            link.close()

    def _ended(self, link: Link) -> bool:
        """Send GOODBYE if only this connection ends, since what registered on it goes with it; else return True."""
        with self._changed:
            if not self._redial:
                return True
            items = self._outbox.farewell()
            self._outbox.stored(None)  # what is kept belongs to the registration that ends here
        for item in items:
            self._send(link, item)
        return False

    def _next(self, timeout_s: float, stored_seq: int) -> tuple[Parcel | None, bool]:
        """Wait for a frame; (None, True) if this connection is done, (None, False) after `timeout_s`."""
        with self._changed:
            self._outbox.stored(stored_seq)
            self._changed.wait_for(lambda: self._redial or self._closing or not self._outbox.empty, timeout_s)
            if self._redial:
                return None, True
            item = self._outbox.take()
            return item, item is None and self._closing

    def _send(self, link: Link, item: Parcel) -> None:
        try:
            link.send(item)
        except Unavailable:
            with self._changed:
                self._outbox.put_back(item)
            raise
