"""Passing of environment variables: which of them reach a job, from its submitter and from its node.

Every name that the code reads has one kind. A variable whose name or value looks like a secret is one, whatever the
table holds, and no secret, identity or address ever passes. Pure data: the environment comes as a mapping.
docs/environment.md is this table for users.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import get_args

from penstock import identity
from penstock.protocol import contract
from penstock.settings import ABSENT, CHECKPOINT_EVERY_STEPS, CHECKPOINT_KEEP, SETTINGS, VariableKind

OWN_PREFIX = "PENSTOCK_"
FLUID_PREFIX = "FLAGS_"
SECRET_TEXTS = ("TOKEN", "SECRET", "PASSW", "PASSPHRASE", "APIKEY", "CREDENTIAL", "WEBHOOK")
"""A name that holds one of them anywhere, in any case, is a secret (TOKENIZERS_PARALLELISM is none)."""
SECRET_PARTS = frozenset({"KEY", "PASS", "PWD", "AUTH", "PAT", "DSN"})
"""A name is a secret if such a word, its plural or the word with a number is a whole part between punctuation marks."""
_NO_SECRETS = frozenset({"PWD", "OLDPWD"})  # folders of the shell
_CREDENTIALS = re.compile(r"://[^\s/@:]*:[^\s/@]+@")  # scheme://user:password@host

PLACES = identity.VARIABLES.union(
    *(contract.reserved(mode, gpus=1) for mode in get_args(contract.Mode)),
    ("TRAINER_PORTS_NUM", "DISTRIBUTED_TRAINER_ENDPOINTS", "GROUP_WORLD_SIZE"),  # read, or taken away, by launchers
)
"""Variables of VariableKind.PLACE, with all that begin like PLACE_PREFIXES."""
PLACE_PREFIXES = ("PADDLE_", "TORCHELASTIC_")

SAME_SETTING = {setting.name: setting.same_as for setting in SETTINGS if setting.same_as}
"""The name of a setting that wins, and its other one."""
_REPORTED = (OWN_PREFIX, FLUID_PREFIX, "OMP_", "MKL_", "ONEDNN_", "DNNL_")
_OF_NODES_TOO = frozenset({ABSENT.name})
_KINDS = {setting.name: setting.kind for setting in SETTINGS}
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


def kind_of(name: str, value: str = "") -> VariableKind | None:
    """Return the kind of a variable, None for one that Penstock does not know."""
    if is_secret(name, value):
        return VariableKind.SECRET
    if name in PLACES or name.startswith(PLACE_PREFIXES):
        return VariableKind.PLACE
    if name in _KINDS:
        return _KINDS[name]
    return next((kind for prefix, kind in _PREFIXES.items() if name.startswith(prefix)), None)


def passes_from_node(name: str, value: str) -> bool:
    """True if an agent's variable reaches the jobs on its node, unless the job sets it: what a machine needs passes.

    These are variables of VariableKind.NODE, PENSTOCK_ABSENT, and all that neither Penstock nor Fluid names. Settings
    do not pass: they are those of the submitter, and part of the job's `env`.
    """
    kind = kind_of(name, value)
    if name in _OF_NODES_TOO:
        return kind is not VariableKind.SECRET
    return kind is VariableKind.NODE or (kind is None and not name.startswith((OWN_PREFIX, FLUID_PREFIX)))


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
    """Sort a submitter's environment for a job with `env`. `has_checkpoint`: the job sets how often and how many."""
    taken = _set_by(env) | ({CHECKPOINT_EVERY_STEPS.name, CHECKPOINT_KEEP.name} if has_checkpoint else set())
    found = {name: kind_of(name, environ[name]) for name in sorted(environ)}
    settings = {name: environ[name] for name, kind in found.items() if kind is VariableKind.SETTING}
    return Exported(
        passed={name: value for name, value in settings.items() if name not in taken},
        overruled={name: value for name, value in settings.items() if name in taken and env.get(name) != value},
        paths=tuple(name for name, kind in found.items() if kind is VariableKind.PATH and name not in env),
        unknown=tuple(n for n, kind in found.items() if kind is None and n.startswith(_REPORTED)),
    )


def _set_by(env: Collection[str]) -> set[str]:
    """Return the names that `env` sets, those included that are other names of the same settings."""
    both = [pair for pair in SAME_SETTING.items() if not set(pair).isdisjoint(env)]
    return {*env, *(name for pair in both for name in pair)}
