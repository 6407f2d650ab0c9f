"""DistributeTranspilerConfig: Fluid's fields with their defaults, and the relations that they have to keep.

Source: distribute_transpiler.py (Fluid 1.8), spec 1.7.
"""

from __future__ import annotations

from typing import Any, ClassVar

from penstock.errors import SpecError
from penstock.program.strict_fields import StrictFields
from penstock.ps.remote import WIRE_DTYPES
from penstock.transpile.dispatch import MIN_BLOCK_SIZE, PSDispatcher, RoundRobin, check_min_block_size

MODES = ("pserver", "nccl2", "collective")
COLLECTIVE_MODES = ("grad_allreduce", "local_sgd", "single_process_multi_thread")


class DistributeTranspilerConfig(StrictFields):
    """How a program is distributed. Raises SpecError by the field's name for what cannot be.

    `wire_dtype`, which Fluid has not: dtype of the gradients that are pushed over a network (`ps/narrow.py`).
    """

    slice_var_up: bool = True
    min_block_size: int = MIN_BLOCK_SIZE
    enable_dc_asgd: bool = False
    mode: str = "pserver"
    print_log: bool = False
    wait_port: bool = True
    half_async: bool = False
    completely_not_async: bool = False
    geo_sgd_mode: bool = False
    geo_sgd_need_push_nums: int = 100
    nccl_comm_num: int = 1
    use_hierarchical_allreduce: bool = False
    hierarchical_allreduce_inter_nranks: int = 0
    wire_dtype: str = "float32"
    _defaults: ClassVar[dict[str, Any]] = {
        "split_method": RoundRobin, "collective_mode": "", "sync_mode": True, "runtime_split_send_recv": False,
    }  # fmt: skip
    _least: ClassVar[dict[str, int]] = {"geo_sgd_need_push_nums": 1, "nccl_comm_num": 1}

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "min_block_size" and isinstance(value, int) and not isinstance(value, bool):
            check_min_block_size(value)
        known = {"mode": MODES, "wire_dtype": WIRE_DTYPES}.get(name)
        if known is not None:
            _one_of(name, value, known)
        if isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def split_method(self) -> type[PSDispatcher]:
        """Which server gets which block: RoundRobin, HashName, or a subclass of PSDispatcher. None: RoundRobin."""
        return self.__dict__["split_method"]  # type: ignore[no-any-return]  # checked by the setter

    @split_method.setter
    def split_method(self, value: object) -> None:
        chosen = RoundRobin if value is None else value
        if not (isinstance(chosen, type) and issubclass(chosen, PSDispatcher)):
            raise SpecError(
                f"DistributeTranspilerConfig.split_method is {value!r}; expected a subclass of PSDispatcher, such as "
                "RoundRobin or HashName (the class, no instance of it)",
                got=str(value),
            )
        self.__dict__["split_method"] = chosen

    @property
    def collective_mode(self) -> str | None:
        """Which collective algorithm mode "collective" takes."""
        return self.__dict__["collective_mode"] or None

    @collective_mode.setter
    def collective_mode(self, value: str | None) -> None:
        if value is not None:
            _one_of("collective_mode", value, COLLECTIVE_MODES)
        self.__dict__["collective_mode"] = value or ""

    @property
    def sync_mode(self) -> bool:
        """Whether all trainers' gradients of a step are merged into one update."""
        return bool(self.__dict__["sync_mode"])

    @sync_mode.setter
    def sync_mode(self, value: bool) -> None:
        self._bool("sync_mode", value)
        if value and self.runtime_split_send_recv:
            raise SpecError(
                "DistributeTranspilerConfig.sync_mode = True while runtime_split_send_recv is True: merging at runtime "
                "is for asynchronous modes. Set runtime_split_send_recv = False first"
            )
        self.__dict__["sync_mode"] = value

    @property
    def runtime_split_send_recv(self) -> bool:
        """Whether the communicator merges several gradients of a variable into one push."""
        return bool(self.__dict__["runtime_split_send_recv"])

    @runtime_split_send_recv.setter
    def runtime_split_send_recv(self, value: bool) -> None:
        self._bool("runtime_split_send_recv", value)
        if value and self.sync_mode:
            raise SpecError(
                "DistributeTranspilerConfig.runtime_split_send_recv = True while sync_mode is True: merging at runtime "
                "is for asynchronous modes. Set sync_mode = False first"
            )
        self.__dict__["runtime_split_send_recv"] = value

    def _bool(self, name: str, value: object) -> None:
        if not isinstance(value, bool):
            raise SpecError(f"DistributeTranspilerConfig.{name} is {value!r}; expected True or False", got=str(value))


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise SpecError(
            f"DistributeTranspilerConfig.{name} is {value!r}; expected one of {', '.join(known)}",
            got=str(value),
        )
