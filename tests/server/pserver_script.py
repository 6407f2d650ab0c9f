"""A process of a pserver job that trains nothing: says what it was told, then waits for the word to end."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

LISTED = ("PADDLE_", "TRAINING_", "POD_", "PENSTOCK_")


def main() -> None:
    """Say it once, in a file of its own, and end with the code that stands in ROLE-INDEX.end."""
    folder, role = Path(os.environ["SAY_TO"]), os.environ["TRAINING_ROLE"]
    index = int(os.environ["PADDLE_TRAINER_ID" if role == "TRAINER" else "PADDLE_PSERVER_ID"])
    with socket.socket() as listener:
        if role == "PSERVER":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((os.environ["POD_IP"], int(os.environ["PADDLE_PORT"])))
            listener.listen()
        incarnation = len(list(folder.glob(f"{role}-{index}-*.json")))
        told = {"role": role, "index": index, "pid": os.getpid(), "incarnation": incarnation,
                "env": {k: v for k, v in os.environ.items() if k.startswith(LISTED)}}  # fmt: skip
        part = folder / f"{role}-{index}-{incarnation}.part"
        part.write_text(json.dumps(told))
        part.replace(part.with_suffix(".json"))
        _tell_exchange(role, index)
        end = folder / f"{role}-{index}.end"
        while not end.exists():
            time.sleep(0.02)
        code = int(end.read_text() or 0)
        print(f"{role.lower()} ends with code {code}", file=sys.stderr)
        sys.exit(code)


def _tell_exchange(role: str, index: int) -> None:
    if "TELL_EXCHANGE" not in os.environ:
        return
    from penstock import telemetry
    from penstock.ps.counters import Counters

    counters = Counters()
    endpoints = os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")
    telemetry.exchange(counters, endpoints=endpoints if role == "TRAINER" else ())
    for peer in endpoints if role == "TRAINER" else [f"trainer {i}" for i in range(2)]:
        counters.add(peer, "w.block0", calls=1 + index, sent_bytes=64, staleness=3 if role == "PSERVER" else 0)


if __name__ == "__main__":
    main()
