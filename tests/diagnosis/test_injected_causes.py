"""Sums with one cause built in: the first sentence names it and its place; without one it says that nothing is slow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.diagnosis import Disk, Finding, OpSum, Sums, TableLoad, Trainer, Wait, diagnose

MS = 1_000_000
STEPS = 100


def ops(*, scale: float = 1.0, split: float = 0.0, **more_ms: float) -> tuple[OpSum, ...]:
    """Operators of a step of 40 ms on two threads; `more_ms`: extra milliseconds of one, by name."""
    table = [
        ("feed_x", "input", "", 0.1), ("loss", "forward", "", 0.5),
        ("fc_0_mm", "forward", "tower.fc_0", 14.0), ("fc_1_mm", "forward", "tower.fc_1", 12.0),
        ("fc_1_dw", "backward", "tower.fc_1", 24.0), ("fc_0_dw", "backward", "tower.fc_0", 26.0),
        ("reduce_fc_0.w", "communication", "tower.fc_0", 0.4), ("adam_fc_0", "optimize", "tower.fc_0", 1.5),
    ]  # fmt: skip
    return tuple(
        OpSum(i, name, role, module, STEPS, int(STEPS * MS * (ms * scale + more_ms.get(name, 0.0))), split=split)
        for i, (name, role, module, ms) in enumerate(table)
    )


def trainer(index: int = 0, step_ms: float = 40.0, between_ms: float = 0.6, **more: object) -> Trainer:
    fields: dict[str, object] = {
        "workers": 2, "intra_op_threads": 1, "num_cores": 2, "idle": 0.06, "graph": "g",
        "ops": ops(), "last_step": 500, "silent_s": 0.1,
    }  # fmt: skip
    return replace(
        Trainer(index, step_ms * MS, between_ms * MS),
        **(fields | more),  # type: ignore[arg-type]
    )


def waits(*ms: float, trainers: int = 1, block: str = "", block_ms: float = 0.0, server: int = 0) -> tuple[Wait, ...]:
    """`ms` of each step for server 0, 1, …; `block_ms` of the one of `server` is for `block`."""
    found = []
    for one in range(trainers):
        for at, wait in enumerate(ms):
            part = block_ms if at == server else 0.0
            found.append(Wait(one, at, "", (wait - part) * MS))
            if part:
                found.append(Wait(one, at, f"{block}.block1", part * MS))
    return tuple(found)


def first(*trainers: Trainer, wait: tuple[Wait, ...] = (), running: bool = True) -> Finding:
    return diagnose(Sums(trainers, wait, running))[0]


SLOW_SERVER = first(trainer(step_ms=60), wait=waits(29.0, 1.5, block="carrier.embedding", block_ms=15.8))


def test_a_slow_server_is_named_with_its_table() -> None:
    assert SLOW_SERVER.sentence == (
        "48 % of each step waits for pserver-0; `carrier.embedding` is 15.8 ms of it; the other servers take 1.5 ms"
    )
    assert (SLOW_SERVER.cause, SLOW_SERVER.place, SLOW_SERVER.tab) == ("server", "pserver-0", "sync")


@pytest.mark.parametrize("server", [0, 1, 2, 3])
@pytest.mark.parametrize("num_trainers", [1, 2, 4])
def test_the_slow_one_of_several_servers_is_found(server: int, num_trainers: int) -> None:
    ms = [2.0] * 4
    ms[server] = 25.0
    found = first(*(trainer(i, step_ms=70) for i in range(num_trainers)), wait=waits(*ms, trainers=num_trainers))
    assert (found.cause, found.place) == ("server", f"pserver-{server}")


def test_servers_that_are_slow_alike_are_named_together() -> None:
    found = first(trainer(step_ms=80), wait=waits(18.0, 20.0))
    assert (found.cause, found.place) == ("servers", "the 2 parameter servers")


def test_a_hot_table_is_named_when_the_only_server_is_waited_for() -> None:
    found = first(trainer(step_ms=80), wait=waits(36.0, block="user.embedding", block_ms=33.0))
    assert (found.cause, found.place) == ("table", "user.embedding")


def test_waits_for_a_late_trainer_are_not_the_servers() -> None:
    late = trainer(0, step_ms=52, ops=ops(fc_1_dw=24.0))
    early = trainer(1, step_ms=52)
    wait = (Wait(0, 0, "", 0.5 * MS), Wait(1, 0, "", 12.5 * MS))
    found = first(late, early, wait=wait)
    assert found.sentence == "trainer 0 is 12.0 ms later than the others in `fc_1_dw`"
    assert (found.cause, found.place, found.op) == ("trainer", "trainer 0", 4)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_rank_on_a_slow_machine_is_found(late: int) -> None:
    trainers = [trainer(i, step_ms=60, ops=ops(scale=1.5 if i == late else 1.0)) for i in range(3)]
    wait = tuple(Wait(i, 0, "", (0.5 if i == late else 20.0) * MS) for i in range(3))
    found = first(*trainers, wait=wait)
    assert (found.cause, found.place) == ("trainer", f"trainer {late}")


def test_a_slow_way_to_one_server_is_found() -> None:
    wait = tuple(Wait(t, s, "", (18.0 if (t, s) == (1, 0) else 0.7) * MS) for t in range(3) for s in range(2))
    found = first(trainer(0), trainer(1, step_ms=57), trainer(2), wait=wait)
    assert found.sentence == "trainer 1 waits 18.0 ms of each step for pserver-0, the others 0.70 ms"


def test_a_starved_reader_is_found() -> None:
    found = first(trainer(between_ms=18.0))
    assert found.sentence == "input: 31 % of the step waits for data: 18.0 ms between steps"


def test_the_starved_one_of_two_trainers_is_named() -> None:
    wait = (Wait(0, 0, "", 0.2 * MS), Wait(1, 0, "", 17.0 * MS))
    found = first(trainer(0, step_ms=40, between_ms=18), trainer(1, step_ms=57, between_ms=0.5), wait=wait)
    assert (found.cause, found.place) == ("input", "trainer 0")


def test_input_operators_count_as_input() -> None:
    assert first(trainer(step_ms=60, ops=ops(feed_x=36.0))).cause == "input"


def test_gradient_exchange_of_replicas_is_found() -> None:
    found = first(trainer(step_ms=60, ops=ops(**{"reduce_fc_0.w": 38.0})))
    assert (found.cause, found.place) == ("exchange", "reduce_fc_0.w")


def test_threads_without_work_are_found() -> None:
    assert first(trainer(step_ms=70, workers=4, num_cores=4, idle=0.62)).cause == "idle"


@pytest.mark.parametrize("num_cores", [2, 8, 32])
def test_one_thread_on_a_machine_of_several_cores_is_found(num_cores: int) -> None:
    found = first(trainer(workers=1, num_cores=num_cores, idle=0.02, ops=ops(split=0.7)))
    assert found.cause == "one_thread" and f"{num_cores} cores" in found.sentence


def test_one_thread_ranks_below_a_longer_wait_for_a_server() -> None:
    one = trainer(step_ms=160, workers=1, num_cores=32, idle=0.02, ops=ops(split=0.7))
    found = diagnose(Sums((one,), waits(65.0, 1.0)))
    assert [(each.cause, round(each.share, 2)) for each in found[:2]] == [("server", 0.40), ("one_thread", 0.33)]


def test_cores_that_operators_cannot_use_cost_nothing() -> None:
    """Every operator waits for the one before, and none splits."""
    chain = sum(op.total_ns / op.count for op in ops())
    assert first(trainer(workers=1, num_cores=32, idle=0.02, ops=ops(), path_ns=chain)).cause == "healthy"


def test_operators_that_wait_for_no_other_would_use_more_cores() -> None:
    found = first(trainer(step_ms=80, workers=1, num_cores=4, idle=0.02, ops=ops(), path_ns=48 * MS))
    assert (found.cause, found.place) == ("one_thread", "threads")
    assert found.share == pytest.approx((78.0 - 48) / 80.6, abs=0.01)


def test_trainers_of_several_machines_have_cores_of_their_own() -> None:
    each = [trainer(i, node=f"node-{i}", workers=1, num_cores=2, idle=0.02, ops=ops(split=0.7)) for i in range(2)]
    assert first(*each).sentence.startswith("one thread computes on a machine of 2 cores")
    here = [replace(one, node="node-0") for one in each]
    assert first(*here).cause == "healthy"


@pytest.mark.parametrize("intra_op_threads", [2, 8])
def test_threads_within_operators_use_the_cores(intra_op_threads: int) -> None:
    one = trainer(workers=1, intra_op_threads=intra_op_threads, num_cores=intra_op_threads, idle=0.02)
    assert first(replace(one, ops=ops(split=0.7))).cause == "healthy"


def test_operators_too_short_for_their_batch_are_found() -> None:
    short = tuple(OpSum(i, f"add_{i}", "forward", "", STEPS, STEPS * 3_000) for i in range(900))
    found = first(trainer(step_ms=4.0, between_ms=0.1, ops=short, idle=0.2, workers=1))
    assert found.cause == "small_operators" and "900 operators" in found.sentence


PARTS = (("aten.mm.default", 2.0), ("aten.relu.default", 0.3), ("aten.add.Tensor", 0.4))


def encoder(count: int = 6, odd: int | None = None, times: float = 1.0, flops: int = 1000) -> tuple[OpSum, ...]:
    """Layers of three operators each; those of layer `odd` take `times` as long, its matmul is of `flops`."""
    found = []
    for layer in range(count):
        slower, work = (times, flops) if layer == odd else (1.0, 1000)
        for part, (kind, ms) in enumerate(PARTS):
            name, ns = f"{kind[5:].partition('.')[0]}_{layer}", int(STEPS * MS * ms * slower)
            found.append(OpSum(3 * layer + part, name, "forward", f"net.layers.{layer}", STEPS, ns, type=kind,
                               sizes=f"{work}", flops=work if part == 0 else 0))  # fmt: skip
    return tuple(found)


@pytest.mark.parametrize("odd", [0, 3, 5])
def test_a_straggling_layer_is_named(odd: int) -> None:
    found = first(trainer(step_ms=27, workers=1, intra_op_threads=2, ops=encoder(odd=odd, times=5.0)))
    assert found.sentence == (
        f"`net.layers.{odd}` takes 13.5 ms of each step, 5.0 times the median of its 5 siblings;"
        f" `mm_{odd}` takes most of it"
    )
    assert (found.cause, found.place, found.op, found.graph) == ("layer", f"net.layers.{odd}", 3 * odd, "g")


def test_a_layer_that_is_larger_by_design_is_no_straggler() -> None:
    wide = encoder(odd=3, times=5.0, flops=10_000)
    assert first(trainer(step_ms=27, workers=1, intra_op_threads=2, ops=wide)).cause == "healthy"
    assert first(trainer(step_ms=16.2, workers=1, intra_op_threads=2, ops=encoder())).cause == "healthy"


def test_a_tower_whose_first_layer_needs_no_gradient_is_healthy() -> None:
    """Three layers of 512 with two or three matmuls of 5 ms each, and a last one of one column."""
    tower = [OpSum(at, f"mm_{at}", "forward", f"fc_{layer}", STEPS, int(STEPS * MS * ms), type="mm", sizes=f"{flops}",
                   flops=flops)
             for at, (layer, ms, flops) in enumerate([*[(0, 5.0, 500)] * 2, *[(1, 5.0, 500)] * 3, *[(2, 5.6, 500)] * 3,
                                                      *[(3, 0.1, 1)] * 3])]  # fmt: skip
    assert first(trainer(step_ms=42.1, workers=1, intra_op_threads=2, ops=tuple(tower))).cause == "healthy"


def test_one_operator_of_several_alike_is_named() -> None:
    alike = tuple(replace(op, module="") for op in encoder(odd=2, times=5.0))
    found = first(trainer(step_ms=27, workers=1, intra_op_threads=2, ops=alike))
    assert found.sentence == (
        "`mm_2` takes 10.0 ms, 5.0 times the median of its 5 siblings of the same sizes: 29 % of the step"
    )
    assert (found.cause, found.op) == ("operator", 6)


def test_an_operator_among_siblings_of_no_time_is_named() -> None:
    sums = encoder(odd=2, times=5.0)
    alike = tuple(replace(op, module="", total_ns=op.total_ns if op.index == 6 else 0) for op in sums)
    found = first(trainer(step_ms=27, workers=1, intra_op_threads=2, ops=alike))
    assert found.sentence.startswith("`mm_2` takes 10.0 ms, ") and found.sentence.endswith(": 36 % of the step")
    assert (found.cause, found.op) == ("operator", 6)


def test_the_shard_with_the_ids_of_a_table_is_named() -> None:
    table = TableLoad("table", {0: 100, 1: 9900}, hot_id="7", hot_share=0.41)
    sums = Sums((trainer(step_ms=60),), waits(1.5, 29.0), tables=(TableLoad("even", {0: 500, 1: 500}), table))
    found = diagnose(sums)[0]
    assert found.sentence == (
        "48 % of each step waits for pserver-1, which has 99 % of the ids of `table`, id 7 alone 41 %;"
        " the other servers take 1.5 ms"
    )
    assert (found.cause, found.place, dict(found.query)) == ("hot_table", "table", {"metric": "wait", "table": "table"})
    even = Sums((trainer(step_ms=60),), waits(1.5, 29.0), tables=(TableLoad("even", {0: 500, 1: 500}),))
    assert diagnose(even)[0].cause == "server"


def test_a_full_disk_is_named_before_what_is_slow() -> None:
    full, free = Disk("node-a", 400_000, 20 << 30), Disk("node-b", 5 << 30, 20 << 30)
    found = diagnose(Sums((trainer(step_ms=60),), waits(29.0), disks=(free, full)))
    assert [one.cause for one in found[:2]] == ["full_disk", "servers"]
    assert found[0].sentence.startswith("the disk of node-a is full: 0.4 MB of 21,475 MB are free")
    assert diagnose(Sums((trainer(),), disks=(full,), running=False))[0].cause == "healthy"


def test_the_healthy_sentence_has_the_share_of_the_matrix_rate() -> None:
    multiplied = tuple(replace(op, flops=100 * MS) for op in ops() if op.name == "fc_0_mm")
    found = first(trainer(step_ms=40, between_ms=0, ops=multiplied, matrix_gflops=5.0))
    assert found.sentence.startswith("nothing is slow: 100 % of the step computes, 25 % of the machine's matrix rate")


def test_a_late_trainer_leads_to_its_lane_and_step() -> None:
    assert SLOW_SERVER.query == {"metric": "wait"}
    late, early = trainer(1, step_ms=52, sampled_step=417), trainer(0, step_ms=52)
    found = first(late, early, wait=(Wait(1, 0, "", 0.5 * MS), Wait(0, 0, "", 12.5 * MS)))
    assert (found.cause, found.tab, found.query) == ("trainer", "timeline", {"pin": "trainer-1.0", "step": "417"})


def test_a_trainer_that_hangs_is_named_not_those_that_wait() -> None:
    hung, waiting = trainer(1, silent_s=34.0, last_step=411), trainer(0, silent_s=34.0, last_step=412)
    found = first(waiting, hung)
    assert found.sentence == "trainer 1 has not finished step 412 for 34 s; a step takes 40.6 ms"
    assert (found.cause, found.place) == ("stalled", "trainer 1")


def test_a_trainer_that_hangs_is_named_with_its_operator() -> None:
    hung = trainer(1, silent_s=34.0, last_step=411, unfinished=(4, 6))
    found = first(trainer(0, silent_s=34.0, last_step=412, unfinished=(6,)), hung)
    assert found.sentence == (
        "trainer 1 has not finished step 412 for 34 s, last reported in `fc_1_dw`; a step takes 40.6 ms"
    )
    assert (found.tab, found.op, found.graph) == ("graph", 4, "g")


def test_trainers_that_hang_in_several_operators_name_none() -> None:
    hung = [trainer(i, silent_s=34.0, unfinished=(4 - i,)) for i in range(2)]
    found = first(*hung)
    assert found.sentence == "no trainer has finished a step for 34 s, since step 500; a step takes 40.6 ms"
    assert (found.tab, found.op) == ("events", None)


def test_a_job_that_hangs_as_a_whole_says_since_when() -> None:
    assert first(trainer(silent_s=60.0)).sentence.startswith("no trainer has finished a step for 60 s, since step 500")


def test_a_trainer_that_evaluates_does_not_hang() -> None:
    found = first(trainer(0, silent_s=34.0, evaluates=True), trainer(1, silent_s=33.0, last_step=501))
    assert (found.cause, found.sentence) == ("evaluation", "trainer 0 evaluates: no step has trained for 34 s")


def test_a_job_that_is_over_does_not_hang() -> None:
    assert first(trainer(silent_s=3600.0), running=False).cause == "healthy"


def test_a_long_step_is_no_hang() -> None:
    assert first(trainer(step_ms=30_000, silent_s=45.0, ops=ops(scale=750))).cause == "healthy"


@pytest.mark.parametrize(
    "healthy",
    [
        Sums((trainer(),)),
        Sums((trainer(between_ms=2.0),)),
        Sums((trainer(0), trainer(1))),
        Sums((trainer(0), trainer(1, step_ms=41.5)), waits(0.8, 0.9, trainers=2)),
        Sums((trainer(),), waits(2.0)),
        Sums((trainer(workers=1, num_cores=1, idle=0.0),)),
        Sums((trainer(idle=None, graph=None, ops=()),)),
        Sums((trainer(idle=0.2),)),
        Sums(tuple(trainer(i) for i in range(8)), waits(0.5, 0.5, 0.6, trainers=8)),
        Sums((trainer(silent_s=4.0),)),
    ],
)
def test_a_healthy_job_is_said_to_be_so(healthy: Sums) -> None:
    found = diagnose(healthy)[0]
    assert found.cause == "healthy" and found.sentence.startswith("nothing is slow: ")


def test_the_healthy_sentence_says_what_the_step_does() -> None:
    assert first(trainer()).sentence == ("nothing is slow: 98 % of the step computes, `fc_0_dw` 33 % of operator time")


def test_before_any_step_there_is_nothing_to_say() -> None:
    assert diagnose(Sums((Trainer(0, 0.0),))) == [] and diagnose(Sums(())) == []


def test_causes_are_ranked_by_what_they_cost() -> None:
    found = diagnose(Sums((trainer(step_ms=60, between_ms=10.0),), waits(22.0)))
    assert [one.cause for one in found[:2]] == ["table", "input"] or [one.cause for one in found[:2]] == [
        "servers",
        "input",
    ]
    assert found[0].share > found[1].share


def test_the_server_that_all_are_stuck_on_is_named() -> None:
    silent = [trainer(i, step_ms=60, silent_s=25.0, last_step=34) for i in range(2)]
    found = first(*silent, wait=waits(2.0, 700.0, trainers=2))
    assert found.sentence == (
        "no trainer has finished a step for 25 s, since step 34: they wait for pserver-1; a step takes 60.6 ms"
    )
    assert (found.cause, found.place, found.tab) == ("stalled", "pserver-1", "sync")
    assert first(*silent, wait=waits(2.0, 20.0, trainers=2)).place == "no trainer"  # no longer than in any step
