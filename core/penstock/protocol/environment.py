"""The environment variables that Penstock reads, and which of them reach a job: from its submitter, from its node.

Every name that the code reads has one kind. A variable whose name or value looks like a secret is one, whatever the
table holds, and no secret, identity or address ever passes. Pure data: the environment comes as a mapping.
docs/environment.md is this table for users.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import get_args

from penstock.protocol import contract
from penstock.protocol.checkpoints import DIRECTORY, EVERY_STEPS, KEEP

OWN_PREFIX = "PENSTOCK_"
FLUID_PREFIX = "FLAGS_"
SECRET_TEXTS = ("TOKEN", "SECRET", "PASSW", "PASSPHRASE", "APIKEY", "CREDENTIAL", "WEBHOOK")
"""A name that holds one of them anywhere, in any case, is a secret (TOKENIZERS_PARALLELISM is none)."""
SECRET_PARTS = frozenset({"KEY", "PASS", "PWD", "AUTH", "PAT", "DSN"})
"""A name is a secret if such a word, its plural or the word with a number is a whole part between punctuation marks."""
_NO_SECRETS = frozenset({"PWD", "OLDPWD"})  # folders of the shell
_CREDENTIALS = re.compile(r"://[^\s/@:]*:[^\s/@]+@")  # scheme://user:password@host


class Kind(StrEnum):
    """What a variable is about, which decides whether it reaches a job that does not set it by its own `env`."""

    SETTING = "setting"  # how a job runs: passes from the submitter's environment
    PATH = "path"  # a file or folder as the job's processes reach it: only the job's own `env` names it
    NODE = "node"  # a property of a machine: passes from the agent's environment to what runs on its node
    PLACE = "place"  # identity and addresses of a process in a job: set by agents and launchers, never passes
    SECRET = "secret"  # never passes
    TOOL = "tool"  # read by the command, the server, the agent or the build: never passes


@dataclass(frozen=True, slots=True)
class EnvironmentVariable:
    """One variable, or with a trailing `*` all that begin so. `values`: with their unit; `reader`: what reads it."""

    name: str
    kind: Kind
    values: str
    default: str
    reader: str
    meaning: str


def _of(kind: Kind, *rows: tuple[str, str, str, str, str]) -> tuple[EnvironmentVariable, ...]:
    return tuple(EnvironmentVariable(name, kind, *rest) for name, *rest in rows)


_SERVERS, _MERGE, _RANKS, _CHECKPOINTS = "parameter servers, their trainers", "communicator", "ranks", "checkpoints"
_EXECUTOR, _LIBRARIES = "executor", "torch's libraries"

_LIBRARY_SETTINGS = _of(
    Kind.SETTING,
    ("OMP_NUM_THREADS", "threads, from 1", "cores, or `cpus` of a rank", _LIBRARIES, "threads of one operator"),
    ("OMP_DYNAMIC", "true, false", "false", _LIBRARIES, "whether OpenMP may use fewer threads"),
    ("OMP_MAX_ACTIVE_LEVELS", "levels, from 0", "OpenMP's", _LIBRARIES, "nested parallel regions that use threads"),
    ("OMP_PLACES", "see OpenMP", "OpenMP's", _LIBRARIES, "cores to which threads are bound"),
    ("OMP_PROC_BIND", "see OpenMP", "false", _LIBRARIES, "whether and how threads are bound to cores"),
    ("OMP_SCHEDULE", "see OpenMP", "OpenMP's", _LIBRARIES, "how iterations of a loop are divided among threads"),
    ("OMP_STACKSIZE", "size, KiB without unit", "OpenMP's", _LIBRARIES, "stack of a thread"),
    ("OMP_THREAD_LIMIT", "threads, from 1", "no limit", _LIBRARIES, "threads of a process at most"),
    ("OMP_WAIT_POLICY", "active, passive", "OpenMP's", _LIBRARIES, "whether waiting threads spin"),
    ("OMP_DISPLAY_ENV", "true, false, verbose", "false", _LIBRARIES, "OpenMP prints its settings"),
    ("MKL_NUM_THREADS", "threads, from 1", "OMP_NUM_THREADS", _LIBRARIES, "threads of MKL"),
    ("MKL_DOMAIN_NUM_THREADS", "see MKL", "MKL_NUM_THREADS", _LIBRARIES, "the same, for each domain of MKL"),
    ("MKL_DYNAMIC", "true, false", "true", _LIBRARIES, "whether MKL may use fewer threads"),
    ("MKL_NUM_STRIPES", "stripes, from 1", "MKL's", _LIBRARIES, "how MKL divides a matmul among threads"),
    ("MKL_CBWR", "see MKL", "MKL's", _LIBRARIES, "results that are equal on different processors"),
    ("MKL_ENABLE_INSTRUCTIONS", "see MKL", "all", _LIBRARIES, "the newest instruction set that MKL uses"),
    ("MKL_DISABLE_FAST_MM", "1", "unset", _LIBRARIES, "MKL allocates without its buffers"),
    ("MKL_FAST_MEMORY_LIMIT", "MiB", "MKL's", _LIBRARIES, "high-bandwidth memory that MKL uses"),
    ("MKL_VERBOSE", "0, 1, 2", "0", _LIBRARIES, "MKL prints each call"),
    *(
        (f"{prefix}_{name}", values, default, _LIBRARIES, meaning + more)
        for prefix, more in (("ONEDNN", ""), ("DNNL", ", by oneDNN's former name"))
        for name, values, default, meaning in (
            ("MAX_CPU_ISA", "see oneDNN", "all", "the newest instruction set that oneDNN uses"),
            ("CPU_ISA_HINTS", "see oneDNN", "none", "preferences among the instructions of a set"),
            ("DEFAULT_FPMATH_MODE", "see oneDNN", "strict", "lower precision that oneDNN may compute in"),
            ("PRIMITIVE_CACHE_CAPACITY", "primitives, from 0", "oneDNN's", "prepared kernels that stay in memory"),
            ("VERBOSE", "see oneDNN", "0", "oneDNN prints each call"),
        )
    ),
)  # fmt: skip

_SETTINGS = _of(
    Kind.SETTING,
    ("CPU_NUM", "replicas, from 1", "number of cores", _EXECUTOR, "replicas of a ParallelExecutor on the CPU"),
    ("PENSTOCK_MATRIX_KERNELS", "auto, torch, onednn", "auto", _EXECUTOR, "kernels of float32 matmuls"),
    ("FLAGS_matrix_kernels", "auto, torch, onednn", "auto", _EXECUTOR, "the same; PENSTOCK_MATRIX_KERNELS wins"),
    ("PENSTOCK_CHECK_NAN", "0, 1", "0", _EXECUTOR, "check the outputs of each operator for NaN and infinity"),
    ("FLAGS_check_nan_inf", "0, 1", "0", _EXECUTOR, "the same; PENSTOCK_CHECK_NAN wins"),
    ("FLAGS_fuse_parameter_memory_size", "MiB", "0.0625", _EXECUTOR, "gradients that are exchanged as one, in size"),
    ("FLAGS_fuse_parameter_groups_size", "gradients; -1: no limit", "-1", _EXECUTOR, "the same, in number"),
    ("FLAGS_eager_delete_tensor_gb", "GiB", "0", _EXECUTOR, "below 0: temporaries keep their memory after a step"),
    ("PENSTOCK_ABSENT", "names, comma-separated", "none", "library, agent", "capabilities to treat as absent"),
    ("PENSTOCK_PS_DEADLINE_S", "s", "30", _SERVERS, "an unreachable server is an error after this time"),
    ("PENSTOCK_PS_LEASE_S", "s", "20", _SERVERS, "a silent trainer is lost after this time"),
    ("PENSTOCK_PS_START_S", "s", "600", _SERVERS, "how long processes wait for each other at the start"),
    ("PENSTOCK_PS_SNAPSHOT_S", "s", "60", _SERVERS, "time between a server's snapshots"),
    ("PENSTOCK_PS_TRANSPORT", "auto, tcp", "auto", _SERVERS, "auto: shared memory between processes of one host"),
    ("PENSTOCK_COLLECTIVE_LEASE_S", "s", "5", _RANKS, "a silent rank is lost after this time"),
    ("PENSTOCK_COLLECTIVE_START_S", "s", "300", _RANKS, "how long ranks wait for each other at the start"),
    ("PENSTOCK_COLLECTIVE_TRANSPORT", "auto, shared_memory, gloo", "auto", _RANKS, "how ranks exchange gradients"),
    (EVERY_STEPS, "steps, from 1", "`checkpoint` of the job", _CHECKPOINTS, "how often a checkpoint is written"),
    (KEEP, "checkpoints, from 1", "`checkpoint` of the job, else 3", _CHECKPOINTS, "how many of the latest stay"),
    ("FLAGS_communicator_max_merge_var_num", "gradients", "CPU_NUM", _MERGE, "gradients that are merged into one"),
    ("FLAGS_communicator_send_queue_size", "gradients", "CPU_NUM", _MERGE, "gradients that wait to be sent"),
    ("FLAGS_communicator_independent_recv_thread", "0, 1", "1", _MERGE, "a thread of its own receives parameters"),
    ("FLAGS_communicator_min_send_grad_num_before_recv", "gradients", "CPU_NUM", _MERGE, "sent before one is received"),
    ("FLAGS_communicator_thread_pool_size", "threads", "5", _MERGE, "threads that send and receive"),
    ("FLAGS_communicator_send_wait_times", "times 10 ms", "5", _MERGE, "how long a merge waits for another gradient"),
    ("FLAGS_communicator_is_sgd_optimizer", "0, 1", "1", _MERGE, "1: gradients are summed, 0: averaged"),
    ("FLAGS_rpc_deadline", "ms", "180000", _MERGE, "no effect: PENSTOCK_PS_DEADLINE_S is used"),
    ("FLAGS_rpc_retry_times", "retries", "3", _MERGE, "no effect: PENSTOCK_PS_DEADLINE_S is used"),
    ("FLAGS_rpc_send_thread_num", "threads", "number of cores", _SERVERS, "updates that a server makes at once"),
    ("FLAGS_rpc_get_thread_num", "threads", "12", _SERVERS, "no effect: any free thread reads"),
    ("FLAGS_rpc_prefetch_thread_num", "threads", "12", _SERVERS, "no effect: any free thread reads"),
)  # fmt: skip

VARIABLES: tuple[EnvironmentVariable, ...] = (
    *_SETTINGS,
    *_LIBRARY_SETTINGS,
    *_of(
        Kind.PATH,
        (DIRECTORY, "folder", "made by the agent", _CHECKPOINTS, "a job's checkpoints"),
        ("PENSTOCK_PS_SAVE_DIRS", "folders, as in PATH", "none", _SERVERS, "where trainers may have a server save"),
        ("PENSTOCK_PS_TLS_CA", "PEM file", "no TLS", _SERVERS, "signs the certificates of servers"),
        ("PENSTOCK_PS_TLS_CERT", "PEM file", "no TLS", _SERVERS, "a server's certificate"),
    ),
    *_of(
        Kind.NODE,
        ("PENSTOCK_CACHE", "folder", "$XDG_CACHE_HOME/penstock", "library", "what a machine measures or prepares once"),
        ("XDG_CACHE_HOME", "folder", "~/.cache", "library, build", "caches of the user"),
        ("CUDA_VISIBLE_DEVICES", "numbers, comma-separated", "all", "torch, launchers", "GPUs that processes see"),
        ("GLOO_SOCKET_IFNAME", "names, comma-separated", "Gloo's choice", _RANKS, "network interfaces of Gloo"),
        ("NCCL_SOCKET_IFNAME", "names, comma-separated", "NCCL's choice", _RANKS, "network interfaces of NCCL"),
        ("CXX", "program", "g++, c++, clang++", "build, torch", "compiler of native code"),
        ("MAX_JOBS", "processes, from 1", "by cores and memory", "build, torch", "compilers that run at once"),
    ),
    *_of(
        Kind.SECRET,
        ("PENSTOCK_TOKEN", "token", "the local server's", "command, attached scripts", "bearer token for the server"),
        ("PENSTOCK_JOIN_TOKEN", "token", "none", "agent", "lets a node join, once"),
        ("PENSTOCK_PS_TOKEN", "token", "made by the server", _SERVERS, "opens the ports of a job's servers"),
        ("PENSTOCK_PS_TLS_KEY", "PEM file", "no TLS", _SERVERS, "the key of a server's certificate"),
    ),
    *_of(
        Kind.TOOL,
        ("PENSTOCK_URL", "URL", "the local server's", "command, attached scripts", "address of the server"),
        ("PENSTOCK_CONFIG", "file", "~/.penstock/config.json", "command", "profile of the local server"),
        ("PENSTOCK_NODE_ADDRESS", "address", "of the route to the server", "agent", "where other nodes reach this one"),
        ("PENSTOCK_SERVER_*", "see server.md", "see server.md", "server", "settings of the server"),
        ("DISPLAY", "display", "none", "command", "whether the demo can open a browser"),
        ("WAYLAND_DISPLAY", "display", "none", "command", "the same"),
    ),
)

PLACES = frozenset().union(
    *(contract.reserved(mode, gpus=1) for mode in get_args(contract.Mode)),
    # Clusters and launchers besides the agent: PaddleCloud's, torchrun's, those of MPI.
    ("TRAINER_PORTS_NUM", "DISTRIBUTED_TRAINER_ENDPOINTS", "GROUP_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),
)
"""Variables of Kind.PLACE, with all that begin like PLACE_PREFIXES."""
PLACE_PREFIXES = ("PADDLE_", "TORCHELASTIC_")

SAME_SETTING = {"PENSTOCK_MATRIX_KERNELS": "FLAGS_matrix_kernels", "PENSTOCK_CHECK_NAN": "FLAGS_check_nan_inf"}
"""Penstock's name of a setting, which wins, and Fluid's."""
_REPORTED = (OWN_PREFIX, FLUID_PREFIX, "OMP_", "MKL_", "ONEDNN_", "DNNL_")
_OF_NODES_TOO = frozenset({"PENSTOCK_ABSENT"})
_KINDS = {variable.name: variable.kind for variable in VARIABLES}
_PREFIXES = {name.removesuffix("*"): kind for name, kind in _KINDS.items() if name.endswith("*")}


def is_secret(name: str, value: str = "") -> bool:
    """True if the name holds a word for a secret, or the value an address with a password."""
    return _names_secret(name) or _CREDENTIALS.search(value) is not None


def _names_secret(name: str) -> bool:
    if name in _NO_SECRETS:
        return False
    words = name.upper().replace("TOKENIZ", "")
    parts = {part.rstrip("0123456789") for part in re.split(r"[\W_]+", words)}
    parts |= {part.removesuffix("S") for part in parts}
    return any(text in words for text in SECRET_TEXTS) or not parts.isdisjoint(SECRET_PARTS)


def kind_of(name: str, value: str = "") -> Kind | None:
    """Return the kind of a variable, None for one that Penstock does not know."""
    if is_secret(name, value):
        return Kind.SECRET
    if name in PLACES or name.startswith(PLACE_PREFIXES):
        return Kind.PLACE
    if name in _KINDS:
        return _KINDS[name]
    return next((kind for prefix, kind in _PREFIXES.items() if name.startswith(prefix)), None)


def passes_from_node(name: str, value: str) -> bool:
    """True if an agent's variable reaches the jobs on its node, unless the job sets it: what a machine needs passes.

    These are variables of Kind.NODE, PENSTOCK_ABSENT, and all that neither Penstock nor Fluid has a name for. Settings
    do not pass: they are those of the submitter, and part of the job's `env`.
    """
    kind = kind_of(name, value)
    if name in _OF_NODES_TOO:
        return kind is not Kind.SECRET
    return kind is Kind.NODE or (kind is None and not name.startswith((OWN_PREFIX, FLUID_PREFIX)))


@dataclass(frozen=True, slots=True)
class Exported:
    """A submitter's environment, as far as it concerns a job. `passed`: what is added to the job's `env`.

    `overruled`: settings that the job sets itself, to another value; `paths`: names that only a job's `env` may set;
    `unknown`: names that begin like settings of Penstock, Fluid or torch's libraries and are not in the table.
    """

    passed: dict[str, str]
    overruled: dict[str, str]
    paths: tuple[str, ...]
    unknown: tuple[str, ...]


def exported(environ: Mapping[str, str], env: Mapping[str, str], *, has_checkpoint: bool = False) -> Exported:
    """Sort a submitter's environment for a job with `env`. `has_checkpoint`: the job says how often and how many."""
    taken = _set_by(env) | ({EVERY_STEPS, KEEP} if has_checkpoint else set())
    found = {name: kind_of(name, environ[name]) for name in sorted(environ)}
    settings = {name: environ[name] for name, kind in found.items() if kind is Kind.SETTING}
    return Exported(
        passed={name: value for name, value in settings.items() if name not in taken},
        overruled={name: value for name, value in settings.items() if name in taken and env.get(name) != value},
        paths=tuple(name for name, kind in found.items() if kind is Kind.PATH and name not in env),
        unknown=tuple(n for n, kind in found.items() if kind is None and n.startswith(_REPORTED)),
    )


def _set_by(env: Collection[str]) -> set[str]:
    """Return the names that `env` sets, those included that are other names of the same settings."""
    both = [pair for pair in SAME_SETTING.items() if not set(pair).isdisjoint(env)]
    return {*env, *(name for pair in both for name in pair)}
