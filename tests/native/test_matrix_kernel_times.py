"""Which kernel is the fastest: measured once, remembered in memory and in a file, decided with a margin."""

from __future__ import annotations

import json
import multiprocessing
import resource
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest
from tests.native.products import fails, gives_nan, in_bfloat16

from penstock.machine.cache import cache_folder
from penstock.native.matrix_cache import FILE_NAME, VERSION, CacheFile, machine
from penstock.native.matrix_kernels import (
    KERNELS,
    MOST_ELEMENTS,
    MOST_FLOP,
    Conditions,
    KernelTimes,
    Product,
    decide,
    forced,
    rounded,
)  # fmt: skip
from penstock.native.matrix_probe import Multiply, available
from penstock.native.matrix_timing import measure

PRODUCT = Product(512, 400, 400)
TWO = Conditions(2, 1)


class Memory:
    """A store in memory."""

    def __init__(self) -> None:
        self.content: dict[str, dict[str, float]] = {}

    def load(self) -> Mapping[str, Mapping[str, float]]:
        return self.content

    def add(self, found: Mapping[str, Mapping[str, float]]) -> Mapping[str, Mapping[str, float]]:
        for entry, times in found.items():
            if not self.content.get(entry, {}).keys() >= times.keys():
                self.content[entry] = dict(times)
        return self.content


class Stopwatch:
    """Measures nothing: gives the next seconds of a list, and counts what it was asked."""

    def __init__(self, *seconds: dict[str, float | None]) -> None:
        self.seconds, self.asked = list(seconds), 0

    def __call__(
        self, products: list[Product], conditions: Conditions, budget_s: float, available: Collection[str]
    ) -> dict[Product, dict[str, float | None]]:
        self.asked += len(products)
        return {p: self.seconds.pop(0) for p in products if self.seconds}


@pytest.mark.parametrize(
    ("seconds", "kernel"),
    [
        ({"torch": 1.0, "onednn": 0.96}, "onednn"),
        ({"torch": 1.0, "onednn": 0.98}, "torch"),
        ({"torch": 1.0, "onednn": 2.0}, "torch"),
        ({"onednn": 1.0}, "torch"),
        ({}, "torch"),
        ({"torch": 1.0, "onednn": 0.5, "onednn_matmul": 0.4}, "onednn_matmul"),
        ({"torch": 1.0, "onednn": 0.5, "onednn_matmul": 0.49}, "onednn"),
        ({"torch": 1.0, "onednn": None, "onednn_matmul": 0.5}, "onednn_matmul"),
        ({"torch": 1.0, "onednn": None}, "torch"),
    ],
)
def test_another_kernel_has_to_be_three_percent_faster(seconds: dict[str, float | None], kernel: str) -> None:
    assert decide(seconds) == kernel


@pytest.mark.parametrize(
    ("size", "expected"), [(1, 1), (7, 7), (8, 8), (9, 10), (333, 384), (334, 384), (500, 512), (512, 512), (513, 640)]
)
def test_sizes_of_a_batch_are_rounded_up_to_four_a_doubling(size: int, expected: int) -> None:
    assert rounded(size) == expected


def test_a_long_product_is_measured_on_a_part_of_it() -> None:
    part = Product(65536, 4096, 4096, transpose_w=True, bias=True, activation="relu").measured()
    assert MOST_FLOP / 2 < part.flop <= MOST_FLOP
    assert (part.transpose_x, part.transpose_w, part.bias, part.activation) == (False, True, True, "relu")
    assert PRODUCT.measured() == PRODUCT


def test_an_answer_never_changes_within_a_process() -> None:
    clock = Stopwatch({"torch": 1.0, "onednn": 0.5}, {"torch": 0.5, "onednn": 1.0})
    times = KernelTimes(Memory(), clock)
    assert times.choose([PRODUCT, PRODUCT], TWO) == times.choose([PRODUCT], TWO) == {PRODUCT: "onednn"}
    assert times.choose([PRODUCT], Conditions(1, 2)) == {PRODUCT: "onednn"}
    assert clock.asked == 1


def test_another_process_takes_the_times_from_the_store() -> None:
    store = Memory()
    KernelTimes(store, Stopwatch({"torch": 1.0, "onednn": 0.5})).choose([PRODUCT], TWO)
    later = Stopwatch()
    assert KernelTimes(store, later).choose([PRODUCT], TWO) == {PRODUCT: "onednn"}
    assert later.asked == 0


def test_what_the_time_did_not_allow_stays_with_torch_for_good() -> None:
    clock = Stopwatch()
    times = KernelTimes(Memory(), clock)
    assert times.choose([PRODUCT], TWO) == times.choose([PRODUCT], TWO) == {PRODUCT: "torch"}
    assert clock.asked == 1


def test_concurrent_measurements_agree_on_the_first_stored() -> None:
    store = Memory()

    def overtaken(
        products: list[Product], conditions: Conditions, budget_s: float, available: Collection[str]
    ) -> dict[Product, dict[str, float | None]]:
        first = KernelTimes(store, Stopwatch({"torch": 2.0, "onednn": 1.0}))
        assert first.choose([PRODUCT], TWO) == {PRODUCT: "onednn"}
        return {PRODUCT: {"torch": 1.0, "onednn": 2.0}}

    assert KernelTimes(store, overtaken).choose([PRODUCT], TWO) == {PRODUCT: "onednn"}


def test_unmeasured_kernels_take_times_stored_by_other_processes() -> None:
    store = Memory()

    def overtaken(
        products: list[Product], conditions: Conditions, budget_s: float, available: Collection[str]
    ) -> dict[Product, dict[str, float | None]]:
        KernelTimes(store, Stopwatch({"torch": 2.0, "onednn": 1.0})).choose([PRODUCT], TWO)
        return {}

    assert KernelTimes(store, overtaken).choose([PRODUCT], TWO) == {PRODUCT: "onednn"}


def test_unmeasured_kernels_are_reported_and_measured_next_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "penstock")
    other, store = Product(256, 400, 400), Memory()
    faster: dict[str, float | None] = {"torch": 1.0, "onednn": 0.5}
    first = KernelTimes(store, Stopwatch(faster))
    assert first.choose([PRODUCT, other], TWO) == {PRODUCT: "onednn", other: "torch"}
    (logged,) = caplog.messages
    assert "1 more stay with torch's" in logged
    later = Stopwatch(faster)
    assert KernelTimes(store, later).choose([PRODUCT, other], TWO) == {PRODUCT: "onednn", other: "onednn"}
    assert later.asked == len(caplog.messages) == 1


LAYOUTS = [
    Product(64, 32, 48, transpose_x, transpose_w, bias, activation)
    for transpose_x in (False, True)
    for transpose_w in (False, True)
    for bias, activation in ((False, "none"), (True, "relu"))
]
BATCH = Product(16, 8, 16, batch=4)


@pytest.mark.parametrize("conditions", [Conditions(1, 1), TWO])
def test_the_kernels_of_every_layout_are_measured(conditions: Conditions) -> None:
    found = measure([*LAYOUTS, BATCH], conditions, 30.0, available())
    assert len(found) == 9
    for product, times in found.items():
        assert set(times) == set(product.candidates()) & set(available())
        assert all(t is not None and 0 < t < 10 for t in times.values())


def test_no_time_measures_nothing() -> None:
    assert measure([PRODUCT], TWO, 0.0, KERNELS) == {}


# ---------------------------------------------------------------- kernels that fail


@pytest.mark.parametrize(
    ("by", "reason"),
    [(fails, "needs the cpu support avx512bw"), (in_bfloat16, "more than rounding"), (gives_nan, "more than rounding")],
)
@pytest.mark.parametrize("product", [*LAYOUTS, BATCH], ids=str)
def test_a_kernel_that_fails_or_is_wrong_is_left_out(
    product: Product, by: Multiply, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    times = measure([product], Conditions(1, 1), 30.0, KERNELS, by=by)[product]
    assert {kernel for kernel, seconds in times.items() if seconds is None} == set(product.candidates()) - {"torch"}
    assert decide(times) == "torch"
    assert len(caplog.messages) == len(product.candidates()) - 1
    assert all(reason in line and "\n" not in line for line in caplog.messages)


def test_a_kernel_left_out_is_tried_again_by_another_process() -> None:
    store, weight_gradient = Memory(), Product(400, 512, 400, transpose_x=True)
    clock = Stopwatch(
        {"torch": 1.0, "onednn": 0.5, "onednn_matmul": None}, {"torch": 1.0, "onednn": 0.5, "onednn_matmul": 0.1}
    )
    first = KernelTimes(store, clock)
    assert first.choose([weight_gradient], TWO) == first.choose([weight_gradient], TWO) == {weight_gradient: "onednn"}
    assert clock.asked == 1
    assert KernelTimes(store, clock).choose([weight_gradient], TWO) == {weight_gradient: "onednn_matmul"}


def test_times_of_a_kernel_that_is_absent_are_ignored() -> None:
    store, weight_gradient = Memory(), Product(400, 512, 400, transpose_x=True)
    clock = Stopwatch({"torch": 1.0, "onednn": 0.5, "onednn_matmul": 0.1})
    assert KernelTimes(store, clock).choose([weight_gradient], TWO) == {weight_gradient: "onednn_matmul"}
    without = KernelTimes(store, clock, available=lambda: ("torch", "onednn"))
    assert without.choose([weight_gradient], TWO) == {weight_gradient: "onednn"}
    assert clock.asked == 1


def test_nothing_is_measured_where_torch_has_no_rival() -> None:
    clock = Stopwatch()
    times = KernelTimes(Memory(), clock, available=lambda: ("torch",))
    assert times.choose([PRODUCT], TWO) == {PRODUCT: "torch"}
    assert clock.asked == 0


@pytest.mark.parametrize(
    ("product", "kernels", "expected"),
    [
        (PRODUCT, KERNELS, "onednn"),
        (Product(400, 512, 400, transpose_x=True), KERNELS, "onednn_matmul"),
        (Product(400, 512, 400, transpose_x=True), ("torch", "onednn"), "onednn"),
        (BATCH, KERNELS, "onednn_matmul"),
        (BATCH, ("torch", "onednn"), "torch"),
        (PRODUCT, ("torch",), "torch"),
    ],
)
def test_onednn_is_forced_as_far_as_it_is_there(product: Product, kernels: tuple[str, ...], expected: str) -> None:
    assert forced(product, "onednn", kernels) == expected
    assert forced(product, "torch", kernels) == "torch"


# ---------------------------------------------------------------- the file


def cache(path: Path, machine: str = "this one") -> CacheFile:
    return CacheFile(path, machine)


def test_what_is_added_is_there_for_the_same_machine_only(tmp_path: Path) -> None:
    path = tmp_path / "new" / "times.json"
    cache(path).add({"a": {"torch": 1.0}})
    cache(path).add({"b": {"torch": 2.0}})
    cache(path, machine="another").add({"a": {"torch": 3.0}})
    assert cache(path).load() == {"a": {"torch": 1.0}, "b": {"torch": 2.0}}
    assert cache(path, machine="another").load() == {"a": {"torch": 3.0}}
    assert cache(path, machine="unknown").load() == {}


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "[" * 100_000, '{"version": 1, "machines": {}}', '{"version": 3, "machines": {"this one": []}}',
        '{"version": 3, "machines": {"this one": {"a": {"torch": "fast"}}}}',
        '{"version": 3, "machines": {"this one": {"a": {"torch": -1.0}}}}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_logged_once_ignored_and_rewritten(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    damaged = cache(path)
    assert damaged.load() == damaged.load() == {}
    damaged.add({"a": {"torch": 1.0}})
    assert cache(path).load() == {"a": {"torch": 1.0}}
    (logged,) = caplog.messages
    assert str(path) in logged


def test_an_unwritable_folder_is_reported_and_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    cache(blocked / "times.json").add({"a": {"torch": 1.0}})
    (logged,) = caplog.messages
    assert "cannot remember" in logged


def test_what_was_stored_first_holds(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    assert cache(path).add({"a": {"torch": 1.0, "onednn": 2.0}}) == {"a": {"torch": 1.0, "onednn": 2.0}}
    found = {"a": {"torch": 2.0, "onednn": 1.0}, "b": {"torch": 3.0}}
    expected = {"a": {"torch": 1.0, "onednn": 2.0}, "b": {"torch": 3.0}}
    assert cache(path).add(found) == cache(path).load() == expected
    more = {"b": {"torch": 4.0, "onednn": 4.0}}
    assert cache(path).add(more) == {**expected, **more}


def test_a_file_that_cannot_be_read_is_left_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "times.json"
    path.symlink_to(path)  # a loop: no reader gets anywhere, root neither
    closed = cache(path)
    assert closed.load() == {}
    assert closed.add({"a": {"torch": 1.0}}) == {"a": {"torch": 1.0}}
    assert path.is_symlink()
    (logged,) = caplog.messages
    assert "cannot read" in logged


def test_a_full_disk_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "times.json"
    cache(path).add({"a": {"torch": 1.0}})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    try:
        cache(path).add({"b": {"torch": 2.0}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (logged,) = caplog.messages
    assert "cannot remember" in logged
    assert cache(path).load() == {"a": {"torch": 1.0}}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["times.json", "times.lock"]


def test_the_name_of_the_file_tells_versions_apart() -> None:
    assert str(VERSION) in FILE_NAME


def _add_many(path: Path, name: str) -> None:
    for number in range(20):
        cache(path).add({f"{name}{number}": {"torch": 1.0}})


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_add_many, args=(path, name)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [w.exitcode for w in writers] == [0, 0]
    assert len(cache(path).load()) == 40
    assert json.loads(path.read_text())["version"] == VERSION
    assert sorted(p.name for p in tmp_path.iterdir()) == ["times.json", "times.lock"]


def test_the_folder_is_the_first_that_the_environment_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("PENSTOCK_CACHE", raising=False)
    assert cache_folder() == tmp_path / "xdg" / "penstock"
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_settings_of_the_libraries_make_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    before = machine()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert machine() == f"{before}, ONEDNN_MAX_CPU_ISA=AVX2"
    assert "mkl vendor" in before


def test_what_is_measured_of_a_large_layer_takes_little_memory() -> None:
    found = Product(1, 512, 1_000_000).measured()
    assert found.k * found.n <= MOST_ELEMENTS and found.flop > 0
