"""What `penstock submit` reads, refuses and packs. No server."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from penstock.command import snapshot
from penstock.command.demo import example, with_option
from penstock.command.specfile import load
from penstock.errors import SpecError

PSERVERS = "name: x\nentrypoint: [a]\nmode: pserver\npservers: {count: 1}\n"


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_yaml_and_json_say_the_same(tmp_path: Path) -> None:
    one = load(write(tmp_path / "a.yaml", "name: x\nentrypoint: [python, -V]\ntrainers: {cpus: 2}\n"))
    two = load(write(tmp_path / "a.json", '{"name": "x", "entrypoint": ["python", "-V"], "trainers": {"cpus": 2}}'))
    assert one == two


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: x\nentrypoint: [a]\nentrypont: [b]", "/entrypont: unknown field; did you mean 'entrypoint'?"),
        ("name: X!\nentrypoint: [a]", "/name: "),
        ("name: x", "/entrypoint: Field required"),
        ("name: x\nentrypoint: [a]\ntrainers: {count: -1}", "/trainers/count: .*got -1"),
        ("name: x\nentrypoint: [a]\ntrainers: {memory: lots}", "/trainers/memory: memory is 'lots'"),
        ("name: x\nentrypoint: [a]\nmode: pserver", "pservers.count is 0"),
        ("name: x\nentrypoint: [a]\npservers: 2", r"/pservers: expected fields such as \{count: …\}, got 2"),
        ("name: x\nentrypoint: [a]\npservers: {cpu: 2}", "/pservers/cpu: unknown field; did you mean 'cpus'?"),
        ("name: x\nentrypoint: [a]\ncheckpoint: {every_step: 2}", "did you mean 'every_steps'?"),
        ("name: x\nentrypoint: [a]\nenv: {CPU_NUM: 1}", "/env/CPU_NUM: expected text, got 1; put it in quotes"),
        ("name: x\nentrypoint: [a]\nenv: {DEBUG: true}", "/env/DEBUG: expected text, got true; put it in quotes"),
        (
            "name: x\nentrypoint: [a]\nenv: {PENSTOCK_REPLICA_ID: r}",
            "/env/PENSTOCK_REPLICA_ID: .*set by the agent; leave",
        ),
        (f"{PSERVERS}env: {{POD_IP: 10.0.0.1}}", "/env/POD_IP: POD_IP gives a process its place in the job"),
        (f"{PSERVERS}env: {{PENSTOCK_PS_TOKEN: s, A: b}}", "/env/PENSTOCK_PS_TOKEN: "),
        (
            "name: x\nentrypoint: [a]\nmode: collective\nenv: {MASTER_PORT: '1', RANK: '0'}",
            "/env/MASTER_PORT: .*\n.*/env/RANK",
        ),
        ("- a\n- b", "holds a list; expected fields"),
        ("name: [", "is no YAML and no JSON"),
    ],
)
def test_a_wrong_job_file_is_refused_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        load(write(tmp_path / "job.yaml", text))
    assert "job.yaml" in str(caught.value)


def test_variables_that_an_agent_leaves_alone_are_the_job_s(tmp_path: Path) -> None:
    """A script of a single process may be told a role by hand; settings are no place in the job."""
    alone = load(write(tmp_path / "a.yaml", "name: x\nentrypoint: [a]\nenv: {PADDLE_TRAINER_ID: '3', RANK: '1'}\n"))
    assert alone.env == {"PADDLE_TRAINER_ID": "3", "RANK": "1"}
    settings = "env: {PENSTOCK_PS_LEASE_S: '5', PENSTOCK_PS_TLS_CA: /ca.pem, CPU_NUM: '2'}\n"
    assert len(load(write(tmp_path / "b.yaml", PSERVERS + settings)).env) == 3


def test_words_that_only_old_yaml_takes_for_booleans_are_text(tmp_path: Path) -> None:
    text = "name: x\nentrypoint: [a]\nrestart: {max_restarts: 2, on: [infra, user]}\nenv: {ANSWER: yes, LIGHT: off}\n"
    job = load(write(tmp_path / "job.yaml", text))
    assert job.restart.on == ["infra", "user"]
    assert job.env == {"ANSWER": "yes", "LIGHT": "off"}


def test_a_missing_job_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nothing\.yaml' cannot be read: No such file"):
        load(tmp_path / "nothing.yaml")


def test_a_folder_packs_to_the_same_bytes_whatever_its_times(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    write(folder / "train.py", "print(1)")
    snapshot.pack(folder, tmp_path / "one")
    os.utime(folder / "train.py", (1, 1))
    snapshot.pack(folder, tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_what_is_ignored_stays_out(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    for name in (".git", "__pycache__", "pkg/__pycache__", "data", "runs/1", "pkg/node_modules", "penstock_state"):
        (folder / name).mkdir(parents=True)
        write(folder / name / "file.bin", "x")
    write(folder / "train.py", "print(1)")
    write(folder / "pkg" / "model.py", "print(2)")
    write(folder / "pkg" / "big.csv", "1")
    write(folder / snapshot.IGNORE_FILE, "# data is elsewhere\ndata/\n*.csv\nruns/1\n")
    snapshot.pack(folder, tmp_path / "s.tar.gz")
    with tarfile.open(tmp_path / "s.tar.gz") as tar:
        assert tar.getnames() == [snapshot.IGNORE_FILE, "pkg", "pkg/model.py", "runs", "train.py"]


def test_hard_links_are_packed_as_files_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    write(folder / "a", "same")
    os.link(folder / "a", folder / "b")
    snapshot.pack(folder, tmp_path / "s.tar.gz")
    with tarfile.open(tmp_path / "s.tar.gz") as tar:
        files = [tar.extractfile(name) for name in ("a", "b")]
        assert [file.read() for file in files if file is not None] == [b"same", b"same"]


def test_a_too_large_folder_is_refused_with_its_largest_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "LIMIT_BYTES", 10_000)
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "noise.bin").write_bytes(os.urandom(20_000))
    write(folder / "train.py", "print(1)")
    with pytest.raises(SpecError, match=r"the largest files are noise\.bin"):
        snapshot.pack(folder, tmp_path / "s.tar.gz")


def test_a_workdir_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is not a folder"):
        snapshot.pack(tmp_path / "no", tmp_path / "s.tar.gz")


def test_the_demo_sets_options_of_its_script() -> None:
    passes = ["python", "t.py", "--passes", "20", "-v"]
    assert with_option(passes, "--passes", 3) == ["python", "t.py", "--passes", "3", "-v"]
    assert with_option(["python", "t.py"], "--rows", 9) == ["python", "t.py", "--rows", "9"]


def test_the_example_that_the_demo_runs_is_a_valid_job() -> None:
    assert load(example()).trainers.count == 1
