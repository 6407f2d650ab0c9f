"""MultiSlot text is read as a plain parser reads it; what a plain parser refuses is refused with line and reason."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.dataset.oracle import dataset_of, float32, parsed, rows

from penstock.dataset import DataError

SLOTS = [(True, 2), (False, 0), (False, 1), (True, 0)]
GOOD = b"2 0.5 -1.25 3 7 8 9 1 1 1 3.5"

blanks = st.sampled_from([" ", "  ", "\t", " \t "])
whole = st.one_of(
    st.integers(-(1 << 63), (1 << 64) - 1).map(str),
    st.integers(0, 999_999).map(str),
    st.just("00000000000000000000042"),
)
decimal = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False).map(repr),
    st.from_regex(r"-?[0-9]{1,12}\.[0-9]{0,12}", fullmatch=True),
    st.from_regex(r"[+-]?[0-9]{1,4}(e[+-]?[0-9])?", fullmatch=True),
    st.sampled_from(["16777217.0", "1e-50", "0.1", "33554435", "7.038531e-26", "1.00000017881393432617187499", "-0"]),
    st.sampled_from([f"0.{400 * '0'}5", f"-0.{400 * '0'}5e3", "7e-99999999999999999999"]),
)


@st.composite
def lines(draw: Any) -> str:
    parts: list[str] = []
    for is_float, width in SLOTS:
        values = draw(st.lists(decimal if is_float else whole, min_size=width or 1, max_size=width or 5))
        for token in (str(len(values)), *values):
            parts += [token, draw(blanks)]
    return "".join([*parts, draw(st.sampled_from(["", " ", "\r"]))])


@given(text=st.lists(lines(), min_size=1, max_size=12), ending=st.sampled_from(["", "\n"]), kind=st.booleans())
def test_lines_are_read_as_a_plain_parser_reads_them(
    tmp_path_factory: pytest.TempPathFactory, text: list[str], ending: str, kind: bool
) -> None:
    file = tmp_path_factory.mktemp("text") / "part"
    file.write_text("\n".join(text) + ending, newline="")
    dataset = dataset_of([file], SLOTS, "InMemoryDataset" if kind else "QueueDataset")
    if kind:
        dataset.load_into_memory()
    assert rows(dataset) == [parsed(line.encode(), SLOTS) for line in text]


@given(st.one_of(st.from_regex(r"[0-9]{1,20}\.[0-9]{1,20}", fullmatch=True), st.floats(0, 3e38).map(repr)))
def test_a_decimal_number_is_the_nearest_float(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.mktemp("number") / "part"
    file.write_text(f"1 {text}\n")
    assert rows(dataset_of([file], [(True, 1)])) == [((float32(text.encode()),),)]


def test_a_number_half_way_between_two_floats_is_rounded_once(tmp_path: Path) -> None:
    texts = ["1.000000059604644775390625", "1.0000000596046448", "8388609.5", "16777219.0", "4503599627370497.5"]
    # 16 digits near the middle of two floats: the nearest double is the middle itself, on whichever side the text lies.
    texts += [f"{n / (1 << 25):.16f}" for n in range((1 << 24) + 1, (1 << 24) + 400, 2)]
    (tmp_path / "part").write_text("".join(f"1 {text}\n" for text in texts))
    assert rows(dataset_of([tmp_path / "part"], [(True, 1)])) == [((float32(text.encode()),),) for text in texts]


def mutated(random_: random.Random, line: bytes) -> bytes:
    """Return a line with one to three bytes changed, put in or left out; never a line end."""
    out = bytearray(line)
    for _ in range(random_.randint(1, 3)):
        place = random_.randrange(len(out))
        byte = random_.choice([*b"0123456789 .-+e\tx", random_.randrange(256)])
        action = random_.randrange(4)
        if action == 0:
            out[place] = byte
        elif action == 1:
            out.insert(place, byte)
        elif action == 2:
            del out[place]
        else:
            del out[place:]
        if not out:
            out = bytearray(b"1")
    return bytes(out).replace(b"\n", b"N")


def test_mutated_lines_are_read_or_counted_as_by_a_plain_parser(tmp_path: Path) -> None:
    random_ = random.Random(5)
    given_lines = [mutated(random_, GOOD) for _ in range(1000)]
    (tmp_path / "part").write_bytes(b"\n".join(given_lines) + b"\n")
    expected = [parsed(line, SLOTS) for line in given_lines]
    good = [row for row in expected if row is not None]
    assert 50 < len(good) < 950  # the mutations do both
    for kind in ("QueueDataset", "InMemoryDataset"):
        dataset = dataset_of([tmp_path / "part"], SLOTS, kind, batch_size=7)
        dataset.set_bad_line_policy("skip")
        if kind == "InMemoryDataset":
            dataset.load_into_memory()
        assert rows(dataset) == good
        assert dataset.num_skipped_lines == 1000 - len(good)
        bad = [number for number, row in enumerate(expected, 1) if row is None]
        assert [error.line for error in dataset.skipped_lines] == bad[:10]


def test_every_mutated_line_that_is_bad_is_named_with_its_place(tmp_path: Path) -> None:
    random_ = random.Random(6)
    for line in (mutated(random_, GOOD) for _ in range(200)):
        if parsed(line, SLOTS) is not None:
            continue
        (tmp_path / "part").write_bytes(GOOD + b"\n" + line + b"\n" + GOOD + b"\n")
        with pytest.raises(DataError) as caught:
            rows(dataset_of([tmp_path / "part"], SLOTS))
        assert caught.value.file == str(tmp_path / "part")
        assert caught.value.line == 2
        assert 1 <= caught.value.column <= len(line) + 1
        assert caught.value.reason
        assert f"{tmp_path / 'part'}:2:{caught.value.column}: " in str(caught.value)


@pytest.mark.parametrize(
    ("line", "column", "reason"),
    [
        ("", 1, "the line is empty"),
        ("0", 1, "slot 'slot0' has no values: the number of ids can not be zero"),
        ("2 5", 4, "the line ends after 1 of the 2 values that slot 'slot0' announces"),
        ("1 5", 4, "the line ends before slot 'slot1' (2 of 2)"),
        ("1 5 3 1 2 3", 5, "slot 'slot1' announces 3 values, but its variable has 2 a row"),
        ("1 5 2 0.5 abc", 11, "value 2 of slot 'slot1' is 'abc'; expected a finite number of float32"),
        ("1 5 2 0.5 1e39", 11, "value 2 of slot 'slot1' is '1e39'; expected a finite number of float32"),
        ("1 5 2 0.5 nan", 11, "value 2 of slot 'slot1' is 'nan'; expected a finite number of float32"),
        ("1 5.0 2 0 0", 3, "value 1 of slot 'slot0' is '5.0'; expected a whole number of 64 bits"),
        ("1 18446744073709551616 2 0 0", 3, "value 1 of slot 'slot0' is '18446744073709551616'"),
        ("x 5 2 0 0", 1, "the number of values of slot 'slot0' (1 of 2) is 'x'"),
        ("1 5 2 0 0 7", 11, "the line goes on with '7' after the last of the 2 slots"),
        ("1 5 2 0 0\x00", 10, "the line goes on with '\\x00'"),
        ("99999999999 5", 14, "the line ends after 1 of the 99999999999 values"),
    ],
)
def test_row_88_a_bad_line_has_file_line_column_and_reason(tmp_path: Path, line: str, column: int, reason: str) -> None:
    file = tmp_path / "part"
    file.write_text(f"1 5 2 0 0\n1 6 2 0 0\n{line}\n1 7 2 0 0\n")
    with pytest.raises(DataError) as caught:
        rows(dataset_of([file], [(False, 0), (True, 2)]))
    assert (caught.value.file, caught.value.line, caught.value.column) == (str(file), 3, column)
    assert caught.value.reason.startswith(reason)


def test_lines_that_cross_the_blocks_of_a_large_file_are_whole(tmp_path: Path) -> None:
    text = [b"%d " % n + b" ".join(b"%d" % (n * i) for i in range(n)) for n in range(1, 1200)]
    assert sum(map(len, text)) > 2_000_000
    (tmp_path / "part").write_bytes(b"\n".join(text))
    slots = [(False, 0)]
    assert rows(dataset_of([tmp_path / "part"], slots, batch_size=100)) == [parsed(line, slots) for line in text]


def test_a_file_without_line_ends_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "part").open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(DataError, match="there is no line end in 67108864 bytes"):
        rows(dataset_of([tmp_path / "part"], [(False, 1)]))


@pytest.mark.parametrize("text", [f"1{400 * '0'}", f"1{400 * '0'}e-5", f"0.{5 * '0'}1e400", "1e99999999999999999999"])
def test_a_number_too_large_for_a_float_is_refused_in_any_form(tmp_path: Path, text: str) -> None:
    (tmp_path / "part").write_text(f"1 {text}\n")
    with pytest.raises(DataError, match="expected a finite number of float32"):
        rows(dataset_of([tmp_path / "part"], [(True, 1)]))
