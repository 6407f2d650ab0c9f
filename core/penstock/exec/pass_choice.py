"""Choice of passes: what a BuildStrategy asks for, what of it holds for an executor, and warnings for the rest.

A field may have no effect because of what it is used with: GPUs, a mode, an optimizer. That is known when an executor
is made, and logged then, once in a process.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from penstock.errors import SpecError
from penstock.exec.devices import Devices, on_gpus
from penstock.exec.flags import value_of
from penstock.exec.strategies import BuildStrategy, GradientScaleStrategy
from penstock.graph.build import build_graph
from penstock.graph.choice import MatrixKernels
from penstock.graph.passes import Buckets, PassChoice
from penstock.graph.passes.fuse_optimizer import fuse_updates
from penstock.graph.passes.sync_batch_norm import has_batch_norm
from penstock.graph.ssa import Mode
from penstock.logger import warn_once
from penstock.program.ir import Role
from penstock.program.program import Program
from penstock.settings import FUSE_GROUPS_SIZE, FUSE_MEMORY_SIZE, MATRIX_KERNELS

_log = logging.getLogger(__name__)
# Fields that `settled` switches off on devices.
_CPU_ONLY = ("fuse_all_reduce_ops", "fuse_elewise_add_act_ops", "memory_optimize")


def _buckets() -> Buckets:
    """How large a bucket of gradients gets, by Fluid's flags: MB, and layers; not above 0: no limit."""
    size, layers = value_of(FUSE_MEMORY_SIZE), value_of(FUSE_GROUPS_SIZE)
    return Buckets(num_bytes=int(max(size, 0.0) * 2**20), num_layers=int(max(layers, 0.0)))


def choice_of(build: BuildStrategy) -> PassChoice:
    """Return the passes that the fields ask for."""
    return PassChoice(
        fuse_all_reduce=build.fuse_all_reduce_ops,
        fuse_optimizer=build.fuse_all_optimizer_ops,
        sync_batch_norm=build.sync_batch_norm,
        buckets=_buckets(),
        sequential=build.enable_sequential_execution,
        fed_loss_gradient=build.gradient_scale_strategy == GradientScaleStrategy.Customized,
        graphviz_path=build.debug_graphviz_path,
        fuse_add_act=build.fuse_elewise_add_act_ops,
        fuse_broadcast=build.fuse_broadcast_ops,
        reuse_buffers=build.memory_optimize is not False,
        inplace=build.enable_inplace,
    )


def settled(
    choice: PassChoice, *, devices: Devices, at_once: int, intra_op: int, rings: tuple[str, ...] = ()
) -> PassChoice:
    """Return what of a choice holds for an executor, with the conditions that its matmuls run in.

    On devices no pass chooses kernels or addresses of CPU memory; one GPU, whose updates overlap with nothing, fuses
    them. On CPU FLAGS_matrix_kernels forces a kernel, unless the choice itself does. `rings`: of the exchanges with
    other processes, if there are any.
    Raises SpecError for an unknown kernel in the environment.
    """
    if rings:
        choice = replace(choice, rings=rings)
    if devices:
        fuses = on_gpus(devices) and len(devices) == 1
        return replace(
            choice, fuse_all_reduce=False, fuse_optimizer=choice.fuse_optimizer or fuses, fuse_add_act=False,
            matrix_kernels=False, reuse_buffers=False, inplace=False, fuse_lookups=False, fuse_sparse=False,
            fuse_max_pool=False,
        )  # fmt: skip
    matrix = matrix_settings(at_once=at_once, intra_op=intra_op)
    return replace(choice, matrix=replace(matrix, forced=choice.matrix.forced or matrix.forced))


def matrix_settings(*, at_once: int, intra_op: int) -> MatrixKernels:
    """Return how matmuls choose their kernel under these conditions, by FLAGS_matrix_kernels.

    Raises SpecError for an unknown kernel in the environment.
    """
    wanted = value_of(MATRIX_KERNELS)
    return MatrixKernels("" if wanted == "auto" else wanted, at_once, intra_op)


def refuse_on_gpus(build: BuildStrategy, program: Program, devices: Devices) -> None:
    """Raise SpecError for a field that these devices cannot honour, and that would change the result if ignored."""
    if build.sync_batch_norm and len(devices) > 1 and on_gpus(devices) and has_batch_norm(program):
        raise SpecError(
            "BuildStrategy.sync_batch_norm = True on several GPUs: its operators (penstock.batch_norm_stats, "
            "penstock.sync_batch_norm) have no CUDA kernels. Set it to False, or run with use_cuda=False"
        )


def warn_of_fields_without_effect(build: BuildStrategy, program: Program, mode: Mode, devices: Devices) -> None:
    """Warn of each field that was set and does nothing for this program in this mode on these devices."""
    if devices:
        for name in _CPU_ONLY:
            if build.__dict__[name] is True:
                _warn_of(name, "on GPUs: it is made for CPU and off there")
        return
    if build.fuse_broadcast_ops:
        _warn_of("fuse_broadcast_ops", "on CPU: replicas share parameters")
    if build.__dict__["fuse_all_reduce_ops"] is True and mode == "reduce":
        _warn_of("fuse_all_reduce_ops", "in Reduce mode: each gradient goes to its parameter's owner by itself")
    if build.fuse_all_optimizer_ops and not _fuses_updates(program):
        why = (
            "on this program: no two of its updates are of a kind that is fused (SGD, Momentum, Adagrad or Adam with "
            "equal settings, on dense gradients)"
        )
        _warn_of("fuse_all_optimizer_ops", why)


def _warn_of(field: str, why: str) -> None:
    warn_once(_log, f"BuildStrategy.{field} = True has no effect {why}")


def _fuses_updates(program: Program) -> bool:
    """Whether updates are fused, or there is none that could be."""
    if not any(op.role & Role.OPTIMIZE and op.role_vars for op in program.operators):
        return True
    graph = build_graph(program, mode="local", num_replicas=1, active=1)
    return fuse_updates(graph, program) is not graph
