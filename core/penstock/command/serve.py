"""up, demo."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from penstock.command.options import Env, Host, Json, NoEnv, Port, StateDir
from penstock.command.output import emit_json, note

LOOPBACK = "127.0.0.1"


def up(
    host: Host = LOOPBACK,
    port: Port = 7080,
    state_dir: StateDir = None,
    no_agent: Annotated[bool, typer.Option("--no-agent", help="start the server alone")] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="serve plain HTTP although other machines can reach --host")
    ] = False,
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", help="certificate chain (PEM) for --host: serve HTTPS")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="private key of --tls-cert (PEM)")] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option("--tls-client-ca", help="authority (PEM) of client certificates: each agent needs one"),
    ] = None,
    tls_client_required: Annotated[
        str | None, typer.Option("--tls-client-required", help="agents, or all: who needs one (default: agents)")
    ] = None,
    json: Json = False,
) -> None:
    """Run a server and a local agent until stopped (Ctrl-C or SIGTERM); that ends all running jobs' processes too.

    The agent finds the authority of --tls-cert by SSL_CERT_FILE, if the system does not know it, and its own
    certificate for --tls-client-ca by PENSTOCK_TLS_CERT and PENSTOCK_TLS_KEY.
    """
    from penstock.command.profile import home
    from penstock.command.stack import Stack  # loads httpx
    from penstock.process.signals import Stopped, stopped_by_signal  # loads subprocess and ctypes

    options = ["--insecure"] if insecure else []
    given = {
        "--tls-cert": tls_cert, "--tls-key": tls_key, "--tls-client-ca": tls_client_ca,
        "--tls-client-required": tls_client_required,
    }  # fmt: skip
    options += [text for flag, value in given.items() if value is not None for text in (flag, str(value))]
    folder = state_dir or home()
    try:
        with (
            stopped_by_signal(),
            Stack(
                folder, host=host, port=port, agent=not no_agent, environ=os.environ, server_options=options
            ) as stack,
        ):
            link = stack.login_link()
            emit_json({"url": stack.url, "login_link": link}) if json else print(f"Penstock: {link}", flush=True)
            note("Ctrl-C stops it")
            stack.serve()
    except Stopped as signal:
        note(f"stopped by {signal}")


def backup(
    file: Annotated[Path, typer.Argument(help="where the backup is written")],
    state_dir: StateDir = None,
    without_telemetry: Annotated[
        bool, typer.Option("--without-telemetry", help="leave recorded frames out, which are most of it")
    ] = False,
) -> None:
    """Write a backup of this machine's server, which may run meanwhile. It holds secrets: keep it as such."""
    _run_server("backup", file, state_dir, ["--without-telemetry"] if without_telemetry else [])


def restore(file: Annotated[Path, typer.Argument(help="a backup")], state_dir: StateDir = None) -> None:
    """Make a backup a server's state again, in a folder that is new or empty."""
    _run_server("restore", file, state_dir, [])


def _run_server(action: str, file: Path, state_dir: Path | None, options: list[str]) -> NoReturn:
    from penstock.command.profile import home

    folder = (state_dir or home()) / "server"
    sys.stdout.flush()
    line = [sys.executable, "-m", "penstock_server", action, str(file), "--state-dir", str(folder), *options]
    os.execve(sys.executable, line, dict(os.environ))


def demo(
    exit_when_done: Annotated[bool, typer.Option("--exit-when-done", help="stop when the job has ended")] = False,
    passes: Annotated[int | None, typer.Option("--passes", min=1, help="passes over the data (default: 20)")] = None,
    rows: Annotated[int | None, typer.Option("--rows", min=1, help="rows to train on (default: all)")] = None,
    env: Env = None,
    no_env: NoEnv = False,
    no_open: Annotated[bool, typer.Option("--no-open", help="do not open a browser")] = False,
    host: Host = LOOPBACK,
    port: Port = 7080,
    state_dir: StateDir = None,
    json: Json = False,
    job: Annotated[Path | None, typer.Option("--job", hidden=True, help="another job than the example")] = None,
) -> None:
    """Train CTR-DNN on real flights as a job, and show it live in a browser."""
    from penstock.command.demo import Demo, run  # loads httpx and pydantic
    from penstock.command.passing import given

    settings = Demo(
        exit_when_done=exit_when_done,
        options={"--passes": passes, "--rows": rows},
        env=given(env or ()),
        no_env=no_env,
        open_browser=not no_open,
        json=json,
        job=job,
    )
    raise typer.Exit(run(settings, host=host, port=port, state_dir=state_dir))
