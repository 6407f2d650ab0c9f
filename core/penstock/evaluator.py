"""Evaluators: counters in a Program that sum over the runs of a pass.

`fluid.metrics` sums what was fetched, outside of the Program. Source: python/paddle/fluid/evaluator.py (Fluid 1.8).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from penstock.errors import ProgramError
from penstock.program.layers.chunks import chunk_eval
from penstock.program.layers.ctc import edit_distance
from penstock.program.layers.detections import DetectionMAP
from penstock.program.record.context import default_main_program
from penstock.program.record.variable import Variable
from penstock.program.training.parameters import constant_state
from penstock.scope import global_scope


class Evaluator:
    """Counters int64 [1] of a Program: `states`. Subclasses record what is added to them, and `metrics` of a run.

    With several replicas each counts its own rows and `eval` reads those of the first, as in Fluid. To count all, fetch
    `metrics`, which come with an entry for each replica, or evaluate with an Executor.
    """

    def __init__(self, name: str, **ignored: object) -> None:
        self.states: list[Variable] = []
        self.metrics: list[Any] = []
        self._prefix = default_main_program().unique(name)

    def _create_state(self, suffix: str, dtype: str, shape: list[int]) -> Variable:
        """Create a counter that starts at zero and lives on between runs."""
        state = constant_state(f"{self._prefix}.{suffix}", 0, dtype, shape)
        self.states.append(state)
        return state

    def reset(self, executor: object, reset_program: object = None) -> None:
        """Set the counters to zero, in the global scope. Raises ProgramError before the startup Program has run."""
        for state in self.states:
            counter = global_scope().find_var(state.name)
            if counter is None:
                raise ProgramError(f"counter {state.name!r} has no value yet; run the startup program first")
            counter.get_tensor().set(np.zeros_like(np.array(counter)))

    def _totals(self) -> list[int]:
        return [int(np.array(global_scope().find_var(state.name)).item()) for state in self.states]

    def eval(self, executor: object, eval_program: object = None) -> Any:
        """Return what the counters say of the runs since the last reset."""
        raise NotImplementedError


class ChunkEvaluator(Evaluator):
    """Precision, recall and F1 of chunks over the runs since the last reset; those of a run are in `metrics`."""

    def __init__(
        self, input: Any, label: Any, chunk_scheme: str, num_chunk_types: int, excluded_chunk_types: Any = None
    ) -> None:
        super().__init__("chunk_eval")
        found = chunk_eval(input, label, chunk_scheme, num_chunk_types, excluded_chunk_types)
        for suffix, count in zip(
            ("num_infer_chunks", "num_label_chunks", "num_correct_chunks"), found[3:], strict=True
        ):
            counter: Any = self._create_state(suffix, "int64", [1])
            with torch.no_grad():
                counter.add_(count)
        self.metrics.extend(found[:3])

    def eval(self, executor: object, eval_program: object = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (precision, recall, F1), float32 [1] each."""
        found, there, both = self._totals()
        values = both / max(found, 1), both / max(there, 1), 2 * both / max(found + there, 1)
        precision, recall, score = (np.array([value], np.float32) for value in values)
        return precision, recall, score


class EditDistance(Evaluator):
    """The mean edit distance and the share of wrong sequences since the last reset; sums of a run are in `metrics`."""

    def __init__(self, input: Any, label: Any, ignored_tokens: Any = None, **ignored: object) -> None:
        super().__init__("edit_distance")
        distances, count = edit_distance(input, label, ignored_tokens=ignored_tokens)
        with torch.no_grad():
            total, wrong = distances.sum(), (distances != 0).sum()
            for suffix, dtype, value in (
                ("total_distance", "float32", total), ("seq_num", "int64", count), ("instance_error", "int64", wrong),
            ):  # fmt: skip
                counter: Any = self._create_state(suffix, dtype, [1])
                counter.add_(value.reshape([1]))
        self.metrics.extend((total, wrong))

    def eval(self, executor: object, eval_program: object = None) -> tuple[np.ndarray, np.ndarray]:
        """Return (mean distance, share of sequences with a difference), float32 [1] each; NaN without sequences."""
        total, count, wrong = (np.array(global_scope().find_var(one.name), np.float32) for one in self.states)
        with np.errstate(invalid="ignore"):
            return total / count, wrong / count


__all__ = ["ChunkEvaluator", "DetectionMAP", "EditDistance", "Evaluator"]
