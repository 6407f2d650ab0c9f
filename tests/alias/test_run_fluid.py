"""`penstock run-fluid`: a script runs as by `python`, with `import paddle` meaning Penstock, in child processes too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """\
import multiprocessing, subprocess, sys
import paddle

def child(answers):
    import paddle.compat
    answers.put(paddle.compat.__name__)

if __name__ == "__main__":
    print(sys.argv[1:], sys.path[0], __file__)
    for method in ("spawn", "fork"):
        context = multiprocessing.get_context(method)
        answers = context.SimpleQueue()
        process = context.Process(target=child, args=(answers,))
        process.start()
        print(answers.get())
        process.join()
    other = [sys.executable, "-c", "import paddle; print(paddle.__version__)"]
    print(subprocess.check_output(other, text=True), end="")
    sys.exit(7)
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `penstock run-fluid` in a folder."""
    argv = [sys.executable, "-m", "penstock.cli", "run-fluid", *arguments]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def written(folder: Path, name: str, source: str) -> str:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(source)
    return str(folder / name)


def test_a_script_and_its_children_get_the_alias(tmp_path: Path) -> None:
    script = written(tmp_path, "train.py", SCRIPT)
    result = run(tmp_path, script, "--epochs", "3", "-m", "--shadow")
    assert result.stdout.splitlines() == [
        f"['--epochs', '3', '-m', '--shadow'] {tmp_path} {script}",
        "penstock.alias.compat",
        "penstock.alias.compat",
        "1.8.5",
    ], result.stderr
    assert result.returncode == 7


def test_a_script_has_one_place_unless_it_asks_for_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = written(tmp_path, "train.py", "import paddle.fluid as fluid\nprint(len(fluid.cpu_places()))\n")
    monkeypatch.delenv("CPU_NUM", raising=False)
    assert run(tmp_path, script).stdout == "1\n"
    monkeypatch.setenv("CPU_NUM", "3")
    assert run(tmp_path, script).stdout == "3\n"


WITH_A_TABLE = """
import numpy as np
import paddle.fluid as fluid
ids = fluid.data("ids", [None, 1], "int64")
rows = fluid.embedding(ids, [9, 2], is_sparse=True, is_distributed=True)
exe = fluid.Executor(fluid.CPUPlace())
exe.run(fluid.default_startup_program())
print(exe.run(feed={"ids": np.array([[3], [8]])}, fetch_list=[rows])[0].shape)
"""


def test_a_table_of_servers_is_whole_where_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = written(tmp_path, "train.py", WITH_A_TABLE)
    monkeypatch.delenv("PENSTOCK_LOCAL_TABLES", raising=False)
    assert run(tmp_path, script).stdout.startswith("(2, ")
    monkeypatch.setenv("PENSTOCK_LOCAL_TABLES", "0")
    assert "which is distributed" in run(tmp_path, script).stderr


def test_a_traceback_begins_with_the_script(tmp_path: Path) -> None:
    script = written(tmp_path, "train.py", "import paddle\nraise ValueError('mine')\n")
    result = run(tmp_path, script)
    expected = ["Traceback (most recent call last):", f'  File "{script}", line 2, in <module>']
    assert result.stderr.splitlines()[:2] == expected
    assert result.returncode == 1


def test_what_numpy_refuses_has_a_note_under_its_traceback(tmp_path: Path) -> None:
    refusal = "only 0-dimensional arrays can be converted to Python scalars"
    got = run(tmp_path, written(tmp_path, "train.py", f"import paddle\nraise TypeError({refusal!r})\n"))
    assert refusal in got.stderr
    assert got.stderr.rstrip().endswith("or write value.item()")
    other = run(tmp_path, written(tmp_path, "other.py", "import paddle\nraise TypeError('another')\n"))
    assert other.stderr.rstrip().endswith("TypeError: another")


def test_a_real_paddle_is_refused_and_shadowed_when_asked(tmp_path: Path) -> None:
    written(tmp_path, "paddle/__init__.py", "real = True")
    script = written(tmp_path, "job/train.py", "import paddle; print(paddle.__version__)")
    program = f"import sys; sys.path.append({str(tmp_path)!r}); from penstock.cli import main; main()"

    def started(*arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-c", program, "run-fluid", *arguments, script]
        return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)

    refused = started()
    assert (refused.returncode, "--shadow" in refused.stderr) == (2, True)
    assert started("--shadow").stdout == "1.8.5\n"


def test_a_paddle_beside_the_script_is_refused(tmp_path: Path) -> None:
    written(tmp_path, "paddle/__init__.py", "real = True")
    result = run(tmp_path, "--shadow", written(tmp_path, "train.py", "import paddle"))
    assert result.returncode == 2
    assert "lies beside the script" in result.stderr


def test_what_lies_beside_a_link_to_the_script_is_not_seen(tmp_path: Path) -> None:
    written(tmp_path, "links/paddle.py", "real = True")
    script = written(tmp_path, "job/train.py", "import paddle; print(paddle.__version__)")
    (tmp_path / "links" / "train.py").symlink_to(script)
    assert run(tmp_path, str(tmp_path / "links" / "train.py")).stdout == "1.8.5\n"
    written(tmp_path, "job/paddle.py", "real = True")
    assert "lies beside the script" in run(tmp_path, str(tmp_path / "links" / "train.py")).stderr


def test_launchers_pass_the_alias_to_their_ranks(tmp_path: Path) -> None:
    script = written(tmp_path, "train.py", "import paddle; print(paddle.__version__, flush=True)")
    result = run(tmp_path, "-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", "logs", script)
    assert result.returncode == 0, result.stdout + result.stderr
    assert [log.read_text() for log in sorted((tmp_path / "logs").glob("workerlog.*"))] == ["1.8.5\n", "1.8.5\n"]
