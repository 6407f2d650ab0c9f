"""TrainerRuntimeConfig, ServerRuntimeConfig and the Communicator's door: strict by name, said once."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
from tests.ps.fake_servers import FakeServers
from tests.support.remotes import remotes_of_a_test

from penstock.errors import SpecError
from penstock.program.ir import Operator
from penstock.program.program import Program
from penstock.ps.communicator import Communicator, DistributedMode
from penstock.ps.remote import Descriptor, PsMode
from penstock.ps.settings import MODE_KEYS, TRAINER_KEYS, RuntimeConfig, ServerRuntimeConfig, TrainerRuntimeConfig


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take out what the machine's environment says."""
    for name in TRAINER_KEYS:
        monkeypatch.delenv(f"FLAGS_{name}", raising=False)
    monkeypatch.setenv("CPU_NUM", "4")


def test_the_keys_and_defaults_are_fluids() -> None:
    assert dict(TrainerRuntimeConfig()) == {
        "communicator_max_merge_var_num": 4,
        "communicator_send_queue_size": 4,
        "communicator_independent_recv_thread": 1,
        "communicator_min_send_grad_num_before_recv": 4,
        "communicator_thread_pool_size": 5,
        "communicator_send_wait_times": 5,
        "communicator_is_sgd_optimizer": 1,
        "rpc_deadline": 180000,
        "rpc_retry_times": 3,
    }
    assert dict(ServerRuntimeConfig()) == {
        "_rpc_send_thread_num": 12,
        "_rpc_get_thread_num": 12,
        "_rpc_prefetch_thread_num": 12,
    }


def test_flags_of_the_environment_are_the_defaults() -> None:
    environ = {"FLAGS_communicator_send_queue_size": "7", "FLAGS_rpc_get_thread_num": "3"}
    assert TrainerRuntimeConfig(environ=environ).communicator_send_queue_size == 7
    assert ServerRuntimeConfig(environ=environ)["_rpc_get_thread_num"] == 3
    with pytest.raises(SpecError, match=r"FLAGS_communicator_send_queue_size.*many"):
        TrainerRuntimeConfig(environ={"FLAGS_communicator_send_queue_size": "many"})
    with pytest.raises(SpecError, match="CPU_NUM"):
        TrainerRuntimeConfig(environ={"CPU_NUM": "0"})


def test_a_setting_is_item_attribute_and_runtime_config_entry() -> None:
    config = TrainerRuntimeConfig()
    config.runtime_configs["communicator_send_queue_size"] = "9"
    config.communicator_thread_pool_size = 2
    config.update({"communicator_is_sgd_optimizer": False})
    assert config["communicator_send_queue_size"] == 9
    assert config["communicator_thread_pool_size"] == 2
    assert config.communicator_is_sgd_optimizer == 0
    other = copy.deepcopy(config)
    other["communicator_thread_pool_size"] = 3
    assert config["communicator_thread_pool_size"] == 2


@pytest.mark.parametrize("kind", [TrainerRuntimeConfig, ServerRuntimeConfig])
def test_an_unknown_key_is_refused_by_name(kind: type[RuntimeConfig]) -> None:
    for attempt in (lambda: kind.from_dict({"no_such": 1}), lambda: setattr(kind(), "no_such", 1)):
        with pytest.raises(SpecError, match="no_such"):
            attempt()


def test_close_names_are_suggested() -> None:
    with pytest.raises(SpecError, match="communicator_send_queue_size"):
        TrainerRuntimeConfig.from_dict({"communicator_send_queue": 1})
    assert ServerRuntimeConfig.from_dict({"rpc_send_thread_num": 3})["_rpc_send_thread_num"] == 3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("communicator_send_queue_size", 2.5),
        ("communicator_send_queue_size", "two"),
        ("communicator_send_queue_size", None),
        ("communicator_send_queue_size", True),
        ("communicator_send_queue_size", 0),
        ("communicator_is_sgd_optimizer", 2),
        ("communicator_send_wait_times", -1),
    ],
)
def test_a_wrong_value_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(SpecError, match=key):
        TrainerRuntimeConfig.from_dict({key: value})


def test_it_prints_as_a_table_of_all_settings() -> None:
    lines = repr(TrainerRuntimeConfig()).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) >= 50
    assert [line.split()[0] for line in lines[1:-1]] == list(TRAINER_KEYS)


@pytest.mark.parametrize("mode", ["sync", "half_async"])
def test_lock_step_modes_merge_one_gradient_a_thread_and_warn(mode: PsMode, caplog: pytest.LogCaptureFixture) -> None:
    config = TrainerRuntimeConfig.from_dict({"communicator_max_merge_var_num": 20, "communicator_send_queue_size": 9})
    for _ in range(2):
        settings = config.settings(mode, num_threads=4)
    assert (settings.max_merge_var_num, settings.send_queue_size) == (4, 4)
    assert len(caplog.messages) == 2  # one for each key
    assert "communicator_max_merge_var_num is 20" in caplog.text


def test_async_takes_every_setting_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    config = TrainerRuntimeConfig.from_dict(
        {"communicator_max_merge_var_num": 20, "communicator_send_queue_size": 9, "communicator_send_wait_times": 3}
    )
    settings = config.settings("async")
    assert (settings.max_merge_var_num, settings.send_queue_size, settings.merge_wait_s) == (20, 9, 0.03)
    assert not caplog.text


@pytest.mark.parametrize(
    ("mode", "idle"),
    [
        ("sync", {"communicator_send_wait_times", "communicator_thread_pool_size"}),
        ("half_async", {"communicator_send_wait_times"}),
        ("geo", {"communicator_send_wait_times"}),
    ],
)
def test_keys_of_a_mode_that_nothing_goes_by_are_said(
    mode: PsMode, idle: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    names = ("communicator_send_wait_times", "communicator_thread_pool_size")
    TrainerRuntimeConfig.from_dict(dict.fromkeys(names, 7)).settings(mode)
    assert {name for name in names if f"{name} = 7 has no effect in {mode} mode" in caplog.text} == idle


def test_what_a_mode_does_not_use_is_said(caplog: pytest.LogCaptureFixture) -> None:
    config = TrainerRuntimeConfig.from_dict({"communicator_send_queue_size": 9, "rpc_deadline": 1000})
    config.settings("geo")
    assert "communicator_send_queue_size = 9 has no effect in geo mode" in caplog.text
    assert "PENSTOCK_PS_DEADLINE_S" in caplog.text
    assert set(config.communicator_flags("geo")) == set(MODE_KEYS["geo"])


# -- Communicator --------------------------------------------------------------------------------

ENDPOINTS = "host:1,host:2"


def trainer_program(mode: str = "geo") -> Program:
    """Return a program that talks to servers."""
    program = Program()
    descriptor = f"{mode} 1/2 {ENDPOINTS}"
    program.operators.append(Operator("send_barrier_0", "penstock.send_barrier.default", ((), descriptor), ("t",)))
    return program


@pytest.fixture
def opened() -> Iterator[list[FakeServers]]:
    """Servers in memory instead of a connection."""
    made: list[FakeServers] = []

    def open_with_fakes(descriptor: Descriptor) -> FakeServers:
        made.append(FakeServers({}))
        return made[-1]

    with remotes_of_a_test(open_with_fakes) as remotes:
        yield made
        assert not remotes.configs


def test_it_starts_stops_and_says_whether_it_runs(opened: list[FakeServers]) -> None:
    one = Communicator(trainer_program(), DistributedMode.GEO, {"geo_need_push_nums": 100}, {"rpc_retry_times": 3})
    assert one.is_running() is False
    one.start()
    one.start()
    assert one.is_running() is True
    assert len(opened) == 1
    one.stop()
    one.stop()
    assert one.is_running() is False
    assert opened[0].is_closed


def test_communicators_share_no_settings(opened: list[FakeServers]) -> None:
    first, second = Communicator(trainer_program()), Communicator(trainer_program())
    first.config["communicator_thread_pool_size"] = 1
    assert second.config["communicator_thread_pool_size"] == 5


def test_what_does_not_agree_with_the_program_is_refused() -> None:
    with pytest.raises(SpecError, match=r"geo mode.*async"):
        Communicator(trainer_program(), "async")
    with pytest.raises(SpecError, match="no mode is called 'fast'"):
        Communicator(trainer_program(), "fast")
    with pytest.raises(SpecError, match="trainers is 5"):
        Communicator(trainer_program(), kwargs={"trainers": 5, "pserver_endpoints": ENDPOINTS})
    with pytest.raises(SpecError, match="no setting 'push_nums'"):
        Communicator(trainer_program(), kwargs={"push_nums": 5})
    with pytest.raises(SpecError, match="geo_need_push_nums is 7"):
        Communicator(trainer_program(), kwargs={"geo_need_push_nums": 7})
    with pytest.raises(SpecError, match="no operator that talks"):
        Communicator(Program())
