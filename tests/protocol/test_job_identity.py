"""Identity of a process in its job: one answer for every consumer, and the precedence that the documentation lists."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as fluid
from penstock import identity
from penstock.dataset.peers import peers_of
from penstock.distributed.ranks import ranks_in
from penstock.errors import SpecError
from penstock.fleet.roles import GeneralRoleMaker, PaddleCloudRoleMaker, RoleMakerBase
from penstock.identity import FAMILIES, MPI_FAMILIES, VARIABLES, Family, Incarnation, JobIdentity
from penstock.io.checkpoints.saving import team_of
from penstock.io.checkpoints.team import Team
from penstock.protocol import contract
from penstock.protocol.environment import PLACE_PREFIXES, PLACES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "environment.md").read_text(encoding="utf-8")
ENDPOINTS = "10.0.0.1:6170,10.0.0.2:6170"
Answer = tuple[str | None, int | None, int | None]
"""Role, number, number of trainers; None: the consumer does not give it."""

_NUMBERS = st.sampled_from(["", "0", "1", "2", "3", "x"])
_LISTS = st.sampled_from(["", "10.0.0.1:6170", ENDPOINTS, f"{ENDPOINTS},10.0.0.3:6170", "10.0.0.1"])
_HOSTS = st.sampled_from(["", "10.0.0.1", "10.0.0.2"])
_VALUES = {
    **dict.fromkeys(("PADDLE_TRAINER_ENDPOINTS", "PADDLE_PSERVERS_IP_PORT_LIST"), _LISTS),
    **dict.fromkeys(("PADDLE_TRAINERS_NUM", "PADDLE_NUM_TRAINERS", "PADDLE_TRAINER_ID", "PADDLE_PSERVER_ID"), _NUMBERS),
    **dict.fromkeys(("PENSTOCK_INDEX", "RANK", "WORLD_SIZE"), _NUMBERS),
    "PADDLE_CURRENT_ENDPOINT": st.sampled_from(["", *ENDPOINTS.split(","), "10.0.0.9:1"]),
    "TRAINING_ROLE": st.sampled_from(["", "TRAINER", "PSERVER"]),
    "PENSTOCK_ROLE": st.sampled_from(["", "trainer", "pserver"]),
    "POD_IP": _HOSTS,
    "PADDLE_PORT": st.sampled_from(["", "6170"]),
    "MASTER_ADDR": _HOSTS,
    "MASTER_PORT": st.sampled_from(["", "29500"]),
}


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    with mock.patch.dict(os.environ, {**kept, **variables}, clear=True):
        yield


def of_role_maker(maker: RoleMakerBase) -> Answer:
    return ("trainer" if maker.is_worker() else "pserver"), maker.role_id(), maker.worker_num()


def of_ranks() -> Answer:
    ranks = ranks_in(JobIdentity.of_meeting())
    return (None, None, None) if ranks is None else ("trainer", ranks.rank, ranks.num_ranks)


def of_data_set() -> Answer:
    """A data set without a group refuses to shuffle among several trainers, with their number."""
    try:
        return None, None, 1 if peers_of(None, "global_shuffle") is None else None
    except SpecError as error:
        if not isinstance(error.fields.get("got"), int):
            raise
        return None, None, error.got


def of_checkpoints() -> Answer:
    try:
        assert type(team_of(fluid.Program(), Path())) is Team
    except SpecError as error:
        found = re.match(r"this process is trainer (\d+) of (\d+)", str(error))
        if found is None:
            raise
        return None, int(found[1]), int(found[2])
    return None, None, None


def of_telemetry() -> Answer:
    if identity_or_none() is None or os.environ.get("PENSTOCK_ROLE") or os.environ.get("PENSTOCK_INDEX"):
        return None, None, None  # see test_an_attached_process_is_what_its_own_variables_name
    found = attached(**os.environ)
    return found.role, found.index, None


def attached(**variables: str) -> contract.Attached:
    found = contract.from_environ({**variables, "PENSTOCK_URL": "http://server", "PENSTOCK_TOKEN": "t"})
    assert isinstance(found, contract.Attached)
    return found


def of_servers_role_maker() -> Answer:
    return of_role_maker(PaddleCloudRoleMaker())


CONSUMERS = (
    of_ranks,
    of_data_set,
    of_checkpoints,
    of_telemetry,
    of_servers_role_maker,
    lambda: of_role_maker(PaddleCloudRoleMaker(is_collective=True)),
)


WITHOUT_ROLE = (of_ranks, of_checkpoints)
"""Consumers that read where trainers meet, for which there are no servers."""


def identity_or_none(*, with_servers: bool = False) -> JobIdentity | None:
    try:
        return JobIdentity.from_environ(with_servers=with_servers)
    except SpecError:
        return None


@settings(max_examples=300)
@given(st.fixed_dictionaries(_VALUES))
def test_all_consumers_agree_on_any_environment(variables: dict[str, str]) -> None:
    with environment(**variables):
        for consumer in CONSUMERS:
            found = identity_or_none(with_servers=consumer is of_servers_role_maker)
            try:
                answer = consumer()
            except SpecError:
                continue  # of all consumers, or of one that requires more variables
            if found is None or (found.role == "pserver" and consumer in WITHOUT_ROLE):
                continue  # for one that reads less: without the role, or the number of trainers alone
            mine = (found.role, found.index, found.num_trainers)
            assert [a for a, b in zip(answer, mine, strict=True) if a not in (None, b)] == [], (consumer, answer, mine)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PADDLE_TRAINER_ENDPOINTS": ENDPOINTS, "PADDLE_TRAINER_ID": "1", "WORLD_SIZE": "8"}, (1, 2)),
        ({"PADDLE_TRAINER_ENDPOINTS": ENDPOINTS, "PADDLE_CURRENT_ENDPOINT": "10.0.0.2:6170"}, (1, 2)),
        ({"PADDLE_TRAINERS_NUM": "2", "RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, (3, 8)),
        ({"PADDLE_TRAINERS_NUM": "2", "PADDLE_NUM_TRAINERS": "3", "WORLD_SIZE": "8"}, (0, 2)),
        ({"PENSTOCK_INDEX": "4"}, (4, 1)),
    ],
)
def test_the_first_family_that_is_set_numbers_trainers(variables: dict[str, str], expected: tuple[int, int]) -> None:
    found = JobIdentity.from_environ(variables)
    assert (found.index, found.num_trainers) == expected


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"PADDLE_TRAINER_ENDPOINTS": ENDPOINTS}, "PADDLE_TRAINER_ID is not set; expected this trainer's number"),
        ({"PADDLE_TRAINER_ENDPOINTS": ENDPOINTS, "PADDLE_TRAINERS_NUM": "3"}, "PADDLE_TRAINERS_NUM is '3'; expected 2"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "RANK is not set"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "h", "RANK": "2"}, "RANK is '2'; expected a number from 0 to 1"),
        ({"PENSTOCK_ROLE": "worker"}, "PENSTOCK_ROLE is 'worker'; expected trainer or pserver"),
    ],
)
def test_an_error_names_variable_value_and_expectation(variables: dict[str, str], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        JobIdentity.from_environ(variables)


_PSERVER_1 = {"PENSTOCK_ROLE": "pserver", "PENSTOCK_INDEX": "1"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({**_PSERVER_1, "TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "0"}, ("pserver", 1)),
        ({**_PSERVER_1, "POD_IP": "10.0.0.1", "PADDLE_PSERVERS_IP_PORT_LIST": ENDPOINTS}, ("pserver", 1)),
        ({"PENSTOCK_INDEX": "1", "RANK": "0"}, ("trainer", 1)),
        ({"PENSTOCK_ROLE": "pserver", "TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "3"}, ("pserver", 0)),
        ({"PADDLE_TRAINER_ID": "3"}, ("trainer", 3)),
    ],
)
def test_an_attached_process_is_what_its_own_variables_name(
    variables: dict[str, str], expected: tuple[str, int]
) -> None:
    found = attached(**variables)
    assert (found.role, found.index) == expected


@pytest.mark.parametrize(
    "variables", [{"WORLD_SIZE": "1", "RANK": "1"}, {"TRAINING_ROLE": "WORKER"}, {"TRAINING_ROLE": "trainer"}]
)
def test_telemetry_survives_wrong_variables_of_launchers(
    variables: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    found = attached(**variables)
    assert (found.role, found.index) == ("trainer", 0)
    assert "Telemetry continues as trainer 0" in caplog.text


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TRAINING_ROLE": "WORKER"}, 1),
        ({"WORLD_SIZE": "1", "MASTER_ADDR": "h"}, 1),
        ({"WORLD_SIZE": "1", "PENSTOCK_INDEX": "2"}, 1),
        ({"PADDLE_TRAINERS_NUM": "2", "RANK": "3"}, 2),
        ({"PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ID": "2"}, 2),
    ],
)
def test_a_data_set_reads_the_number_of_trainers_alone(variables: dict[str, str], expected: int) -> None:
    with environment(**variables):
        assert of_data_set() == (None, None, expected)


@pytest.mark.parametrize(
    "variables", [{"PADDLE_TRAINERS_NUM": "2"}, {"TRAINING_ROLE": "WORKER"}, {"WORLD_SIZE": "1", "PENSTOCK_INDEX": "2"}]
)
def test_a_checkpoint_without_a_meeting_is_saved(variables: dict[str, str]) -> None:
    with environment(**variables):
        assert type(team_of(fluid.Program(), Path())) is Team


@pytest.mark.parametrize(
    "variables", [{"WORLD_SIZE": "1", "PENSTOCK_INDEX": "2"}, {"PADDLE_TRAINERS_NUM": "2", "RANK": "2"}]
)
def test_a_number_is_not_compared_with_another_launchers_size(variables: dict[str, str]) -> None:
    assert JobIdentity.from_environ(variables).index == 2


def test_torchruns_agent_serves_the_meeting() -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
    found = JobIdentity.from_environ({**torchrun, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert (found.meeting, found.is_served) == ("h:29500", True)


def test_a_process_without_variables_is_the_only_trainer() -> None:
    assert (JobIdentity.from_environ({}), Incarnation.from_environ({})) == (JobIdentity(), Incarnation())


_BOTH_LISTS = {
    "PADDLE_PSERVERS_IP_PORT_LIST": ENDPOINTS, "PADDLE_TRAINER_ENDPOINTS": ENDPOINTS, "PADDLE_TRAINERS_NUM": "3",
    "PADDLE_CURRENT_ENDPOINT": "10.0.0.9:1",
}  # fmt: skip


def test_a_trainer_with_servers_may_be_outside_the_list() -> None:
    with environment(**_BOTH_LISTS, TRAINING_ROLE="TRAINER", PADDLE_TRAINER_ID="2"):
        assert of_servers_role_maker() == ("trainer", 2, 3)


@pytest.mark.parametrize("listed", [ENDPOINTS, "not a list"])
def test_a_server_does_not_read_the_list_of_trainers(listed: str) -> None:
    server = {"TRAINING_ROLE": "PSERVER", "POD_IP": "10.0.0.2", "PADDLE_PORT": "6170"}
    with environment(**{**_BOTH_LISTS, **server, "PADDLE_TRAINER_ENDPOINTS": listed}):
        assert of_servers_role_maker() == ("pserver", 1, 3)


def test_a_general_role_maker_prefers_the_server_number() -> None:
    pserver = {
        "PADDLE_PSERVERS_IP_PORT_LIST": ENDPOINTS, "PADDLE_TRAINERS_NUM": "1", "TRAINING_ROLE": "PSERVER",
        "POD_IP": "10.0.0.2", "PADDLE_PORT": "6170", "PADDLE_PSERVER_ID": "0",
    }  # fmt: skip
    found = JobIdentity.from_environ(pserver)
    assert found.index == 1
    assert GeneralRoleMaker(environ=pserver).server_index() == 0


# ---------------------------------------------------------------- docs/environment.md


def rows(title: str) -> list[tuple[Any, ...]]:
    """Return the rows of a table: its first cell, and the variables that each other cell names."""
    _, _, rest = PAGE.partition(f"| {title} |")
    lines = rest.split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(first, *(tuple(re.findall(r"`(\w+)`", cell)) for cell in others)) for first, *others in cells]


@pytest.mark.parametrize(("title", "families"), [("launcher", FAMILIES), ("MPI launcher", MPI_FAMILIES)])
def test_the_page_lists_the_precedence_of_launchers(title: str, families: tuple[Family, ...]) -> None:
    assert rows(title) == [(f.launcher, f.chosen_by, f.num, f.index) for f in families]


def test_the_page_lists_what_numbers_a_server() -> None:
    _, _, rest = PAGE.partition("A server has the number of ")
    names = re.findall(r"`([\w:]+)`", rest.split(". ")[0])
    assert tuple(names) == identity.SERVER_NUMBERS


def test_the_page_lists_all_places() -> None:
    section = PAGE.partition("## Places: never pass")[2].partition("A job whose agent")[0]
    listed = set(re.findall(r"\b[A-Z][A-Z0-9]*(?:_\w*[A-Za-z0-9])?\b", section))
    assert {name for name in PLACES if not name.startswith(PLACE_PREFIXES)} - listed == set()
