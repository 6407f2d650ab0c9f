"""Job files that anybody may have written: a job, or a refusal that points to what is wrong; never another error.

A job that the schema allows is read as it was meant, from JSON and from YAML, and the schema allows what it is sent as.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import jsonschema_rs
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.job_fields import FIELDS, JOBS, VALUES

from penstock.command.specfile import load, sent
from penstock.errors import SpecError
from penstock.protocol.jobspec import JobSpec

SCHEMA = jsonschema_rs.Draft202012Validator(JobSpec.model_json_schema())
LINES = st.sampled_from(
    [
        "name: my-job", "entrypoint: [python, train.py]", "a: &a [*a]", "b: *a", "<<: {name: x}", "? [1, 2]\n: 3",
        "priority: 2026-13-45", "priority: 1e999", "priority: 0x", "priority: .inf", "priority: 0b2",
        "env: !!binary '*'",
        "env: !!set {a, b}", "env: !!python/object:os.system {}", "restart: {on: [infra]}", "trainers: {count: 1_000}",
        "stop_grace_s: 1:99:99", "'name': \"\\uD800\"", "name: \"\\0\"", "- 1", "%YAML 9.9", "---", "...", "\t",
        "{", "[" * 40,
        "[" * 3000, "? " * 3000, "env: {PENSTOCK_INDEX: '1'}", "=: =", "priority: 0o9", "priority: -", "name: ~",
        "max_duration_s: 2001-12-14t21:59:43.10-05:00", "max_duration_s: 2001-12-14t99:59:43Z", "name: !!timestamp 1",
        "priority: !!int x", "priority: !!float x", "priority: !!bool x", "env: !!omap [1]", "env: !!pairs [1]",
    ]
)  # fmt: skip


def read(content: bytes) -> JobSpec | SpecError:
    """Read a job file. Any other error is the test's failure."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.yaml"
        path.write_bytes(content)
        try:
            return load(path)
        except SpecError as error:
            return error


def assert_points(refusal: SpecError) -> None:
    """Each fault that a refusal lists has a JSON pointer and a sentence."""
    for fault in getattr(refusal, "errors", ()):
        assert fault["pointer"] == "" or fault["pointer"].startswith("/")
        assert fault["message"]


@settings(max_examples=100)
@given(JOBS, st.booleans())
def test_job_that_the_schema_allows_is_read_as_meant(job: dict[str, Any], is_yaml: bool) -> None:
    SCHEMA.validate(job)
    found = read((yaml.safe_dump(job, allow_unicode=True) if is_yaml else json.dumps(job)).encode())
    assert isinstance(found, JobSpec), found
    assert found.model_dump(exclude_unset=True) == JobSpec.model_validate(job).model_dump(exclude_unset=True)
    SCHEMA.validate(sent(found))


@settings(max_examples=120)
@given(JOBS, st.sampled_from(FIELDS), VALUES)
def test_wrong_value_is_refused_with_its_place(job: dict[str, Any], field: str, value: object) -> None:
    changed = {**job, field: value}
    found = read(yaml.safe_dump(changed, allow_unicode=True).encode("utf-8", "surrogatepass"))
    if isinstance(found, SpecError):
        assert_points(found)
    else:
        SCHEMA.validate(sent(found))


@settings(max_examples=120)
@given(st.lists(LINES | st.text(max_size=20), max_size=6).map("\n".join) | st.binary(max_size=60))
def test_any_text_is_a_job_or_refused(text: str | bytes) -> None:
    found = read(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    if isinstance(found, SpecError):
        assert_points(found)
