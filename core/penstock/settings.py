"""Settings of a process that come from its environment: one tree of names, types, units, defaults and meanings.

Guarantees: every variable that Penstock reads, and that is not the identity of a process (`penstock.identity`), is one
`Setting` here, parsed in one way. A variable that is empty is not set; one that is wrong is a SpecError with its name,
its value and what was expected. Nothing is cached: a setting has the value of the environment at the call. Variables
of other libraries are listed because they pass to jobs; `docs/environment.md` is this tree for users, and C++ reads
PENSTOCK_ABSENT too. Server and agent have settings of their own besides (`penstock_server.settings`). No torch.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, TypeVar

from penstock.errors import SpecError
from penstock.logger import is_first

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class VariableKind(StrEnum):
    """What a variable is about, which decides whether it reaches a job that does not set it by its own `env`."""

    SETTING = "setting"  # how a job runs: passes from the submitter's environment
    PATH = "path"  # a file or folder as the job's processes reach it: only the job's own `env` names it
    NODE = "node"  # a property of a machine: passes from the agent's environment to what runs on its node
    PLACE = "place"  # identity and addresses of a process in a job: set by agents and launchers, never passes
    SECRET = "secret"  # never passes
    TOOL = "tool"  # read by the command, the server, the agent or the build: never passes


@dataclass(frozen=True, slots=True)
class Values(Generic[T_co]):
    """Type of a setting. `shown`: with its unit, for the documentation; `expected`: for errors.

    `parse` raises ValueError for a text that is no such value.
    """

    shown: str
    expected: str
    parse: Callable[[str], T_co]


@dataclass(frozen=True, slots=True)
class Setting(Generic[T]):
    """One variable. `shown_default`: the default in words, where it is no constant.

    `same_as`: another name of the setting, over which this one wins; `is_deprecated`: Fluid did not have that name.
    """

    name: str
    values: Values[T]
    default: T
    meaning: str
    kind: VariableKind = VariableKind.SETTING
    shown_default: str = ""
    same_as: str = ""
    is_deprecated: bool = False

    def __str__(self) -> str:
        return self.name

    def read(self, environ: Mapping[str, str] | None = None) -> T:
        """Return the value in `environ`, by default the process's environment. Raises SpecError."""
        for name in filter(None, (self.name, self.same_as)):
            text = (os.environ if environ is None else environ).get(name, "").strip()
            if text:
                if name == self.same_as and self.is_deprecated:
                    warn_deprecated(name, self.name)
                return self.parsed(text, f"the environment variable {name}")
        return self.default

    def text(self, environ: Mapping[str, str] | None = None) -> str | None:
        """Return the variable as it is; None if it is not set. For settings where an empty text has a meaning."""
        return (os.environ if environ is None else environ).get(self.name)

    def parsed(self, text: str, called: str) -> T:
        """Return the value that a text means. Raises SpecError; `called`: its beginning."""
        try:
            return self.values.parse(text)
        except ValueError:
            expected = self.values.expected
            message = f"{called} is {text!r}; expected {expected}"
            raise SpecError(message, pointer=self.name, got=text, expected=expected) from None

    @property
    def default_text(self) -> str:
        """The default, for the documentation."""
        kinds: Mapping[type, str] = {float: "g", bool: "d"}
        return self.shown_default or format(self.default, kinds.get(type(self.default), ""))

    def export(self, text: str) -> None:
        """Set the variable for this process and its children."""
        os.environ[self.name] = text


def warn_deprecated(name: str, instead: str) -> None:
    """Warn once in a process that a name of ours is deprecated."""
    if is_first(warn_deprecated, name):
        warnings.warn(f"{name} is deprecated: use {instead}", FutureWarning, stacklevel=4)


def with_prefixes(prefixes: tuple[str, ...]) -> dict[str, str]:
    """Return the variables whose names begin with one of `prefixes`, sorted."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


# ---------------------------------------------------------------- types


def _if(holds: bool, value: T) -> T:
    if not holds:
        raise ValueError
    return value


def whole(least: int, shown: str) -> Values[int]:
    """Return the type of whole numbers from `least` on."""
    expected = f"a whole number from {least} on"
    return Values(shown, expected, lambda text: _if(text.isdecimal() and int(text) >= least, int(text)))


def choice(*words: str) -> Values[str]:
    """Return the type of some words, in any case."""
    return Values(", ".join(words), f"one of {', '.join(words)}", lambda text: _if(text.lower() in words, text.lower()))


def number(shown: str) -> Values[float]:
    """Return the type of finite numbers."""
    return Values(shown, "a number", lambda text: _if(math.isfinite(float(text)), float(text)))


def seconds(name: str, default: float, meaning: str) -> Setting[float]:
    """Return a setting that is a time."""
    return Setting(name, SECONDS, default, meaning)


def text(name: str, shown: str, meaning: str, kind: VariableKind, shown_default: str) -> Setting[str]:
    """Return a setting that is any text, by default none."""
    return Setting(name, Values(shown, "a text", str), "", meaning, kind, shown_default)


def path(name: str, shown: str, meaning: str, kind: VariableKind, shown_default: str) -> Setting[Path | None]:
    """Return a setting that is a file or folder."""
    return Setting(name, Values(shown, "a path", Path), None, meaning, kind, shown_default)


def count(name: str, shown: str, meaning: str, kind: VariableKind, shown_default: str) -> Setting[int | None]:
    """Return a setting that is a number from 1 on."""
    return Setting(name, whole(1, shown), None, meaning, kind, shown_default)


_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
SECONDS = Values("s", "a number of seconds above 0", lambda text: _if(0 < float(text) < math.inf, float(text)))
SECONDS_OR_INF = Values("s; inf: never", SECONDS.expected, lambda text: _if(float(text) > 0, float(text)))
SWITCH = Values("0, 1", "1 or 0", lambda text: _if(text.lower() in _TRUE + _FALSE, text.lower() in _TRUE))
ZERO_OR_ONE = Values("0, 1", "0 or 1", lambda text: _if(text in ("0", "1"), int(text)))
NAMES = Values("names, comma-separated", "names", lambda text: tuple(filter(None, map(str.strip, text.split(",")))))
PATHS = Values("folders, as in PATH", "paths", lambda text: tuple(map(Path, filter(None, text.split(os.pathsep)))))
NUMBERS = Values("numbers, comma-separated", "numbers as '0,1'", lambda text: tuple(map(int, text.split(","))))

# ---------------------------------------------------------------- the tree

SETTING, PATH, NODE, PLACE, SECRET, TOOL = VariableKind

CPU_NUM = count("CPU_NUM", "replicas, from 1", "replicas of a ParallelExecutor on the CPU", SETTING, "number of cores")
NUM_THREADS: Setting[int | None] = Setting(
    "PENSTOCK_NUM_THREADS", whole(0, "threads; 0: four a replica"), None,
    "ExecutionStrategy.num_threads, over the script's", shown_default="the script's",
)  # fmt: skip
REDUCE_STRATEGY = Setting(
    "PENSTOCK_REDUCE_STRATEGY", choice("allreduce", "reduce"), "", "BuildStrategy.reduce_strategy, over the script's",
    shown_default="the script's",
)  # fmt: skip
MATRIX_KERNELS = Setting(
    "PENSTOCK_MATRIX_KERNELS", choice("auto", "torch", "onednn"), "auto", "kernels of float32 matmuls",
    same_as="FLAGS_matrix_kernels", is_deprecated=True,
)  # fmt: skip
CHECK_NAN = Setting(
    "PENSTOCK_CHECK_NAN", SWITCH, False, "check the outputs of each operator for NaN and infinity",
    same_as="FLAGS_check_nan_inf",
)  # fmt: skip
# Fluid's defaults are -1 (no limit) and 1 (one layer a bucket); docs/graph.md says what was measured.
FUSE_MEMORY_SIZE = Setting(
    "FLAGS_fuse_parameter_memory_size", number("MiB"), 0.0625, "gradients that are exchanged as one, in size"
)
FUSE_GROUPS_SIZE = Setting(
    "FLAGS_fuse_parameter_groups_size", number("gradients; -1: no limit"), -1.0, "the same, in number"
)
EAGER_DELETE = Setting(
    "FLAGS_eager_delete_tensor_gb", number("GiB"), 0.0, "below 0: temporaries keep their memory after a step"
)
SELECTED_GPUS: Setting[tuple[int, ...]] = Setting("FLAGS_selected_gpus", NUMBERS, (), "GPUs of this process", PLACE)

PADDLE_ALIAS = Setting(
    "PENSTOCK_PADDLE_ALIAS",
    choice("auto", "shadow"),
    "auto",
    "shadow: `import paddle` is Penstock also where paddle is installed",
)
LOCAL_TABLES = Setting(
    "PENSTOCK_LOCAL_TABLES", SWITCH, False,
    "a table with is_distributed=True is whole in a process whose program was not distributed; run-fluid sets it",
)  # fmt: skip
DISABLE_PLOT = Setting("DISABLE_PLOT", SWITCH, False, "`paddle.utils.plot.Ploter` draws nothing")

PS_DEADLINE_S = seconds("PENSTOCK_PS_DEADLINE_S", 30.0, "an unreachable server is an error after this time")
PS_LEASE_S = seconds(
    "PENSTOCK_PS_LEASE_S", 20.0, "a silent trainer is lost after this time; a trainer follows its server's if shorter"
)
PS_START_S = seconds("PENSTOCK_PS_START_S", 600.0, "how long processes wait for each other at the start")
PS_SNAPSHOT_S = seconds(
    "PENSTOCK_PS_SNAPSHOT_S", 60.0,
    "time between a server's snapshots; earlier when its log has 2 GiB, and twice the last snapshot's size",
)  # fmt: skip
PS_TRANSPORT = Setting(
    "PENSTOCK_PS_TRANSPORT",
    choice("auto", "tcp", "grpc"),
    "auto",
    "auto: shared memory between processes of one host; grpc: no connection but to the server's own port",
)
PS_SAVE_DIRS: Setting[tuple[Path, ...]] = Setting(
    "PENSTOCK_PS_SAVE_DIRS", PATHS, (), "where trainers may have a server save", PATH, "none"
)
PS_TLS_CA = path("PENSTOCK_PS_TLS_CA", "PEM file", "signs the certificates of servers", PATH, "no TLS")
PS_TLS_CERT = path("PENSTOCK_PS_TLS_CERT", "PEM file", "a server's certificate", PATH, "no TLS")
PS_TLS_KEY = path("PENSTOCK_PS_TLS_KEY", "PEM file", "the key of a server's certificate", SECRET, "no TLS")
PS_TOKEN = text("PENSTOCK_PS_TOKEN", "token", "opens the ports of a job's servers", SECRET, "made by the server")
PS_STATE_DIR = path("PENSTOCK_PS_STATE_DIR", "folder", "snapshots and log of a server", PLACE, "none")
PS_HANDOVER_DIR = "penstock_state"
"""Where a server without that folder leaves its state when it is stopped: in its working directory."""

COLLECTIVE_LEASE_S = Setting(
    "PENSTOCK_COLLECTIVE_LEASE_S", SECONDS_OR_INF, 5.0, "a silent rank is lost after this time"
)
COLLECTIVE_START_S = seconds("PENSTOCK_COLLECTIVE_START_S", 300.0, "how long ranks wait for each other at the start")
COLLECTIVE_TRANSPORT = Setting(
    "PENSTOCK_COLLECTIVE_TRANSPORT", choice("auto", "shared_memory", "gloo"), "auto", "how ranks exchange gradients"
)
GLOO_INTERFACES: Setting[tuple[str, ...]] = Setting(
    "GLOO_SOCKET_IFNAME", NAMES, (), "network interfaces of Gloo", NODE, "Gloo's choice"
)
NCCL_INTERFACES = text("NCCL_SOCKET_IFNAME", NAMES.shown, "network interfaces of NCCL", NODE, "NCCL's choice")

CHECKPOINT_EVERY_STEPS = count(
    "PENSTOCK_CHECKPOINT_EVERY_STEPS", "steps, from 1", "how often a checkpoint is written", SETTING,
    "`checkpoint` of the job",
)  # fmt: skip
CHECKPOINT_KEEP = Setting(
    "PENSTOCK_CHECKPOINT_KEEP", whole(1, "checkpoints, from 1"), 3, "how many of the latest stay",
    shown_default="`checkpoint` of the job, else 3",
)  # fmt: skip
CHECKPOINT_DIR = path("PENSTOCK_CHECKPOINT_DIR", "folder", "a job's checkpoints", PATH, "made by the agent")

ABSENT: Setting[tuple[str, ...]] = Setting(
    "PENSTOCK_ABSENT", NAMES, (), "capabilities to treat as absent", shown_default="none"
)
CACHE = path("PENSTOCK_CACHE", "folder", "what a machine measures or prepares once", NODE, "$XDG_CACHE_HOME/penstock")
USER_CACHE = path("XDG_CACHE_HOME", "folder", "caches of the user", NODE, "~/.cache")
VISIBLE_GPUS = text("CUDA_VISIBLE_DEVICES", "numbers, comma-separated", "GPUs that processes see", NODE, "all")
COMPILER = text("CXX", "program", "compiler of native code", NODE, "g++, c++, clang++")
MAX_JOBS = count("MAX_JOBS", "processes, from 1", "compilers that run at once", NODE, "by cores and memory")
DISPLAY = text("DISPLAY", "display", "whether the demo can open a browser", TOOL, "none")
WAYLAND_DISPLAY = text("WAYLAND_DISPLAY", "display", "the same", TOOL, "none")

URL = text("PENSTOCK_URL", "URL, or several: a,b", "address of the server", TOOL, "the local server's")
TOKEN = text("PENSTOCK_TOKEN", "token", "bearer token for the server", SECRET, "the local server's")
CONFIG = path("PENSTOCK_CONFIG", "file", "profile of the local server", TOOL, "~/.penstock/config.json")
TLS_CERT = path("PENSTOCK_TLS_CERT", "PEM file", "certificate chain that is shown to the server", TOOL, "none")
TLS_KEY = path("PENSTOCK_TLS_KEY", "PEM file", "private key of PENSTOCK_TLS_CERT", SECRET, "none")
JOIN_TOKEN = text("PENSTOCK_JOIN_TOKEN", "token", "lets a node join, once", SECRET, "none")
NODE_ADDRESS = text(
    "PENSTOCK_NODE_ADDRESS", "address", "where other nodes reach this one", TOOL, "of the route to the server"
)
SERVER = text("PENSTOCK_SERVER_*", "see server.md", "settings of the server", TOOL, "see server.md")

COMMUNICATOR: tuple[Setting[int | None], ...] = tuple(
    Setting(f"FLAGS_{name}", values, default, meaning, shown_default="CPU_NUM" if default is None else "")
    for name, values, default, meaning in (
        ("communicator_max_merge_var_num", whole(1, "gradients"), None, "gradients that are merged into one"),
        ("communicator_send_queue_size", whole(1, "gradients"), None, "gradients that wait to be sent"),
        ("communicator_independent_recv_thread", ZERO_OR_ONE, 1, "a thread of its own receives parameters"),
        ("communicator_min_send_grad_num_before_recv", whole(0, "gradients"), None, "sent before one is received"),
        ("communicator_thread_pool_size", whole(1, "threads"), 5, "threads that send and receive"),
        ("communicator_send_wait_times", whole(0, "times 10 ms"), 5, "how long a merge waits for another gradient"),
        ("communicator_is_sgd_optimizer", ZERO_OR_ONE, 1, "1: gradients are summed, 0: averaged"),
        ("rpc_deadline", whole(1, "ms"), 180_000, f"no effect: {PS_DEADLINE_S} is used"),
        ("rpc_retry_times", whole(0, "retries"), 3, f"no effect: {PS_DEADLINE_S} is used"),
    )
)
"""Those of a TrainerRuntimeConfig; None: the number of training threads."""
SERVER_THREADS: tuple[Setting[int | None], ...] = tuple(
    Setting(f"FLAGS_rpc_{name}_thread_num", whole(1, "threads"), 12, meaning, shown_default=default)
    for name, default, meaning in (
        ("send", "number of cores", "threads with which a server updates, at most"),
        ("get", "", "no effect: any free thread reads"),
        ("prefetch", "", "no effect: any free thread reads"),
    )
)
"""Those of a ServerRuntimeConfig."""
SPINS = text(
    "GOMP_SPINCOUNT", "times, infinite", "how often torch's idle threads look for work before they sleep", NODE, "1000"
)
LIBRARIES = tuple(
    text(name, values, meaning, SETTING, default)
    for name, values, default, meaning in (
        ("OMP_NUM_THREADS", "threads, from 1", "cores, or `cpus` of a rank", "threads of one operator"),
        ("OMP_DYNAMIC", "true, false", "false", "whether OpenMP may use fewer threads"),
        ("OMP_MAX_ACTIVE_LEVELS", "levels, from 0", "OpenMP's", "nested parallel regions that use threads"),
        ("OMP_PLACES", "see OpenMP", "OpenMP's", "cores to which threads are bound"),
        ("OMP_PROC_BIND", "see OpenMP", "false", "whether and how threads are bound to cores"),
        ("OMP_SCHEDULE", "see OpenMP", "OpenMP's", "how iterations of a loop are divided among threads"),
        ("OMP_STACKSIZE", "size, KiB without unit", "OpenMP's", "stack of a thread"),
        ("OMP_THREAD_LIMIT", "threads, from 1", "no limit", "threads of a process at most"),
        ("OMP_WAIT_POLICY", "active, passive", "GOMP_SPINCOUNT", "whether waiting threads spin"),
        ("OMP_DISPLAY_ENV", "true, false, verbose", "false", "OpenMP prints its settings"),
        ("MKL_NUM_THREADS", "threads, from 1", "OMP_NUM_THREADS", "threads of MKL"),
        ("MKL_DOMAIN_NUM_THREADS", "see MKL", "MKL_NUM_THREADS", "the same, for each domain of MKL"),
        ("MKL_DYNAMIC", "true, false", "true", "whether MKL may use fewer threads"),
        ("MKL_NUM_STRIPES", "stripes, from 1", "MKL's", "how MKL divides a matmul among threads"),
        ("MKL_CBWR", "see MKL", "MKL's", "results that are equal on different processors"),
        ("MKL_ENABLE_INSTRUCTIONS", "see MKL", "all", "the newest instruction set that MKL uses"),
        ("MKL_DISABLE_FAST_MM", "1", "unset", "MKL allocates without its buffers"),
        ("MKL_FAST_MEMORY_LIMIT", "MiB", "MKL's", "high-bandwidth memory that MKL uses"),
        ("MKL_VERBOSE", "0, 1, 2", "0", "MKL prints each call"),
        *(
            (f"{prefix}_{name}", values, default, meaning + more)
            for prefix, more in (("ONEDNN", ""), ("DNNL", ", by oneDNN's former name"))
            for name, values, default, meaning in (
                ("MAX_CPU_ISA", "see oneDNN", "all", "the newest instruction set that oneDNN uses"),
                ("CPU_ISA_HINTS", "see oneDNN", "none", "preferences among the instructions of a set"),
                ("DEFAULT_FPMATH_MODE", "see oneDNN", "strict", "lower precision that oneDNN may compute in"),
                ("PRIMITIVE_CACHE_CAPACITY", "primitives, from 0", "oneDNN's", "prepared kernels that stay in memory"),
                ("VERBOSE", "see oneDNN", "0", "oneDNN prints each call"),
            )
        ),
    )
)
"""Of OpenMP, MKL and oneDNN, which read them themselves."""

TREE: Mapping[str, tuple[Setting[Any], ...]] = {
    "executor": (
        CPU_NUM, NUM_THREADS, REDUCE_STRATEGY, MATRIX_KERNELS, CHECK_NAN, FUSE_MEMORY_SIZE, FUSE_GROUPS_SIZE,
        EAGER_DELETE, SELECTED_GPUS, LOCAL_TABLES,
        Setting(MATRIX_KERNELS.same_as, MATRIX_KERNELS.values, "auto", f"deprecated: use {MATRIX_KERNELS}"),
        Setting(CHECK_NAN.same_as, SWITCH, False, f"the same; {CHECK_NAN} wins"),
    ),
    "parameter servers, their trainers": (
        PS_DEADLINE_S, PS_LEASE_S, PS_START_S, PS_SNAPSHOT_S, PS_TRANSPORT, PS_SAVE_DIRS, PS_TLS_CA, PS_TLS_CERT,
        PS_TLS_KEY, PS_TOKEN, PS_STATE_DIR, *SERVER_THREADS,
    ),
    "communicator": COMMUNICATOR,
    "ranks": (COLLECTIVE_LEASE_S, COLLECTIVE_START_S, COLLECTIVE_TRANSPORT, GLOO_INTERFACES, NCCL_INTERFACES),
    "checkpoints": (CHECKPOINT_EVERY_STEPS, CHECKPOINT_KEEP, CHECKPOINT_DIR),
    "library": (CACHE, PADDLE_ALIAS, DISABLE_PLOT), "library, agent": (ABSENT,), "library, build": (USER_CACHE,),
    "torch, launchers": (VISIBLE_GPUS,), "build, torch": (COMPILER, MAX_JOBS), "torch's libraries": (*LIBRARIES, SPINS),
    "command, attached scripts": (URL, TOKEN, TLS_CERT, TLS_KEY), "command": (CONFIG, DISPLAY, WAYLAND_DISPLAY),
    "agent": (JOIN_TOKEN, NODE_ADDRESS), "server": (SERVER,),
}  # fmt: skip
"""All settings, by what reads them."""
SETTINGS = tuple(setting for settings in TREE.values() for setting in settings)
