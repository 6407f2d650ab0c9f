"""The transpiler script of Fluid's cluster manual, completed where lines were lost, on a small regression in float64.

Role and endpoints come from the environment that launch_ps sets; the manual leaves that to the cluster.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import penstock as fluid

STEPS, BATCH = 12, 8


def network() -> Any:
    fluid.default_startup_program().random_seed = 7
    x = fluid.layers.data(name="x", shape=[6], dtype="float64")
    y = fluid.layers.data(name="y", shape=[1], dtype="float64")
    return fluid.layers.mean(fluid.layers.square_error_cost(input=fluid.layers.fc(input=x, size=1), label=y))


def train_loop(program: Any, loss: Any, part: int, num_parts: int) -> list[float]:
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    losses, each = [], BATCH // num_parts
    for step in range(STEPS):
        x = np.random.default_rng(step).standard_normal((BATCH, 6))[part * each : (part + 1) * each]
        (found,) = exe.run(program, feed={"x": x, "y": x.sum(1, keepdims=True)}, fetch_list=[loss])
        losses.append(float(np.mean(found)))
    exe.close()
    return losses


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["sync", "async"], default="sync")
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--out", type=Path, required=True, help="folder for losses and parameters")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    loss = network()
    fluid.optimizer.SGD(learning_rate=0.1).minimize(loss)
    trainer_id, trainers = 0, 1
    if args.local:
        losses = train_loop(fluid.default_main_program(), loss, 0, 1)
    else:
        role = os.environ["TRAINING_ROLE"]
        trainer_id = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
        trainers = int(os.environ["PADDLE_TRAINERS_NUM"])
        pserver_endpoints = os.environ["PADDLE_PSERVERS_IP_PORT_LIST"]
        t = fluid.DistributeTranspiler()
        if args.mode == "sync":
            t.transpile(trainer_id, pservers=pserver_endpoints, trainers=trainers)
        else:
            t.transpile(trainer_id, pservers=pserver_endpoints, trainers=trainers, sync_mode=False)
        if role == "PSERVER":
            current_endpoint = f"{os.environ['POD_IP']}:{os.environ['PADDLE_PORT']}"
            pserver_prog = t.get_pserver_program(current_endpoint)
            pserver_startup = t.get_startup_program(current_endpoint, pserver_prog)
            exe = fluid.Executor(fluid.CPUPlace())
            exe.run(pserver_startup)
            exe.run(pserver_prog)
            return
        elif role == "TRAINER":
            losses = train_loop(t.get_trainer_program(), loss, trainer_id, trainers)
    if trainer_id == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        found = {p.name: fluid.global_scope().find(p.name) for p in fluid.default_main_program().all_parameters()}
        values = {name: value.numpy() for name, value in found.items() if value is not None}
        np.savez(args.out / "result.npz", losses=losses, **values)


if __name__ == "__main__":
    main()
