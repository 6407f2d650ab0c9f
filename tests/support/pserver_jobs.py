"""Jobs of parameter servers whose processes get the environment of `launch_ps`, and are forked (tests.support.nursery).

tests/distributed has its own for what the launcher does besides.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tests.support.nursery import Forked, Nursery

from penstock.distributed import launch_ps
from penstock.distributed.arguments import hosts_of


def begin_job(
    nursery: Nursery, folder: Path, script: Path, *options: str, servers: int, trainers: int, environ: Mapping[str, str]
) -> list[Forked]:
    """Start a script as a job in `folder`, where its servers may save; return servers, then trainers.

    Output goes to `folder`/logs, which is made.
    """
    nodes = ["--server_num", str(servers), "--worker_num", str(trainers), "--log_dir", str(folder / "logs")]
    args = launch_ps.parser().parse_args([*nodes, str(script)])
    own = {"PENSTOCK_PS_SAVE_DIRS": str(folder), **environ}
    plan = launch_ps.plan_of(args, hosts_of(None, args.node_ip), {**os.environ, **own})
    args.log_dir.mkdir(parents=True, exist_ok=True)
    argv = [str(script), *options]
    return [Forked(nursery, one.log, argv, {**own, **one.env}, cwd=folder) for one in plan.processes]
