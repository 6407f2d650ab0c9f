"""What is exported where a job is submitted, and what of it the job's process sees."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, Protocol, cast

import pytest
import typer

from penstock.command.passing import given, with_environment, without_settings
from penstock.errors import SpecError
from penstock.protocol.jobspec import JobSpec
from penstock.protocol.rest import Job

NAMES = ("CPU_NUM", "OMP_NUM_THREADS", "PENSTOCK_MATRIX_KERNELS", "PENSTOCK_CACHE", "PENSTOCK_TOKEN", "MKL_API_KEY")
PRINT = f"import json, os; print(json.dumps({{n: os.environ[n] for n in {NAMES} if n in os.environ}}))"


class Site(Protocol):
    environ: dict[str, str]

    home: Path

    def run(self, *arguments: str, timeout_s: float = 150.0, **environ: str) -> CompletedProcess[str]: ...
    def up(self, *arguments: str, fresh: bool = False) -> object: ...
    def job(self, name: str, code: str, **fields: Any) -> Path: ...
    def look(self, job: str) -> Job: ...
    def log(self, job: str) -> str: ...


def spec(**fields: Any) -> JobSpec:
    return JobSpec.model_validate({"name": "j", "entrypoint": ["a"], **fields})


def test_env_of_the_command_is_over_that_of_the_file() -> None:
    made, sentences = with_environment(spec(env={"A": "file", "B": "file"}), {}, {"A": "command"})
    assert (made.env, sentences) == ({"A": "command", "B": "file"}, [])


def test_env_of_the_file_is_over_what_is_exported() -> None:
    made, sentences = with_environment(spec(env={"CPU_NUM": "2"}), {"CPU_NUM": "4"}, {})
    assert made.env == {"CPU_NUM": "2"}
    assert "because the job sets them: CPU_NUM=4 (the job: 2); --env NAME=VALUE overrides" in sentences[0]


def test_what_passes_is_named_with_its_value() -> None:
    made, sentences = with_environment(spec(), {"CPU_NUM": "2", "MKL_CBWR": "AVX2", "HOME": "/"}, {})
    assert made.env == {"CPU_NUM": "2", "MKL_CBWR": "AVX2"}
    assert sentences == ["passed from the environment: CPU_NUM=2, MKL_CBWR=AVX2"]


def test_an_exported_name_that_nothing_reads_is_named() -> None:
    made, sentences = with_environment(spec(), {"FLAGS_matrix_kernel": "torch"}, {})
    assert (made.env, len(sentences)) == ({}, 1)
    assert sentences[0].endswith("no such settings: FLAGS_matrix_kernel")


def test_a_place_in_the_job_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match=r"job 'j' cannot have this environment:\n  /env/PENSTOCK_INDEX: "):
        with_environment(spec(), {}, {"PENSTOCK_INDEX": "3"})


def test_an_exported_value_that_is_no_text_is_named() -> None:
    with pytest.raises(SpecError, match="/env/CPU_NUM: "):
        with_environment(spec(), {"CPU_NUM": "\udcff"}, {})


@pytest.mark.parametrize("pair", ["CPU_NUM", "=2", ""])
def test_an_env_option_without_name_or_value_is_refused(pair: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected NAME=VALUE"):
        given([pair])


def test_the_last_env_option_of_a_name_wins() -> None:
    assert given(["A=1", "B=x=y", "A="]) == {"A": "", "B": "x=y"}


def test_an_environment_without_settings_keeps_the_rest() -> None:
    assert without_settings({"CPU_NUM": "2", "MKL_CBWR": "1", "HOME": "/", "PENSTOCK_CACHE": "/c"}) == {
        "HOME": "/",
        "PENSTOCK_CACHE": "/c",
    }


def seen_by(site: Site, *options: str, **environ: str) -> tuple[dict[str, str], dict[str, str], str]:
    """Submit a job that prints its environment: what its process saw, `env` of its description, stderr."""
    result = site.run("submit", str(site.job("seen", PRINT)), "--wait", *options, timeout_s=150.0, **environ)
    assert result.returncode == 0, result.stderr
    shown = cast(dict[str, Any], site.look("seen"))
    return json.loads(site.log("seen")), shown["spec"]["env"], result.stderr


def test_exported_settings_reach_the_process_and_its_description(serving: Site) -> None:
    process, described, said = seen_by(serving, CPU_NUM="3", PENSTOCK_MATRIX_KERNELS="torch", MKL_API_KEY="hidden")
    assert described == {"CPU_NUM": "3", "PENSTOCK_MATRIX_KERNELS": "torch"}
    assert {name: process.get(name) for name in described} == described
    assert "passed from the environment: CPU_NUM=3, PENSTOCK_MATRIX_KERNELS=torch\n" in said
    assert not {"PENSTOCK_TOKEN", "MKL_API_KEY"} & process.keys()


def test_without_the_environment_only_given_variables_pass(serving: Site) -> None:
    process, described, _ = seen_by(serving, "--no-env", "--env", "OMP_NUM_THREADS=1", CPU_NUM="3")
    assert described == {"OMP_NUM_THREADS": "1"}
    assert process["OMP_NUM_THREADS"] == "1"
    assert "CPU_NUM" not in process


def test_settings_of_the_shell_of_an_agent_reach_no_job(site: Site) -> None:
    site.environ |= {"CPU_NUM": "3", "PENSTOCK_MATRIX_KERNELS": "torch", "OMP_NUM_THREADS": "2"}
    site.up(fresh=True)
    process, described, _ = seen_by(site, "--no-env")
    assert (described, process) == ({}, {})
    server = site.home / ".penstock" / "server"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (server, server / "admin.token")] == [0o700, 0o600]


@pytest.mark.parametrize("options", [(), ("--no-env",)])
def test_demo_and_submit_pass_the_same_settings(serving: Site, site: Site, options: tuple[str, ...]) -> None:
    shell = {"OMP_NUM_THREADS": "3", "PENSTOCK_MATRIX_KERNELS": "torch"}  # of CPU_NUM, the demo takes what its node has
    submitted, _, _ = seen_by(serving, *options, **shell)
    state = site.home / "state"
    file = site.job("seen", PRINT)
    arguments = (
        "--exit-when-done",
        "--no-open",
        "--port",
        "0",
        "--job",
        str(file),
        "--state-dir",
        str(state),
        *options,
    )
    result = site.run("demo", *arguments, timeout_s=150.0, **shell)
    logs = [path.read_text(encoding="utf-8") for path in state.glob("server/jobs/*/logs/*.log")]
    assert [json.loads(text) for text in logs] == [submitted], result.stderr
