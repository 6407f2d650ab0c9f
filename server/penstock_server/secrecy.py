"""What of a job its readers do not see. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.protocol.masking import MASK

SEES_ENV = frozenset({"submit"})
"""Scopes whose holders see the values of a job's variables; what looks like a secret is never shown."""


def without_env(view: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON of a job for those who may only read: the names of its variables, without their values."""
    spec = view["spec"]
    return {**view, "spec": {**spec, "env": dict.fromkeys(spec["env"], MASK)}}
