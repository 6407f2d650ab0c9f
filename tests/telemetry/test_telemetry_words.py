"""What a script may say: checked at its own line, and one wrong word costs nothing else."""

from __future__ import annotations

import math
from typing import SupportsFloat

import numpy as np
import pytest

from penstock.protocol.contract import Managed
from penstock.telemetry.metrics import checked_count, checked_scalars
from penstock.telemetry.sessions import Watched


def test_integers_of_any_kind_are_counts() -> None:
    assert [checked_count(value, "step") for value in (2, np.int64(2), np.uint8(2), True)] == [2, 2, 2, 1]
    assert type(checked_count(np.int64(2), "step")) is int


@pytest.mark.parametrize("value", [-1, 2**63, 2**64])
def test_a_count_out_of_range_is_refused_with_its_name_and_value(value: int) -> None:
    with pytest.raises(ValueError, match=rf"step is {value}; expected 0 or more"):
        checked_count(value, "step")


def test_a_step_that_is_no_integer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"step is 2\.0; expected an integer"):
        checked_count(2.0, "step")  # type: ignore[arg-type]  # the mistake under test


def test_scalars_are_finite_floats_or_nothing() -> None:
    given: dict[str, SupportsFloat] = {"a": np.float32(0.5), "b": math.nan, "c": 10**400, "d": 3}
    assert checked_scalars(given) == {"a": 0.5, "b": None, "c": None, "d": 3.0}


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800"])
def test_a_scalar_name_that_is_no_text_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="scalar name is"):
        checked_scalars({name: 1.0})


def test_a_script_cannot_log_a_series_of_penstock() -> None:
    with pytest.raises(ValueError, match="names that begin with 'penstock/' are of Penstock's own series"):
        checked_scalars({"penstock/eval_loss": 0.5})


def test_a_wrong_word_raises_at_its_line_and_starts_nothing() -> None:
    session = Watched(Managed("job", "name", "replica", "trainer", 0, 1, 7, "no-such-socket"))
    with pytest.raises(ValueError, match="step is -1"):
        session.log(-1, auc=0.5)
    with pytest.raises(ValueError, match="done is"):
        session.progress(2**70, 1)
    session.close()
