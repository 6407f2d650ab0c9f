"""Data generators: what they write is what a data set reads, also as a pipe command."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.dataset.oracle import dataset_of, rows

from penstock.errors import SpecError
from penstock.incubate.data_generator import MultiSlotDataGenerator, MultiSlotStringDataGenerator

SCRIPT = """
import penstock.incubate.data_generator as dg

class Words(dg.MultiSlotDataGenerator):
    def generate_sample(self, line):
        def samples():
            label, *words = map(int, line.split())
            if words:
                yield ("words", words), ("weight", [0.5 * len(words)]), ("label", [label])
        return samples

Words().run_from_stdin()
"""


def test_a_generator_is_a_pipe_command(tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(SCRIPT)
    (tmp_path / "raw").write_text("1 5 6\n0\n0 7\n")
    dataset = dataset_of([tmp_path / "raw"], [(False, 0), (True, 1), (False, 1)])
    dataset.set_pipe_command(f"{sys.executable} {tmp_path}/words.py")
    assert rows(dataset) == [((5, 6), (1.0,), (1,)), ((7,), (0.5,), (0,))]


class Doubled(MultiSlotDataGenerator):
    """Samples from memory; each batch is written twice."""

    def generate_sample(self, line: str | None) -> Any:
        assert line is None
        return [[("a", [n]), ("b", [n, n + 0.25] if n == 2 else [n, n])] for n in range(3)] + [None]

    def generate_batch(self, samples: Any) -> Any:
        return samples + samples


def test_batches_are_made_of_samples_from_memory(capsys: pytest.CaptureFixture[str]) -> None:
    generator = Doubled()
    generator.set_batch(2)
    generator.run_from_memory()
    assert capsys.readouterr().out.splitlines() == [
        "1 0 2 0 0", "1 1 2 1 1", "1 0 2 0 0", "1 1 2 1 1", "1 2 2 2 2.25", "1 2 2 2 2.25",
    ]  # fmt: skip
    assert generator.kinds == [("a", "uint64"), ("b", "float")]


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([[("a", [1])], [("b", [1])]], r"the slots \['b'\]; the first had \['a'\]"),
        ([[("a", [])]], "expected a name and a list of at least one"),
        ([[("a", ["1"])]], "holds '1'"),
        ([[("a", 3)]], "has 3"),
    ],
)
def test_samples_that_do_not_fit_are_refused(samples: Any, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        Doubled().write(samples, io.StringIO())


def test_a_sample_may_be_an_iterator() -> None:
    written = io.StringIO()
    Doubled().write([zip(["a", "b"], [[1], [2, 3]], strict=True)], written)
    assert written.getvalue() == "1 1 2 2 3\n" * 2


def test_text_values_are_written_as_they_are() -> None:
    class Texts(MultiSlotStringDataGenerator):
        def generate_sample(self, line: str | None) -> Any:
            return [[("a", ["x", "7"]), ("b", ["0.5"])]]

    written = io.StringIO()
    Texts().write(Texts().generate_sample(None), written)
    assert written.getvalue() == "2 x 7 1 0.5\n"
