"""What lines of a data set may begin with: the id of the instance, and its content, each as `1 <text>`.

A thread reads the lines and passes them on without their headings. The id becomes the value of a slot of its own,
`ID_SLOT`, a number of 63 bits that follows from its text alone: equal in all files, processes and trainers. A line
without the headings is passed on so that it cannot be parsed, and is then a bad line like others.
Source: MultiSlotInMemoryDataFeed with parse_ins_id and parse_content (Fluid 1.8).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.dataset.slots import Slot

ID_SLOT = Slot("@INSTANCE_ID", False, 1, (1,))


@dataclass(frozen=True, slots=True)
class Headings:
    """Which headings lines have."""

    has_id: bool = False
    has_content: bool = False

    def without(self, line: bytes) -> bytes:
        """Return a line as the parser takes it: the number of the id, then the slots."""
        rest, number = line, b""
        for is_id in (True,) * self.has_id + (False,) * self.has_content:
            parts = rest.split(None, 2)
            if len(parts) < 3 or parts[0] != b"1":
                return b"? " + line  # which no slot begins with
            rest = parts[2]
            if is_id:
                number = b"1 %d " % number_of(parts[1])
        return number + rest


def number_of(instance: bytes) -> int:
    """Return the number of an id."""
    return int.from_bytes(hashlib.blake2b(instance, digest_size=8).digest(), "little") >> 1


@contextlib.contextmanager
def taken(headings: Headings | None, descriptor: int) -> Iterator[int]:
    """Give a descriptor of the lines without their headings; without headings, the one that is given."""
    if headings is None:
        yield descriptor
        return
    reading, writing = os.pipe2(os.O_CLOEXEC)
    thread = threading.Thread(target=_pass_on, args=(headings, os.dup(descriptor), writing), name="penstock-headings")
    thread.start()
    try:
        yield reading
    finally:
        os.close(reading)
        thread.join()


def _pass_on(headings: Headings, descriptor: int, writing: int) -> None:
    with os.fdopen(descriptor, "rb") as lines, contextlib.suppress(BrokenPipeError), os.fdopen(writing, "wb") as out:
        for line in lines:
            out.write(headings.without(line))
