"""Fluid's `incubate.fleet.base.role_maker`."""

from __future__ import annotations

from penstock.fleet.roles import (
    GeneralRoleMaker,
    MPISymetricRoleMaker,
    PaddleCloudRoleMaker,
    Role,
    RoleMakerBase,
    UserDefinedCollectiveRoleMaker,
    UserDefinedRoleMaker,
)

__all__ = [
    "GeneralRoleMaker", "MPISymetricRoleMaker", "PaddleCloudRoleMaker", "Role", "RoleMakerBase",
    "UserDefinedCollectiveRoleMaker", "UserDefinedRoleMaker",
]  # fmt: skip
