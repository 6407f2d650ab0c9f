"""Role makers: what each environment means, and what is said of one that is wrong."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from penstock.errors import SpecError
from penstock.fleet.roles import (
    GeneralRoleMaker,
    MPISymetricRoleMaker,
    PaddleCloudRoleMaker,
    Role,
    RoleMakerBase,
    UserDefinedCollectiveRoleMaker,
    UserDefinedRoleMaker,
)

SERVERS = "10.0.0.1:6174,10.0.0.2:6174"
TRAINER = {
    "PADDLE_PSERVERS_IP_PORT_LIST": SERVERS,
    "PADDLE_TRAINERS_NUM": "3",
    "TRAINING_ROLE": "TRAINER",
    "PADDLE_TRAINER_ID": "2",
}
PSERVER = {
    "PADDLE_PSERVERS_IP_PORT_LIST": SERVERS,
    "PADDLE_TRAINERS_NUM": "3",
    "TRAINING_ROLE": "PSERVER",
    "POD_IP": "10.0.0.2",
    "PADDLE_PORT": "6174",
}
COLLECTIVE = {
    "PADDLE_TRAINER_ID": "1",
    "PADDLE_TRAINING_ROLE": "TRAINER",
    "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:6170,10.0.0.2:6170",
    "PADDLE_CURRENT_ENDPOINT": "10.0.0.2:6170",
}
MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}


def facts(role: RoleMakerBase) -> tuple[bool, int, int, list[str]]:
    return role.is_worker(), role.role_id(), role.worker_num(), role.get_pserver_endpoints()


def without(environ: Mapping[str, str], name: str) -> dict[str, str]:
    return {k: v for k, v in environ.items() if k != name}


def test_a_trainer_is_read_from_the_environment() -> None:
    role = PaddleCloudRoleMaker(environ=TRAINER)
    assert facts(role) == (True, 2, 3, SERVERS.split(","))
    assert (role.worker_index(), role.server_num(), role.is_first_worker(), role.is_server()) == (2, 2, False, False)


def test_a_server_is_the_place_of_its_endpoint_in_the_list() -> None:
    role = PaddleCloudRoleMaker(environ=PSERVER)
    assert facts(role) == (False, 1, 3, SERVERS.split(","))
    assert (role.server_index(), role.is_first_worker()) == (1, False)


def test_the_process_environment_is_read_once_and_late(monkeypatch: pytest.MonkeyPatch) -> None:
    role = PaddleCloudRoleMaker()
    for name, value in TRAINER.items():
        monkeypatch.setenv(name, value)
    role.generate_role()
    monkeypatch.setenv("PADDLE_TRAINER_ID", "0")
    role.generate_role()
    assert role.worker_index() == 2


@pytest.mark.parametrize(("ours", "kind"), [("trainer", Role.WORKER), ("pserver", Role.SERVER)])
def test_role_and_index_may_come_from_penstocks_own_variables(ours: str, kind: Role) -> None:
    environ = {
        "PADDLE_PSERVERS_IP_PORT_LIST": SERVERS, "PADDLE_TRAINERS_NUM": "3",
        "PENSTOCK_ROLE": ours, "PENSTOCK_INDEX": "1",
    }  # fmt: skip
    position = PaddleCloudRoleMaker(environ=environ).position
    assert (position.role, position.index) == (kind, 1)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        *((TRAINER, name) for name in TRAINER),
        *((PSERVER, name) for name in ("POD_IP", "PADDLE_PORT")),
    ],
)
def test_each_missing_variable_is_named_with_an_example(environ: dict[str, str], name: str) -> None:
    with pytest.raises(SpecError, match=rf"variable {name} is not set; expected .*, for example {name}=\S+") as raised:
        PaddleCloudRoleMaker(environ=without(environ, name)).generate_role()
    assert raised.value.pointer == name
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize(
    ("environ", "name", "value", "words"),
    [
        (TRAINER, "TRAINING_ROLE", "WORKER", "'WORKER'; expected TRAINER or PSERVER"),
        (TRAINER, "PADDLE_TRAINERS_NUM", "two", "'two'; expected the number of trainers: a whole number of at least 1"),
        (TRAINER, "PADDLE_TRAINERS_NUM", "0", "'0'; expected the number of trainers"),
        (TRAINER, "PADDLE_TRAINER_ID", "3", "'3'; expected a number from 0 to 2, as PADDLE_TRAINERS_NUM is 3"),
        (TRAINER, "PADDLE_TRAINER_ID", "-1", "'-1'; expected this trainer's number"),
        (TRAINER, "PADDLE_PSERVERS_IP_PORT_LIST", "10.0.0.1", "'10.0.0.1' is no host:port"),
        (TRAINER, "PADDLE_PSERVERS_IP_PORT_LIST", "a:1,a:1", "'a:1' is listed twice"),
        (TRAINER, "PADDLE_PSERVERS_IP_PORT_LIST", "a:70000", "'a:70000' is no host:port with a port from 1 to 65535"),
        (PSERVER, "POD_IP", "10.0.0.9", r"'10.0.0.9'; expected a host that with PADDLE_PORT \(10.0.0.9:6174\)"),
        (PSERVER, "PADDLE_PORT", "6175", r"expected a host that with PADDLE_PORT \(10.0.0.2:6175\) stands in"),
    ],
)
def test_each_wrong_variable_is_named(environ: dict[str, str], name: str, value: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        PaddleCloudRoleMaker(environ={**environ, name: value}).generate_role()


def test_a_collective_role_has_worker_endpoints_and_no_servers() -> None:
    role = PaddleCloudRoleMaker(is_collective=True, environ=COLLECTIVE)
    assert facts(role) == (True, 1, 2, [])
    assert role.get_trainer_endpoints() == ["10.0.0.1:6170", "10.0.0.2:6170"]


@pytest.mark.parametrize("name", ["PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT"])
def test_a_missing_collective_variable_is_named(name: str) -> None:
    with pytest.raises(SpecError, match=f"variable {name} is not set"):
        PaddleCloudRoleMaker(is_collective=True, environ=without(COLLECTIVE, name)).generate_role()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PADDLE_TRAINING_ROLE", "PSERVER", "a collective job has no other role"),
        ("PADDLE_CURRENT_ENDPOINT", "10.0.0.1:6170", r"expected entry 1 \(PADDLE_TRAINER_ID\)"),
        ("PADDLE_TRAINER_ID", "7", r"expected entry 7 \(PADDLE_TRAINER_ID\)"),
    ],
)
def test_a_wrong_collective_variable_is_named(name: str, value: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        PaddleCloudRoleMaker(is_collective=True, environ={**COLLECTIVE, name: value}).generate_role()


def test_a_general_role_prefers_a_servers_number_to_its_endpoint() -> None:
    assert GeneralRoleMaker(environ={**PSERVER, "PADDLE_PSERVER_ID": "0"}).server_index() == 0
    assert GeneralRoleMaker(environ=PSERVER).server_index() == 1
    assert PaddleCloudRoleMaker(environ={**PSERVER, "PADDLE_PSERVER_ID": "0"}).server_index() == 1
    with pytest.raises(SpecError, match="PADDLE_PSERVER_ID is '2'; expected a number from 0 to 1"):
        GeneralRoleMaker(environ={**PSERVER, "PADDLE_PSERVER_ID": "2"}).generate_role()


def test_mpi_ranks_are_servers_and_workers_in_turn() -> None:
    roles = [MPISymetricRoleMaker(environ={**MPI, "OMPI_COMM_WORLD_RANK": str(rank)}) for rank in range(4)]
    endpoints = ["127.0.0.1:6174", "127.0.0.1:6175"]
    assert [facts(r) for r in roles] == [
        (False, 0, 2, endpoints), (True, 0, 2, endpoints), (False, 1, 2, endpoints), (True, 1, 2, endpoints)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "not started by an MPI launcher: none of OMPI_COMM_WORLD_RANK, PMI_RANK"),
        (without(MPI, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE is not set"),
        ({**MPI, "OMPI_COMM_WORLD_SIZE": "5"}, "'5'; expected an even number of processes"),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "PADDLE_PSERVERS_IP_PORT_LIST is not set; .* on several hosts"),
        ({**MPI, "PADDLE_PSERVERS_IP_PORT_LIST": "a:1"}, "expected 2 servers, one for each two of the 4 processes"),
    ],
)
def test_an_mpi_environment_that_does_not_say_enough_is_refused(environ: dict[str, str], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        MPISymetricRoleMaker(environ=environ).generate_role()


def test_a_user_defined_role_says_everything_itself() -> None:
    role = UserDefinedRoleMaker(current_id=1, role=Role.SERVER, worker_num=2, server_endpoints=SERVERS.split(","))
    assert facts(role) == (False, 1, 2, SERVERS.split(","))
    assert "role: SERVER, current_id: 1, worker_num: 2" in role.to_string()
    collective = UserDefinedCollectiveRoleMaker(current_id=1, worker_endpoints=["a:1", "b:1"])
    assert (collective.worker_index(), collective.worker_num(), collective.server_num()) == (1, 2, 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"server_endpoints": None}, "server_endpoints is empty"),
        ({"worker_num": 0}, "worker_num is 0; expected at least 1"),
        ({"current_id": 2}, "current_id is 2, but there are 2 workers"),
        ({"current_id": "0"}, "current_id is '0'; expected a whole number"),
        ({"worker_num": "2"}, "worker_num is '2'; expected a whole number"),
        ({"current_id": 1, "role": Role.SERVER}, "current_id is 1, but there are 1 servers"),
        ({"role": "worker"}, "role is 'worker'; expected Role.WORKER or Role.SERVER"),
        ({"server_endpoints": "a:1"}, "server_endpoints is 'a:1'; expected a list"),
        ({"server_endpoints": ["a"]}, "'a' is no host:port"),
    ],
)
def test_a_user_defined_role_that_cannot_be_is_refused(arguments: dict[str, object], words: str) -> None:
    given: dict[str, object] = {"current_id": 0, "worker_num": 2, "server_endpoints": ["a:1"], **arguments}
    with pytest.raises(SpecError, match=words):
        UserDefinedRoleMaker(**given)  # type: ignore[arg-type]  # wrong on purpose


def test_the_number_of_the_other_role_is_no_number() -> None:
    with pytest.raises(SpecError, match=r"server_index\(\) is asked of a worker \(number 2\)"):
        PaddleCloudRoleMaker(environ=TRAINER).server_index()
