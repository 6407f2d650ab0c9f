"""Every row is popped, held or counted as dropped; what is dropped is the oldest of the first rule that has any."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.bounded import BoundedQueue, DropRule
from penstock.protocol.frames import Kind

LIMIT, LAST_RESORT = 20, 40
RULES = (
    DropRule(frozenset({Kind.OP_EVENTS}), LIMIT),
    DropRule(frozenset({Kind.OP_SUMS, Kind.SYNC}), LIMIT),
    DropRule(frozenset({Kind.METRICS}), LAST_RESORT, keep_newest=True),
)
RANK = {kind: rank for rank, rule in enumerate(RULES) for kind in rule.kinds}
KINDS = [Kind.OP_EVENTS, Kind.OP_SUMS, Kind.SYNC, Kind.METRICS, Kind.HELLO]
pushes = st.tuples(st.sampled_from(KINDS), st.integers(0, 12), st.integers(0, 2))
operations = st.lists(pushes, max_size=60)


def filled(given_pushes: list[tuple[Kind, int, int]]) -> tuple[BoundedQueue[int], list[int], list[int]]:
    """Push item i of `size` bytes and `size` rows, pop some; return the queue, what was popped, what was dropped."""
    queue, popped, dropped = BoundedQueue[int](RULES), list[int](), list[int]()
    for item, (kind, size, pops) in enumerate(given_pushes):
        dropped += [entry.item for entry in queue.push(kind, size, size, item)]
        popped += [entry.item for _ in range(pops) if (entry := queue.pop()) is not None]
    return queue, popped, dropped


@given(operations)
def test_each_item_is_popped_dropped_or_held_once(given_pushes: list[tuple[Kind, int, int]]) -> None:
    queue, popped, dropped = filled(given_pushes)
    assert sorted(popped + dropped + [entry.item for entry in queue]) == list(range(len(given_pushes)))


@given(operations)
def test_rows_of_dropped_items_are_counted_by_kind(given_pushes: list[tuple[Kind, int, int]]) -> None:
    queue, _, dropped = filled(given_pushes)
    expected: Counter[Kind] = Counter()
    for item in dropped:
        expected[given_pushes[item][0]] += given_pushes[item][1]
    assert queue.take_dropped() == expected
    assert not queue.dropped


@given(operations)
def test_items_leave_in_order_of_arrival(given_pushes: list[tuple[Kind, int, int]]) -> None:
    queue, popped, _ = filled(given_pushes)
    left = popped + [entry.item for entry in queue]
    assert left == sorted(left)


@given(operations)
def test_size_is_that_of_the_held_items(given_pushes: list[tuple[Kind, int, int]]) -> None:
    queue, _, _ = filled(given_pushes)
    assert queue.size_bytes == sum(given_pushes[entry.item][1] for entry in queue)
    assert len(queue) == len(list(queue))


@given(operations)
def test_no_rule_is_over_its_limit_while_it_has_entries(given_pushes: list[tuple[Kind, int, int]]) -> None:
    queue, _, _ = filled(given_pushes)
    for rank, rule in enumerate(RULES):
        if queue.size_bytes > rule.limit_bytes:
            assert sum(RANK.get(given_pushes[entry.item][0]) == rank for entry in queue) <= rule.keep_newest


@given(operations, pushes)
def test_drop_takes_the_oldest_of_the_earliest_rule(
    given_pushes: list[tuple[Kind, int, int]], last: tuple[Kind, int, int]
) -> None:
    queue, _, _ = filled(given_pushes)
    kinds = [kind for kind, _, _ in [*given_pushes, last]]
    held = [entry.item for entry in queue] + [len(given_pushes)]
    dropped = [entry.item for entry in queue.push(last[0], last[1], last[1], len(given_pushes))]
    droppable = [item for item in held if kinds[item] in RANK]
    assert dropped == sorted(droppable, key=lambda item: (RANK[kinds[item]], item))[: len(dropped)]


@given(operations)
def test_popped_items_pushed_to_the_front_are_in_order(given_pushes: list[tuple[Kind, int, int]]) -> None:
    queue, _, _ = filled(given_pushes)
    before = [entry.item for entry in queue]
    taken = [entry for _ in range(3) if (entry := queue.pop()) is not None]
    for entry in reversed(taken):
        assert queue.push_front(entry.kind, entry.rows, entry.size_bytes, entry.item) == []
    assert [entry.item for entry in queue] == before


@given(operations)
def test_discarded_items_are_gone_and_not_counted(given_pushes: list[tuple[Kind, int, int]]) -> None:
    queue, _, dropped = filled(given_pushes)
    rows = sum(given_pushes[item][1] for item in dropped)
    queue.discard(lambda item: item % 2 == 0)
    assert all(entry.item % 2 for entry in queue)
    assert sum(queue.dropped.values()) == rows
    assert queue.size_bytes == sum(entry.size_bytes for entry in queue)


def test_bytes_held_outside_count_against_the_limit() -> None:
    queue = BoundedQueue[str](RULES)
    queue.push(Kind.OP_EVENTS, 1, LIMIT // 2, "old")
    queue.outside_bytes = LIMIT
    assert [entry.item for entry in queue.push(Kind.HELLO, 1, 1, "hello")] == ["old"]


def test_newest_entry_of_a_rule_that_keeps_it_stays() -> None:
    queue = BoundedQueue[str](RULES)
    queue.push(Kind.HELLO, 1, LAST_RESORT, "hello")
    assert queue.push(Kind.METRICS, 1, 1, "old") == []
    assert [entry.item for entry in queue.push(Kind.METRICS, 1, 1, "new")] == ["old"]
