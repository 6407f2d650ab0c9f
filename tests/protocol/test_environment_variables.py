"""Which environment variables reach a job: each that the code reads has a kind, and secrets never pass."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SpecError
from penstock.protocol.contract import Mode, reserved
from penstock.protocol.environment import (
    SECRET_PARTS,
    SECRET_TEXTS,
    exported,
    kind_of,
    passes_from_node,
)
from penstock.ps.settings import SERVER_KEYS, TRAINER_KEYS
from penstock.settings import (
    CHECK_NAN,
    CHECKPOINT_KEEP,
    COLLECTIVE_LEASE_S,
    CPU_NUM,
    FUSE_MEMORY_SIZE,
    MAX_JOBS,
    PS_LEASE_S,
    PS_START_S,
    PS_TRANSPORT,
    SELECTED_GPUS,
    SETTINGS,
    TREE,
    Setting,
    VariableKind,
)  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("core", "server", "worker", "examples")
_NAME = re.compile(r"(PENSTOCK|FLAGS|PADDLE|TORCHELASTIC|OMP|MKL|ONEDNN|DNNL|GLOO|NCCL|CUDA|GLOG)_\w*[A-Za-z0-9]")
_READ_IN_CPP = re.compile(r'getenv\("(\w+)"\)')
_ACCESSORS = {"get", "setdefault", "pop", "getenv"}
FLUID_FLAGS = {
    "FLAGS_check_nan_inf", "FLAGS_eager_delete_tensor_gb", "FLAGS_fuse_parameter_groups_size",
    "FLAGS_fuse_parameter_memory_size", "FLAGS_selected_gpus", "FLAGS_rpc_deadline", "FLAGS_rpc_retry_times",
    "FLAGS_rpc_send_thread_num", "FLAGS_rpc_get_thread_num", "FLAGS_rpc_prefetch_thread_num",
    "FLAGS_communicator_max_merge_var_num", "FLAGS_communicator_send_queue_size",
    "FLAGS_communicator_independent_recv_thread", "FLAGS_communicator_min_send_grad_num_before_recv",
    "FLAGS_communicator_thread_pool_size", "FLAGS_communicator_send_wait_times", "FLAGS_communicator_is_sgd_optimizer",
}  # fmt: skip
_OF_ANY_PROGRAM = {
    "PATH", "PYTHONPATH", "PYTHONUNBUFFERED", "KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
}  # fmt: skip


def names_in(source: str) -> Iterator[str]:
    """Yield texts that are a variable's name by their form, or by being looked up in an environment."""
    tree = ast.parse(source)
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        looked_up = _looked_up(node)
        found = constants.get(looked_up.id) if isinstance(looked_up, ast.Name) else looked_up
        for text in (node, found):
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                if text is found or _NAME.fullmatch(text.value):
                    yield text.value


def _looked_up(node: ast.AST) -> ast.expr | None:
    """Return what `environ[…]`, `environ.get(…)` and `os.getenv(…)` ask for."""
    if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
        return node.slice
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ACCESSORS:
        if node.args and ast.unparse(node.func.value).endswith(("environ", "os")):
            return node.args[0]
    return None


def names_read() -> set[str]:
    files = [path for top in SOURCES for path in (ROOT / top).rglob("*.py")]
    python = {name for path in files for name in names_in(path.read_text(encoding="utf-8"))}
    native = [path for path in (ROOT / "core").rglob("*.*") if path.suffix in (".cpp", ".h", ".cu")]
    return python | {name for path in native for name in _READ_IN_CPP.findall(path.read_text(encoding="utf-8"))}


def test_every_variable_that_the_code_reads_has_a_kind() -> None:
    unknown = sorted(name for name in names_read() - _OF_ANY_PROGRAM if kind_of(name) is None)
    assert unknown == [], "add them to penstock.settings and docs/environment.md"


def test_the_walk_finds_names_however_they_are_read() -> None:
    source = "A = 'VIA_CONSTANT'\nos.environ.get(A)\nos.environ['BY_ITEM']\nos.getenv('BY_CALL')\nX = 'PENSTOCK_FORM'\n"
    assert set(names_in(source)) == {"VIA_CONSTANT", "BY_ITEM", "BY_CALL", "PENSTOCK_FORM"}


def test_every_key_of_the_runtime_configs_is_a_setting() -> None:
    names = [f"FLAGS_{key.removeprefix('_')}" for key in (*TRAINER_KEYS, *SERVER_KEYS)]
    assert {kind_of(name) for name in names} == {VariableKind.SETTING}


@pytest.mark.parametrize("mode", ["local", "pserver", "collective", "command"])
def test_nothing_that_an_agent_sets_passes(mode: Mode) -> None:
    names = reserved(mode, gpus=1)
    assert exported(dict.fromkeys(names, "1"), {}).passed == {}
    assert [name for name in names if passes_from_node(name, "1")] == []


def test_each_variable_of_the_table_has_the_kind_that_it_says() -> None:
    """No row is hidden by a name that looks like a secret, or that an agent sets."""
    assert [row.name for row in SETTINGS if kind_of(row.name) is not row.kind] == []


@given(
    st.sampled_from(["PENSTOCK_", "FLAGS_", "MKL_", "ONEDNN_", "AWS_", ""]),
    st.sampled_from(sorted({*SECRET_TEXTS, *SECRET_PARTS} - {"PWD"})),
    st.sampled_from(["", "S", "_FILE", "S_2", "2"]),
    st.sampled_from([str.upper, str.lower]),
)
def test_no_name_with_a_secret_word_passes(prefix: str, word: str, end: str, case: type[str]) -> None:
    name = prefix + case(word + end)
    found = exported({name: "hidden"}, {})
    assert (found.passed, found.unknown, passes_from_node(name, "hidden")) == ({}, (), False)


_SECRET_NAMES = (
    "PGPASSWORD", "DB_PASS", "DB_PWD", "SMTP_PASS", "MYSQL_PWD", "MYSQL_ROOT_PASSWORD", "GITHUB_PAT", "GITHUBTOKEN",
    "GH_TOKEN", "HF_TOKEN", "npm_config__auth", "npm_config_//registry.example/:_authToken", "NPM_TOKEN",
    "GOOGLE_APPLICATION_CREDENTIALS", "AWS_CREDENTIALS", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID",
    "AWS_SESSION_TOKEN", "DOCKER_AUTH_CONFIG", "REDISCLI_AUTH", "SSH_AUTH_SOCK", "SLACK_WEBHOOK_URL", "SENTRY_DSN",
    "WANDB_API_KEY", "OPENAI_APIKEY", "OPENAI_API_KEY_2", "GPG_PASSPHRASE", "AZURE_CLIENT_SECRET", "SECRETS_DIR",
    "MKL_PASS", "MKL_API_KEY", "OMP_AUTH", "ONEDNN_PAT", "DNNL_PWD", "FLAGS_passwd", "PENSTOCK_TOKEN",
)  # fmt: skip
_ADDRESSES_WITH_PASSWORDS = {
    "DATABASE_URL": "postgresql+psycopg://app:hunter2@db.example:5432/app",
    "REDIS_URL": "redis://:hunter2@cache.example/0",
    "http_proxy": "http://user:p:w#1@proxy.example:3128",
    "PIP_OPTIONS": "--extra-index-url HTTPS://user:hunter2@packages.example/simple",
    "CPU_NUM": "amqp://u:p@host",
    "PENSTOCK_CACHE": "s3://id:hunter2@bucket/cache",
    "PENSTOCK_ABSENT": "s3://id:hunter2@bucket/cache",
}
_HARMLESS = {
    "PATH": "/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8", "PWD": "/work", "OLDPWD": "/", "TERM": "xterm",
    "KEYBOARD_LAYOUT": "us", "XKEYSYMDB": "/x", "MONKEYTYPE": "1", "COMPASS_EDITION": "1", "PATTERN": "*",
    "GIT_AUTHOR_NAME": "A", "LD_LIBRARY_PATH": "/lib", "PYTHONPATH": "/src", "SSL_CERT_FILE": "/ca.pem",
    "XAUTHORITY": "/x", "BYPASS_CACHE": "1", "TOKENIZERS_PARALLELISM": "false",
    "http_proxy": "http://proxy.example:3128", "no_proxy": "localhost,127.0.0.1",
    "REGISTRY": "https://host.example:5000/team@v1", "GIT_URL": "ssh://git@host.example/a:b.git",
    "MAIL": "a@b.example", "CONDA_PREFIX": "/opt/conda", "SQLITE_URL": "sqlite:////var/app.db", "CC": "gcc",
    "CXX": "g++", "MAX_JOBS": "2",
}  # fmt: skip
"""Lists of their own, not made of the module's words: what machines of users have."""


@pytest.mark.parametrize("name", _SECRET_NAMES)
def test_no_secret_of_a_user_s_machine_passes(name: str) -> None:
    found = exported({name: "hidden"}, {})
    assert (found.passed, found.paths, found.unknown, passes_from_node(name, "hidden")) == ({}, (), (), False)


@pytest.mark.parametrize(("name", "value"), _ADDRESSES_WITH_PASSWORDS.items())
def test_no_address_with_a_password_passes(name: str, value: str) -> None:
    assert (exported({name: value}, {}).passed, passes_from_node(name, value)) == ({}, False)


@pytest.mark.parametrize(("name", "value"), _HARMLESS.items())
def test_a_harmless_variable_passes_from_its_node(name: str, value: str) -> None:
    assert passes_from_node(name, value)


def test_an_exported_setting_reaches_a_job_that_does_not_set_it() -> None:
    environ = {"CPU_NUM": "4", "PENSTOCK_MATRIX_KERNELS": "torch", "MKL_CBWR": "AVX2", "HOME": "/root"}
    assert exported(environ, {"CPU_NUM": "2"}).passed == {"MKL_CBWR": "AVX2", "PENSTOCK_MATRIX_KERNELS": "torch"}


def test_a_job_sets_a_setting_by_either_of_its_names() -> None:
    environ = {"PENSTOCK_MATRIX_KERNELS": "torch", "PENSTOCK_CHECK_NAN": "1"}
    assert exported(environ, {"FLAGS_matrix_kernels": "onednn"}).passed == {"PENSTOCK_CHECK_NAN": "1"}


def test_checkpoint_of_a_job_is_not_overridden() -> None:
    environ = {"PENSTOCK_CHECKPOINT_EVERY_STEPS": "7", "PENSTOCK_CHECKPOINT_KEEP": "9"}
    assert exported(environ, {}, has_checkpoint=True).passed == {}
    assert exported(environ, {}).passed == environ


def test_what_does_not_pass_is_named() -> None:
    environ = {"CPU_NUM": "4", "PENSTOCK_CHECKPOINT_DIR": "/c", "FLAGS_nonsense": "1", "MKL_CBRW": "1"}
    found = exported(environ, {"CPU_NUM": "2"})
    assert (found.overruled, found.paths, found.unknown) == (
        {"CPU_NUM": "4"},
        ("PENSTOCK_CHECKPOINT_DIR",),
        ("FLAGS_nonsense", "MKL_CBRW"),
    )
    assert exported({"CPU_NUM": "2"}, {"CPU_NUM": "2"}).overruled == {}, "it has what was asked for"


@pytest.mark.parametrize("name", ["PENSTOCK_CACHE", "PENSTOCK_ABSENT", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"])
def test_what_a_machine_needs_passes_from_its_node(name: str) -> None:
    assert passes_from_node(name, "1")


_NOT_OF_NODES = (
    "CPU_NUM", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "FLAGS_check_nan_inf", "FLAGS_new", "PENSTOCK_MATRIX_KERNELS",
    "PENSTOCK_URL", "PENSTOCK_SERVER_PORT", "PENSTOCK_NEW", "DISPLAY", "RANK", "PADDLE_X",
)  # fmt: skip


@pytest.mark.parametrize("name", _NOT_OF_NODES)
def test_a_node_gives_no_place_and_no_setting(name: str) -> None:
    assert not passes_from_node(name, "1")


# ---------------------------------------------------------------- the settings tree

_READERS = re.compile(r"\bos\.(environ|getenv|putenv)\b")
_MAY_READ = {
    "core/penstock/identity.py",
    "core/penstock/settings.py",
    "core/penstock/__init__.py",  # before torch reads it
    # launchers: they build the environment of a process that they start, or submit
    "core/penstock/cluster/kubernetes/access.py",
    "core/penstock/cluster/ray/actors.py",
    "core/penstock/cluster/slurm.py",
    "core/penstock/command/cluster_kubernetes.py",
    "core/penstock/command/demo.py",
    "core/penstock/alias/path/paddle/__init__.py",
    "core/penstock/command/fluid.py",
    "core/penstock/command/jobs.py",
    "core/penstock/command/nodes.py",
    "core/penstock/command/serve.py",
    "core/penstock/distributed/launch.py",
    "core/penstock/distributed/launch_ps.py",
    "worker/penstock_worker/replica.py",
}


def test_only_known_modules_read_the_environment() -> None:
    files = [path for top in ("core", "server", "worker") for path in (ROOT / top).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if _READERS.search(path.read_text(encoding="utf-8"))}
    assert found == _MAY_READ


def test_every_own_variable_has_one_home() -> None:
    homes = {ROOT / "core" / "penstock" / name for name in ("settings.py", "identity.py")}
    files = {path for top in ("core", "worker") for path in (ROOT / top).rglob("*.py")}
    named = {
        f"{path.name}: {name}"
        for path in files - homes
        for name in names_in(path.read_text(encoding="utf-8"))
        if name.startswith(("PENSTOCK_", "PADDLE_", "FLAGS_"))
    }
    assert named == {"rank_plan.py: PADDLE_TRAINERS"}, "of a cluster, for its launcher alone"


def test_each_setting_stands_once_in_the_tree() -> None:
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)


def test_flags_have_the_names_that_fluid_had() -> None:
    flags = {setting.name for setting in SETTINGS if setting.name.startswith("FLAGS_")}
    assert flags - FLUID_FLAGS == {setting.same_as for setting in SETTINGS if setting.is_deprecated}


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (CPU_NUM, "0"), (PS_LEASE_S, "nan"), (PS_START_S, "inf"), (PS_TRANSPORT, "udp"), (CHECK_NAN, "maybe"),
        (FUSE_MEMORY_SIZE, "x"), (SELECTED_GPUS, "0,,1"), (CHECKPOINT_KEEP, "0"), (MAX_JOBS, "all"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_in_one_form(setting: Setting[Any], text: str) -> None:
    expected = f"the environment variable {setting} is {text!r}; expected {setting.values.expected}"
    with pytest.raises(SpecError, match=re.escape(expected)) as raised:
        setting.read({setting.name: f" {text} "})
    assert (raised.value.pointer, raised.value.got) == (setting.name, text)


def test_the_lease_of_ranks_may_have_no_limit() -> None:
    assert COLLECTIVE_LEASE_S.read({COLLECTIVE_LEASE_S.name: "inf"}) == float("inf")
    for text in ("0", "nan", "-inf"):
        with pytest.raises(SpecError, match="expected a number of seconds above 0"):
            COLLECTIVE_LEASE_S.read({COLLECTIVE_LEASE_S.name: text})


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_an_empty_variable_is_not_set(setting: Setting[Any]) -> None:
    assert setting.read({setting.name: " "}) == setting.default == setting.read({})


def test_the_name_that_wins_is_read_first() -> None:
    both = {"PENSTOCK_CHECK_NAN": "0", "FLAGS_check_nan_inf": "1"}
    assert (CHECK_NAN.read(both), CHECK_NAN.read({"FLAGS_check_nan_inf": "1"})) == (False, True)


# ---------------------------------------------------------------- docs/environment.md

_ROW = re.compile(r"^\| `([^`]+)` \| (.+) \| (.+) \| (.+) \| (.+) \|$")


def page() -> Iterator[tuple[str, ...]]:
    kind = ""
    for line in (ROOT / "docs" / "environment.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            kind = line.removeprefix("## ").split(":")[0].lower()
        if row := _ROW.match(line):
            yield kind, *row.groups()


def test_the_page_lists_the_variables_of_the_table() -> None:
    titles = {
        VariableKind.SETTING: "settings",
        VariableKind.PATH: "paths",
        VariableKind.NODE: "nodes",
        VariableKind.SECRET: "secrets",
    }
    expected = {
        (titles.get(row.kind, "tools"), row.name, row.values.shown, row.default_text, reader, row.meaning)
        for reader, rows in TREE.items()
        for row in rows
        if row.kind is not VariableKind.PLACE
    }
    assert set(page()) == expected


def test_the_page_names_each_word_of_a_secret() -> None:
    text = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    assert [word for word in (*SECRET_TEXTS, *SECRET_PARTS) if f"`{word}`" not in text] == []
