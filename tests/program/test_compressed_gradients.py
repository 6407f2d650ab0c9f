"""DGCMomentumOptimizer against the formulas of Fluid's kernels in numpy (float64), on one replica and on two."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as fluid
from penstock.errors import ProgramError

L: Any = fluid.layers
WIDTH, ROWS, STEPS, BEGIN = 128, 8, 6, 2
RATE, MOMENTUM, SPARSITY, RAMP_UP = 0.05, 0.9, [0.75, 0.99], 2
DECAY, CLIP, TRAINERS = 0.1, 0.2, 4


def feeds() -> list[dict[str, Any]]:
    draw = np.random.default_rng(3)
    return [{n: draw.normal(size=(ROWS, WIDTH)).astype("float32") for n in ("x", "t")} for _ in range(STEPS)]


def trained(num_replicas: int, reduce: bool, **settings: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Parameters before and after; `w` has as many elements as are compressed, `b` fewer."""
    main, startup, scope = fluid.Program(), fluid.Program(), fluid.Scope()
    startup.random_seed = 1
    with fluid.program_guard(main, startup):
        x, t = fluid.data("x", [None, WIDTH]), fluid.data("t", [None, WIDTH])
        out = L.fc(x, WIDTH, param_attr="w", bias_attr="b")
        loss = L.mean(L.reduce_sum(out * t, 1))
        fluid.optimizer.DGCMomentumOptimizer(RATE, MOMENTUM, BEGIN, RAMP_UP, SPARSITY, **settings).minimize(loss)
    assert fluid.Program.parse(str(main)) == main
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    runs: Any = main
    if num_replicas > 1:
        build = fluid.BuildStrategy()
        kinds = fluid.BuildStrategy.ReduceStrategy
        build.reduce_strategy = kinds.Reduce if reduce else kinds.AllReduce
        places = [fluid.CPUPlace()] * num_replicas
        runs = fluid.CompiledProgram(main).with_data_parallel(loss.name, build, places=places)
    before = {n: np.array(scope.find_var(n), dtype=np.float64) for n in ("w", "b")}
    for feed in feeds():
        exe.run(runs, feed, [loss], scope=scope)
    return before, {n: np.array(scope.find_var(n), dtype=np.float64) for n in ("w", "b")}


def expected(before: dict[str, np.ndarray], num_replicas: int, nesterov: bool, decay: float, clip: float) -> Any:
    """dgc_op, then dgc_momentum_op; divided by the number of replicas, which they multiply by."""
    w, b, share = before["w"].copy(), before["b"].copy(), 1 / num_replicas
    u, v = np.zeros((2, num_replicas, *w.shape))
    velocity, velocity_of_b = np.zeros_like(w), np.zeros_like(b)
    for step, feed in enumerate(feeds()):
        xs, ts = (np.split(feed[n].astype("float64"), num_replicas) for n in ("x", "t"))
        sent = np.zeros_like(w)
        for r, (x, t) in enumerate(zip(xs, ts, strict=True)):
            clipped = x.T @ t / ROWS
            if step >= BEGIN:
                clipped *= min(1.0, clip / float(np.linalg.norm(clipped)))
            local = clipped + decay * w * share
            if step < BEGIN:
                sent += local
                continue
            old = velocity * share if step == BEGIN else u[r]
            moved = MOMENTUM * (old + local) if nesterov else MOMENTUM * old + local
            total = v[r] + moved + (clipped * share if nesterov else 0.0)
            number = int(w.size * (1 - SPARSITY[min((step - BEGIN) * len(SPARSITY) // RAMP_UP, len(SPARSITY) - 1)]))
            goes = np.abs(total) >= np.sort(np.abs(total), axis=None)[-number]
            sent += total * goes
            u[r], v[r] = moved * ~goes, total * ~goes
        if step < BEGIN:
            velocity = MOMENTUM * velocity + sent
            sent = sent + MOMENTUM * velocity if nesterov else velocity
        gradient = feed["t"].astype("float64").sum(0) / ROWS + decay * b
        velocity_of_b = MOMENTUM * velocity_of_b + gradient
        w -= RATE * sent
        b -= RATE * (gradient + MOMENTUM * velocity_of_b if nesterov else velocity_of_b)
    return w, b


@pytest.mark.parametrize(("num_replicas", "reduce"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("nesterov", [False, True])
def test_the_largest_sums_of_gradients_are_exchanged(num_replicas: int, reduce: bool, nesterov: bool) -> None:
    before, after = trained(num_replicas, reduce, use_nesterov=nesterov)
    w, b = expected(before, num_replicas, nesterov, 0.0, np.inf)
    np.testing.assert_allclose(after["w"], w, rtol=0, atol=2e-5)
    np.testing.assert_allclose(after["b"], b, rtol=0, atol=2e-5)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_decay_and_clip_come_before_the_exchange(num_replicas: int) -> None:
    norm = CLIP * np.sqrt(TRAINERS)
    settings = {"regularization": fluid.regularizer.L2Decay(DECAY), "num_trainers": TRAINERS}
    before, after = trained(num_replicas, False, grad_clip=fluid.clip.GradientClipByNorm(norm), **settings)
    w, _ = expected(before, num_replicas, False, DECAY, CLIP)
    np.testing.assert_allclose(after["w"], w, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"rampup_begin_step": -1},
        {"rampup_begin_step": 0, "sparsity": [1.0]},
        {"rampup_begin_step": 0, "grad_clip": fluid.clip.GradientClipByNorm(1.0)},
        {"rampup_begin_step": 0, "grad_clip": fluid.clip.GradientClipByGlobalNorm(1.0), "num_trainers": 2},
    ],
)
def test_other_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ProgramError, match="DGCMomentumOptimizer"):
        fluid.optimizer.DGCMomentumOptimizer(RATE, MOMENTUM, **settings)
