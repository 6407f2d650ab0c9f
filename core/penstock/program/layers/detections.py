"""Mean average precision of detections: of the images of a run, and of all runs of a pass.

Source: fluid.layers.detection_map, fluid.metrics.DetectionMAP (Fluid 1.8).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from penstock.errors import ProgramError
from penstock.program.control.detections import AVERAGES, averaged
from penstock.program.layers.expected import expect_known, expect_rank, refuse
from penstock.program.layers.python_functions import key_of
from penstock.program.layers.sequences import is_sequence, sequence_lengths
from penstock.program.layers.tensor import cast, concat
from penstock.program.record.arrays import append
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.fakes import empty_fake
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.unsized import reads_unsized, sized_in_block
from penstock.program.record.variable import record_call


def detection_map(
    detect_res: Any,
    label: Any,
    class_num: int,
    background_label: int = 0,
    overlap_threshold: float = 0.3,
    evaluate_difficult: bool = True,
    has_state: Any = None,
    input_states: Any = None,
    out_states: Any = None,
    ap_version: str = "integral",
) -> Any:
    """Return the mean average precision of a batch's detections, float32 [1], over the classes that have boxes.

    Shapes: detect_res [rows, 6], of label, score and box, as `multiclass_nms` makes them; label [rows, 6], of label,
    difficult or not, and box, or [rows, 5] without the second; a sequence for each image. Labels are below `class_num`.
    A detection is right if it overlaps the box by more than `overlap_threshold`. Difficult boxes count unless
    `evaluate_difficult` is False. `ap_version`: 'integral' or '11point'. `background_label` has no effect: in Fluid one
    of 0 or less has none either, but one of 1 or more leaves out classes with that number of boxes (not the class).
    Raises ProgramError for states of Fluid's operator: `fluid.metrics.DetectionMAP` sums up runs.
    """
    if any(one is not None for one in (has_state, input_states, out_states)):
        raise ProgramError(
            f"{user_line()}: detection_map takes no has_state, input_states and out_states; fluid.metrics.DetectionMAP "
            "sums up the runs of a pass"
        )
    return _judged(detect_res, label, (class_num, overlap_threshold, evaluate_difficult), ap_version, None)


@reads_unsized
def _judged(found: Any, label: Any, settings: Any, average: str, keep: Callable[..., Any] | None) -> Any:
    """The mean average precision of a run, or what `keep(rows, counts)` returns for what is right in it."""
    if average not in AVERAGES:
        raise ProgramError(f"{user_line()}: ap_version is {average!r}; expected one of {', '.join(AVERAGES)}")
    for one in (found, label):
        expect_rank("detection_map", one, 2)
        if not is_sequence(one):
            raise ProgramError(
                f"{user_line()}: detection_map needs a sequence of rows for each image (lod_level=1); got {one!r}",
                variable=one.name,
            )
    if expect_known("detection_map", label, 1) not in (5, 6):
        refuse("detection_map", "boxes of five or six numbers", label, "See its documentation")
    num_classes, overlap, takes_all = settings
    plain = (int(num_classes), float(overlap), bool(takes_all))
    recording, detached = recording_of(default_main_program()), [one.detach() for one in (found, label)]
    lengths = [sequence_lengths(one) for one in (found, label)]

    def build() -> Any:
        fakes = [
            empty_fake([recording.symbols.new_of_data(), 3], None, found.dtype),
            empty_fake([plain[0]], None, torch.int64),
        ]
        append(recording, "rows_judged", (detached[0], lengths[0], detached[1], lengths[1], plain), fakes)
        rows, counts = (recording.handle(fake) for fake in fakes)
        if keep is not None:
            operands: Any = ([rows, counts], [1], [1], ["float32"], key_of(keep), "", [])
            return record_call(torch.ops.penstock.py_func, operands, {})[0]
        made = empty_fake([1], None, torch.float32)
        append(recording, "rows_averaged", (rows, counts, average), [made])
        return recording.handle(made)

    with name_scope(default_main_program().unique("detection_map")):
        return sized_in_block(recording, build)


class DetectionMAP:
    """Mean average precision of a run and of all runs since the last `reset`: `get_map_var` has both variables.

    Arguments are those of `detection_map`, with the label, the box and, if there is one, the mark of a difficult box in
    variables of their own: gt_label [rows, 1], gt_box [rows, 4], gt_difficult [rows, 1]. The object keeps what runs of
    its process have found, in no scope: it is not saved, and replicas and clones of the Program share it.
    """

    def __init__(
        self,
        input: Any,
        gt_label: Any,
        gt_box: Any,
        gt_difficult: Any = None,
        class_num: int | None = None,
        background_label: int = 0,
        overlap_threshold: float = 0.5,
        evaluate_difficult: bool = True,
        ap_version: str = "integral",
    ) -> None:
        if class_num is None:
            raise ProgramError(f"{user_line()}: DetectionMAP needs class_num, the number of classes")
        marks = [] if gt_difficult is None else [cast(gt_difficult, gt_box.dtype)]
        label = concat([cast(gt_label, gt_box.dtype), *marks, gt_box], axis=1)
        settings = (class_num, overlap_threshold, evaluate_difficult)
        self._lock, self._average = threading.Lock(), ap_version
        self._rows: torch.Tensor | None = None  # of all runs
        self._counts = torch.zeros(int(class_num), dtype=torch.int64)
        self.cur_map = _judged(input, label, settings, ap_version, None)
        self.accum_map = _judged(input, label, settings, ap_version, self._add)

    def _add(self, rows: Any, counts: Any) -> np.ndarray:
        """Take in what is right in a run; return the mean average precision of all of them."""
        with self._lock:
            new = torch.from_numpy(np.array(rows))
            self._rows = new if self._rows is None else torch.cat([self._rows, new])
            self._counts = self._counts + torch.from_numpy(np.array(counts))
            (whole,) = averaged(self._rows, self._counts, self._average)
        return whole.numpy()

    def get_map_var(self) -> tuple[Any, Any]:
        """Return the variables of a run's mean average precision and of that of all runs, float32 [1] each."""
        return self.cur_map, self.accum_map

    def reset(self, executor: object = None, reset_program: object = None) -> None:
        """Forget all runs. No program is run for it, so both arguments have no effect."""
        with self._lock:
            self._rows, self._counts = None, torch.zeros_like(self._counts)
