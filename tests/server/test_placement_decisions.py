"""Placement: all or nothing, never more than there is, and a sentence when it cannot be."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock_server.services.placement import Chosen, Need, Room, Waits, place, take

GIB = 1 << 30


def need(cpus: int, index: int = 0, gpus: int = 0, memory: int = GIB) -> Need:
    return Need("trainer", index, (cpus, gpus, memory))


def room(name: str, cpus: int, used: int = 0, gpus: int = 0) -> Room:
    return Room(name, name, (cpus, gpus, 64 * GIB), (cpus - used, gpus, 64 * GIB))


def waits(answer: Chosen | Waits) -> Waits:
    assert isinstance(answer, Waits)
    return answer


def test_replicas_fill_the_fullest_node_that_holds_them() -> None:
    assert place([need(2)], [room("big", 16), room("small", 4)]) == Chosen(("small",))


def test_large_replicas_are_placed_first_so_that_all_fit() -> None:
    assert place([need(1, 0), need(4, 1)], [room("a", 4), room("b", 1)]) == Chosen(("b", "a"))


def test_a_replica_that_asks_for_no_core_shares_a_full_node() -> None:
    needs = [need(1, 0), need(1, 1), need(0, 2), need(0, 3)]
    assert place(needs, [room("small", 2)]) == Chosen(("small",) * 4)


def test_gpus_are_kept_for_those_who_ask_for_them() -> None:
    assert place([need(1)], [room("gpu", 4, gpus=8), room("cpu", 64)]) == Chosen(("cpu",))


def listener(index: int = 0) -> Need:
    return Need("pserver", index, (1, 0, GIB), num_ports=1)


def test_port_is_given_once_on_a_host_that_two_nodes_share() -> None:
    ports = (7001, 7002, 7003)
    rooms = [replace(room(name, 2), host="h", ports=ports, offered=ports) for name in ("a", "b")]
    placed = place([listener(0), need(1), listener(1), listener(2)], rooms)
    assert isinstance(placed, Chosen)
    assert sorted(placed.ports) == [0, 2, 3]
    assert sorted(placed.ports.values()) == [(7001,), (7002,), (7003,)]
    left = take(rooms, [listener(0), need(1), listener(1), listener(2)], placed)
    assert [r.ports for r in left] == [(), ()]
    idle = [replace(one, free=one.total) for one in left]
    answer = waits(place([listener()], idle))
    assert "needs a port" in answer.why and "0 free of 3 ports" in answer.why
    assert not answer.forever


def test_job_that_waits_for_ports_of_others_waits_for_room() -> None:
    some = replace(room("a", 8), ports=(7001,), offered=(7001, 7002))
    answer = waits(place([listener(0), listener(1)], [some]))
    assert "2 pservers for 1 free of 2 ports" in answer.why
    assert not answer.forever


def test_more_pservers_than_there_are_ports_wait_for_nothing() -> None:
    ports = (7001, 7002)
    for free in (ports, (7001,)):
        answer = waits(place([listener(i) for i in range(3)], [replace(room("a", 8), ports=free, offered=ports)]))
        assert f"3 pservers for {len(free)} free of 2 ports" in answer.why
        assert "fewer pservers" in answer.why
        assert answer.forever


def test_ranks_of_a_collective_job_have_distinct_ports() -> None:
    ranks = [Need("trainer", 0, (1, 0, GIB), num_ports=2), Need("trainer", 1, (1, 0, GIB), num_ports=1)]
    ports = (7001, 7002, 7003)
    placed = place(ranks, [replace(room("a", 2), ports=ports, offered=ports)])
    assert isinstance(placed, Chosen)
    assert placed.ports == {0: (7001, 7002), 1: (7003,)}
    answer = waits(place(ranks, [replace(room("a", 2), ports=ports[:2], offered=ports)]))
    assert "2 trainers, which need 3 ports, for 2 free of 3 ports" in answer.why


def test_busy_cores_are_named_where_ports_are_free() -> None:
    full = replace(room("a", 2, used=2), ports=(7001,), offered=(7001,))
    answer = waits(place([listener()], [full]))
    assert "asks for 1 CPU" in answer.why
    assert not answer.forever


def test_two_hosts_may_give_the_same_port() -> None:
    rooms = [replace(room(name, 1), host=name, ports=(7001,)) for name in ("a", "b")]
    placed = place([listener(0), listener(1)], rooms)
    assert isinstance(placed, Chosen)
    assert set(placed.node_ids) == {"a", "b"}
    assert placed.ports == {0: (7001,), 1: (7001,)}


def test_no_node_says_how_to_get_one() -> None:
    assert "penstock agent join" in waits(place([need(1)], [])).why


def test_a_need_beyond_every_node_waits_and_names_the_largest() -> None:
    answer = waits(place([need(8)], [room("a", 2), room("b", 4)]))
    assert answer.forever
    assert "asks for 8 CPUs" in answer.why
    assert "'b', has 4 CPUs" in answer.why


def test_busy_nodes_are_waited_for() -> None:
    answer = waits(place([need(4)], [room("a", 4, used=2)]))
    assert not answer.forever
    assert "2 CPUs, 64 GiB on 'a'" in answer.why


def test_gang_beyond_all_nodes_together_waits_for_ever() -> None:
    answer = waits(place([need(4, i) for i in range(3)], [room("a", 4), room("b", 4)]))
    assert answer.forever
    assert "3 replicas at once" in answer.why


amounts = st.tuples(st.integers(1, 8), st.integers(0, 2), st.integers(1, 16))
needs_of = st.lists(amounts, min_size=1, max_size=6)
rooms_of = st.lists(st.tuples(amounts, st.integers(0, 8)), max_size=4)


@given(needs_of, rooms_of)
def test_placement_never_exceeds_free_capacity_or_is_partial(
    wanted: list[tuple[int, int, int]], given_rooms: list[tuple[tuple[int, int, int], int]]
) -> None:
    needs = [Need("trainer", i, one) for i, one in enumerate(wanted)]
    rooms = [
        Room(str(i), str(i), total, (max(0, total[0] - used), total[1], total[2]))
        for i, (total, used) in enumerate(given_rooms)
    ]
    answer = place(needs, rooms)
    assert place(needs, rooms) == answer
    if isinstance(answer, Waits):
        assert answer.why
        return
    assert len(answer.node_ids) == len(needs)
    used: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for one, node_id in zip(needs, answer.node_ids, strict=True):
        used[node_id] = [u + a for u, a in zip(used[node_id], one.amounts, strict=True)]
    for before, after in zip(rooms, take(rooms, needs, answer), strict=True):
        assert all(u <= f for u, f in zip(used[before.node_id], before.free, strict=True))
        assert after.free == tuple(f - u for f, u in zip(before.free, used[before.node_id], strict=True))
