"""Runs the containers of pods of the stand-in as processes of this host: what a kubelet would start."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.engines.api_server import Object
from tests.engines.cluster_stand_in import StandIn

from penstock.process import proc

STATE = "/var/lib/penstock"


class Kubelet:
    """Starts what pods say. Each pod has a folder in place of its emptyDir; all have the address of the loopback."""

    def __init__(self, cluster: StandIn, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        self._is_closing = False
        cluster.on_start, cluster.on_stop = self.start, self.stop

    def start(self, pod: Object) -> None:
        """Start the container of a pod, as the manifest says."""
        name = pod["metadata"]["name"]
        state = self._folder / name
        (state / "home").mkdir(parents=True)
        (container,) = pod["spec"]["containers"]
        environ = {**os.environ, "POD_OF_TEST": str(state)}
        environ |= {one["name"]: self._value(pod, one).replace(STATE, str(state)) for one in container["env"]}
        argv = [*container["command"], *container["args"]]
        argv = [re.sub(r"\$\((\w+)\)", lambda found: environ[found[1]], one) for one in argv]
        argv = [sys.executable, *(one.replace(STATE, str(state)) for one in argv[1:])]
        with (state / "log").open("wb") as log:
            process = subprocess.Popen(argv, env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self._started[name] = process
        waiting = threading.Thread(target=self._wait, args=(pod, process))
        self._threads.append(waiting)
        waiting.start()

    def stop(self, pod: Object) -> None:
        """End the container of a pod: at once if its node is gone, else in order."""
        process = self._started.get(pod["metadata"]["name"])
        if process is None or process.poll() is not None:
            return
        if pod["spec"]["nodeName"] in self._cluster.nodes:
            process.terminate()
            return
        mark = f"POD_OF_TEST={self._folder / pod['metadata']['name']}"
        proc.send(proc.with_environment(mark), signal.SIGKILL)

    def close(self) -> None:
        """End all."""
        self._is_closing = True
        for process in self._started.values():
            process.terminate()
        for thread in self._threads:
            thread.join()

    def _wait(self, pod: Object, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        with self._cluster.store.lock:
            if not self._is_closing and pod["status"]["phase"] == "Running" and status >= 0:
                self._cluster.exited(pod, status)

    def _value(self, pod: Object, variable: Object) -> str:
        if "value" in variable:
            return str(variable["value"])
        source, store = variable["valueFrom"], self._cluster.store
        if "secretKeyRef" in source:
            return str(
                store.get("secrets", source["secretKeyRef"]["name"])["stringData"][source["secretKeyRef"]["key"]]
            )
        if "configMapKeyRef" in source:
            wanted = source["configMapKeyRef"]
            return str(store.get("configmaps", wanted["name"])["data"][wanted["key"]])
        path = source["fieldRef"]["fieldPath"]
        if path == "status.podIP":
            return "127.0.0.1"
        return str(pod["metadata"]["annotations"][path.removeprefix("metadata.annotations['").removesuffix("']")])
