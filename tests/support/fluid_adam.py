"""Adam of Fluid 1.8 in eager torch: the oracle for `fluid.optimizer.Adam` with dense gradients."""

from __future__ import annotations

import math
from typing import Any

import torch


class FluidAdam(torch.optim.Adam):
    """torch.optim.Adam with epsilon beside the uncorrected root: epsilon / sqrt(1 - beta2^t) beside torch's."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self._epsilon, self._step_number = self.defaults["eps"], 0

    def step(self, closure: Any = None) -> Any:
        """Update once."""
        self._step_number += 1
        for group in self.param_groups:
            group["eps"] = self._epsilon / math.sqrt(1.0 - group["betas"][1] ** self._step_number)
        return super().step(closure)
