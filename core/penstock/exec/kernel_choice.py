"""What FLAGS_matrix_kernels and the threads of an executor make of a choice of passes."""

from __future__ import annotations

from dataclasses import replace

from penstock.exec.flags import text_of
from penstock.graph.passes import PassChoice


def settled(choice: PassChoice, *, at_once: int, intra_op: int, on_cpu: bool) -> PassChoice:
    """Return the choice with the conditions that its products run in, and the kernel that the user forces.

    A kernel that the choice itself forces stays. Elsewhere than on CPU there is nothing to choose.
    Raises SpecError for an unknown kernel in the environment.
    """
    if not on_cpu:
        return replace(choice, matrix_kernels=False)
    wanted = text_of("FLAGS_matrix_kernels")
    forced = choice.matrix.forced or ("" if wanted == "auto" else wanted)
    matrix = replace(choice.matrix, forced=forced, at_once=at_once, intra_op=intra_op)
    return replace(choice, matrix=matrix)
