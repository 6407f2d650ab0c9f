"""A parameter server as a process of its own: `python -m tests.ps.server_process ENDPOINT STATE_DIR FANIN`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tests.ps.torch_storage import TorchStorage

from penstock.ps.server import ParameterServer
from penstock.ps.settings import ServerSettings

SHAPES: dict[str, tuple[int, ...]] = {"a": (40, 30), "b": (7,)}


def main(endpoint: str, state: str, fanin: str) -> None:
    """Serve until all trainers have left; say the port, and at the end the values' sum."""
    settings = ServerSettings(endpoint, 0, int(fanin), "sync", lease_s=10.0, state_dir=Path(state))
    storage = TorchStorage(SHAPES, dtype=torch.float64)
    with ParameterServer(settings, storage) as server:
        server.start()
        print(f"127.0.0.1:{server.port}", flush=True)
        server.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
