"""What a wheel holds beyond the Python sources: native libraries, the browser's page, migrations, examples.

The native build runs in place, for an editable install as for a wheel, with the torch of the environment that builds;
therefore installations pass `--no-build-isolation`, and a wheel asks for the same minor version of torch again.
A wheel is refused rather than built without one of the assets. An editable install takes them from the checkout and
gets nothing copied; a static `force-include` in pyproject.toml would break it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ASSETS = {
    "web/dist": "penstock_server/static",
    "alembic": "penstock_server/migrations",
    "examples": "penstock/examples",
}
MARKS = {"web/dist": "index.html", "alembic": "env.py", "examples": "ctr_flights/job.yaml"}


class PenstockBuildHook(BuildHookInterface[Any]):
    """Build the native libraries, then add the assets to a wheel that is not editable."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Do both. Raises: UserError from the compiler; RuntimeError if an asset is missing."""
        root = Path(self.root)
        libraries = _build_native(root)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        if version == "editable":
            return
        for library in libraries:
            self.app.display_info(f"native: {library.relative_to(root)}")
        build_data["force_include"].update(_assets(root))
        build_data["dependencies"].append(_torch_requirement())


def _build_native(root: Path) -> list[Path]:
    sys.path.insert(0, str(root / "core"))
    try:
        # the build of the checkout at hand, not of a Penstock that is installed already
        from penstock.native.build import build

        return build()
    finally:
        sys.path.remove(str(root / "core"))


def _assets(root: Path) -> dict[str, str]:
    for folder, mark in MARKS.items():
        if not (root / folder / mark).is_file():
            raise RuntimeError(f"{folder}/{mark} is missing, and a wheel needs it. Run `make setup` first.")
    return {str(root / folder): target for folder, target in ASSETS.items()}


def _torch_requirement() -> str:
    """Return the requirement of a wheel: torch keeps its C++ interface within a minor version only."""
    import torch  # torch is a build requirement, yet reading this file (mypy, tests) should not load it

    major, minor = torch.__version__.split(".")[:2]
    return f"torch=={major}.{minor}.*"
