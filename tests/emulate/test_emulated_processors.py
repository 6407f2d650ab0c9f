"""Processors older than this machine's: the native libraries load, operators equal torch's, a network trains."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
from tools import emulate
from tools.emulate import Check, Finished, NotEmulated


# Arm's model has not been run yet: it belongs to `make soak` alone.
@(pytest.mark.slow if platform.machine() == "x86_64" else pytest.mark.soak)
def test_libraries_load_and_kernels_are_probed_without_avx512() -> None:
    assert emulate.emulate([emulate.newest()], ["load"]) == {}


@pytest.mark.soak
@pytest.mark.parametrize("cpu", emulate.MODELS.get(platform.machine(), {}))
def test_an_older_processor_computes_and_trains(cpu: str) -> None:
    assert emulate.emulate([cpu], emulate.CHECKS) == {}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("qemu-x86_64 version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)", (7, 2)),
        ("qemu-x86_64 version 6.2.0 (Debian 1:6.2+dfsg-2ubuntu6)", (6, 2)),
        ("qemu-x86_64 version 10.0.2", (10, 0)),
    ],
)
def test_a_model_needs_a_version_with_its_instructions(text: str, version: tuple[int, int]) -> None:
    assert emulate.version_of(text) == version
    assert emulate.can_emulate("Haswell", version) == (version >= (7, 2))
    assert emulate.can_emulate("Nehalem", version)


def test_what_prints_no_version_is_not_an_emulator() -> None:
    with pytest.raises(NotEmulated, match="expected a version of QEMU"):
        emulate.version_of("command not found")


# ---------------------------------------------------------------- what is decided without running anything


def loaded(capability: str) -> Finished:
    return Finished(0, json.dumps({"capability": capability, "libraries": [], "kernels": {}}), 1.0)


def trained(*losses: float) -> Finished:
    return Finished(0, json.dumps({"losses": losses}), 1.0)


LOAD, TRAIN = Check("load", "Haswell", ()), Check("train", "Haswell", ())


def test_every_model_gets_every_check_with_a_process_a_file() -> None:
    found = emulate.plan(["Haswell", "Nehalem"], emulate.CHECKS, ["a/test_one.py", "a/test_two.py"])
    names = ["load", "operators test_one", "operators test_two", "train"]
    assert [(check.cpu, check.name) for check in found] == [(cpu, n) for cpu in ("Haswell", "Nehalem") for n in names]


def test_an_emulator_that_does_nothing_is_noticed() -> None:
    assert emulate.failure(LOAD, loaded("AVX2"), capability="AVX2", native=()) == ""
    assert "AVX512; expected AVX2" in emulate.failure(LOAD, loaded("AVX512"), capability="AVX2", native=())


def test_losses_have_to_be_those_of_this_processor() -> None:
    assert emulate.failure(TRAIN, trained(0.7, 0.5), capability="AVX2", native=(0.7, 0.5 + 1e-7)) == ""
    assert "expected [0.7, 0.51]" in emulate.failure(TRAIN, trained(0.7, 0.5), capability="AVX2", native=(0.7, 0.51))


def test_a_crash_is_reported_with_the_end_of_the_output() -> None:
    why = emulate.failure(TRAIN, Finished(-4, "one\ntwo", 1.0), capability="AVX2", native=())
    assert why.splitlines() == ["exit status -4", "one", "two"]


def test_nothing_chooses_kernels_in_place_of_the_processor(tmp_path: Path) -> None:
    given = {
        "OPENBLAS_CORETYPE": "Haswell",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "PENSTOCK_MATRIX_KERNELS": "torch",
        "LANG": "C",
    }
    kept = emulate.environment(given, tmp_path)
    assert kept.keys() == {"LANG", "PENSTOCK_CACHE", "CPU_NUM", "PYTHONPATH"}


def test_a_machine_without_models_is_refused_by_name() -> None:
    with pytest.raises(NotEmulated, match="a riscv64 machine: models are known for x86_64 and aarch64"):
        emulate.models("riscv64")


def test_a_missing_emulator_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotEmulated, match="apt-get install qemu-user"):
        emulate.emulator("x86_64")
