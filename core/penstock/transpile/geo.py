"""GeoSgdTranspiler: a DistributeTranspiler that trains in GEO mode, whatever its config says of the mode.

Source: GeoSgdTranspiler (Fluid 1.8).
"""

from __future__ import annotations

from penstock.program.program import Program
from penstock.transpile.config import DistributeTranspilerConfig
from penstock.transpile.transpiler import DistributeTranspiler


class GeoSgdTranspiler(DistributeTranspiler):
    """Distributes one program for GEO training. `config`: as of DistributeTranspiler; it is copied."""

    def __init__(self, config: DistributeTranspilerConfig | None = None) -> None:
        super().__init__(config)
        self._config.half_async = self._config.completely_not_async = False
        self._config.sync_mode = False
        self._config.runtime_split_send_recv = self._config.geo_sgd_mode = True

    def transpile(
        self,
        trainer_id: int,
        program: Program | None = None,
        pservers: str = "127.0.0.1:6174",
        trainers: int | str = 1,
        sync_mode: bool = False,
        startup_program: Program | None = None,
        current_endpoint: str = "127.0.0.1:6174",
        slice_var_up: bool | None = None,
    ) -> None:
        """Rewrite `program` and `startup_program` into the trainer's, as DistributeTranspiler does.

        `sync_mode` is Fluid's, which does not read it. Raises SpecError, ProgramError; the programs are unchanged then.
        """
        super().transpile(
            trainer_id, program, pservers, trainers, False, startup_program, current_endpoint, slice_var_up
        )
