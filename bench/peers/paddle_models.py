"""Models of Fluid run by paddlepaddle 2.6.2: `python -m bench.peers.paddle_models FOLDER`.

Each folder in FOLDER has `__model__`, its parameters, in a file each or in `__params__`, and `feeds.npz`: arrays by
name, lengths of sequences as `name@0`. Writes `fetched.npz`. Runs in the peer's own environment, which has no torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import base, static


def main() -> None:
    """Run the models of a folder."""
    paddle.enable_static()
    for folder in sorted(path.parent for path in Path(sys.argv[1]).glob("*/__model__")):
        np.savez(folder / "fetched.npz", **_run(folder))  # type: ignore[arg-type]  # the stubs take them for allow_pickle


def _run(folder: Path) -> dict[str, np.ndarray]:
    executor = static.Executor(paddle.CPUPlace())
    combined = "__params__" if (folder / "__params__").exists() else None
    with static.scope_guard(static.Scope()):
        program, feeds, fetches = static.load_inference_model(
            str(folder), executor, model_filename="__model__", params_filename=combined
        )
        with np.load(folder / "feeds.npz") as found:
            fed = {name: _fed(found, name) for name in feeds}
        results = executor.run(program, feed=fed, fetch_list=fetches, return_numpy=False)
    return {var.name: np.array(value) for var, value in zip(fetches, results, strict=True)}


def _fed(arrays: Any, name: str) -> Any:
    levels = [arrays[key].tolist() for key in sorted(arrays.files) if key.startswith(f"{name}@")]
    return base.create_lod_tensor(arrays[name], levels, paddle.CPUPlace()) if levels else arrays[name]


if __name__ == "__main__":
    main()
