"""What `penstock doctor` reads: machine, torch, folders, port and server. The readings judge themselves."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.command import profile
from penstock.command.doctor_readings import Gpus, Kernels, Libraries, Native, Port, Server, Torch
from penstock.command.stack import check_port
from penstock.errors import PenstockError
from penstock.machine.capability import Capability
from penstock.machine.findings import Finding, MachineReading
from penstock.machine.survey import read_machine, read_state_folder
from penstock.settings import MATRIX_KERNELS
from penstock.version import __version__

_DRIVER = Path("/proc/driver/nvidia")
TORCH_S = 60.0  # its import takes two; a busy machine or a network file system more


def diagnose(*, url: str | None, token: str | None, state_dir: Path, with_torch: bool) -> tuple[Finding, ...]:
    """Return all findings; torch is loaded by another process meanwhile. Never raises for what is missing."""
    with ThreadPoolExecutor(1) as pool:
        of_torch = pool.submit(read_torch) if with_torch else None
        readings: list[MachineReading] = [*read_machine(), _state_folder(state_dir), *_server_and_port(url, token)]
        readings.extend(of_torch.result() if of_torch else [])
    return tuple(reading.finding() for reading in readings)


def _state_folder(path: Path) -> MachineReading:
    return read_state_folder(path, advice="give 'penstock up' and the agent another folder with --state-dir")


def read_torch() -> Sequence[MachineReading]:
    """Read torch, the native libraries, kernels and GPUs in another process."""
    if importlib.util.find_spec("torch") is None:
        return [Torch("", is_installed=False), _gpus({})]
    argv = [sys.executable, "-P", "-m", "penstock.command.doctor_torch"]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TORCH_S, check=False
        )
        found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
        error = "" if done.returncode == 0 else _end_of(done)
    except subprocess.TimeoutExpired:
        found, error = {}, f"it did not load within {TORCH_S:g} s"
    except (OSError, ValueError) as failed:
        found, error = {}, str(failed)
    return torch_readings(found, error, MATRIX_KERNELS.text() or "")


def torch_readings(found: dict[str, Any], error: str, setting: str) -> Sequence[MachineReading]:
    """Return the readings of what `doctor_torch` printed; of torch's failure if it printed nothing."""
    if not found:
        return [Torch("", error), _gpus({})]
    torch = Torch(found["version"], cuda=found["cuda"] or "", capability=found["capability"])
    native = Native(torch.version, found["native"])
    if native.error:
        return [torch, native, _gpus(found)]
    probed = tuple(Capability(**one) for one in found["probed"])
    threads = tuple(one for one in probed if one.name.startswith("threads."))
    vendor = tuple(one for one in probed if one.name == "matrix.mkl_vendor")
    channels = tuple(one for one in probed if one.name.startswith("channels."))
    kernels = tuple(one for one in probed if one not in (*threads, *vendor, *channels))
    of_kernels = Kernels(setting, kernels, found.get("measured", {}))
    libraries = (("threads", threads), ("MKL", vendor), ("parameter servers", channels))
    return [torch, native, of_kernels, *(Libraries(*one) for one in libraries), _gpus(found)]


def _end_of(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"loading it ended with {signal.Signals(-done.returncode).name}"
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def _gpus(found: dict[str, Any]) -> Gpus:
    devices, version = _DRIVER / "gpus", _DRIVER / "version"
    installed = len(list(devices.iterdir())) if devices.is_dir() else 0
    words = version.read_text(encoding="utf-8", errors="replace").split() if version.is_file() else []
    driver = next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()), "")
    return Gpus(installed, driver, tuple(found.get("gpus", ())), bool(found.get("cuda")))


def _server_and_port(url: str | None, token: str | None) -> tuple[MachineReading, MachineReading]:
    server = read_server(url, token)
    default = urlsplit(profile.DEFAULT_URL)
    host, number = str(default.hostname), int(default.port or 0)
    try:
        check_port(host, number)
        taken = ""
    except PenstockError as error:
        taken = str(error)
    is_ours = server.error is None and urlsplit(server.url).port == number if server.url else False
    return server, Port(number, taken, is_ours)


def read_server(url: str | None, token: str | None) -> Server:
    """Ask the server that commands would use for its version."""
    try:
        address, secret = profile.resolve(url, token)
    except PenstockError as error:
        if url is None and error.code == "unavailable":
            return Server("", "", __version__, None, is_asked_for=False)
        return Server(url or "the profile's", "", __version__, error, is_asked_for=True)
    from penstock.client import Client  # loads httpx

    try:
        with Client(address, token=secret) as client:
            version = client.server_version()
            return Server(client.url, version, __version__, None, is_asked_for=url is not None)
    except PenstockError as error:
        return Server(address, "", __version__, error, is_asked_for=url is not None)
