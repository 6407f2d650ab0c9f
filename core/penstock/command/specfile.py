"""Read a job file (YAML or JSON), check it against `JobSpec`, and turn its workdir into a snapshot."""

from __future__ import annotations

import difflib
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ValidationError

from penstock.command.snapshot import pack
from penstock.errors import SpecError
from penstock.protocol.jobspec import JobSpec, pointer, without_reserved

if TYPE_CHECKING:
    from penstock.client import Client


class _Yaml(yaml.SafeLoader):
    """YAML whose only booleans are true and false, as in YAML 1.2: `restart: {on: [infra]}` has a key 'on'."""


_BOOL = "tag:yaml.org,2002:bool"
_Yaml.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag != _BOOL]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_MALFORMED = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError)
"""What reading YAML raises: PyYAML converts a date or a number that is none without a check of its own."""
_Yaml.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


def load(path: Path) -> JobSpec:
    """Return the job that `path` describes. Raises SpecError with a JSON pointer for every fault."""
    try:
        fields = _parsed(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"job file {str(path)!r} cannot be read: {error.strerror}") from error
    except _MALFORMED as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise SpecError(f"job file {str(path)!r} is no YAML and no JSON: {why}") from error
    return check(fields, name=str(path))


def _parsed(text: str) -> Any:
    """Return what a text holds as JSON, else as YAML: that reads JSON, too, but not characters in two escapes."""
    try:
        return json.loads(text)
    except ValueError:
        return yaml.load(text, Loader=_Yaml)  # a safe one


def check(fields: Any, *, name: str) -> JobSpec:
    """Return `fields` as a job. Raises SpecError that names `name` and each wrong field."""
    if not isinstance(fields, dict):
        raise SpecError(f"job file {name!r} holds a {type(fields).__name__}; expected fields such as 'name: my-job'")
    try:
        return without_reserved(JobSpec.model_validate(fields))
    except ValidationError as error:
        raise _refused(error, f"job file {name!r} is not a valid job") from error


def with_env(spec: JobSpec, env: Mapping[str, str]) -> JobSpec:
    """Return the job with another `env`. Raises SpecError that names each variable that it cannot hold."""
    try:
        return without_reserved(JobSpec.model_validate({**spec.model_dump(), "env": dict(env)}))
    except ValidationError as error:
        raise _refused(error, f"job {spec.name!r} cannot have this environment") from error


def _refused(error: ValidationError, what: str) -> SpecError:
    faults = [{"pointer": pointer(item["loc"]), "message": _message(dict(item))} for item in error.errors()]
    lines = "".join(f"\n  {fault['pointer'] or '/'}: {fault['message']}" for fault in faults)
    return SpecError(f"{what}:{lines}", errors=faults)


def _message(item: dict[str, Any]) -> str:
    given = item.get("input")
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(item["loc"][-1]), _fields(item["loc"][:-1]), n=1)
        return "unknown field" + (f"; did you mean {near[0]!r}?" if near else "")
    if item["type"] == "model_type":
        return f"expected fields such as {{{_fields(item['loc'])[0]}: …}}, got {given!r}"
    if item["type"] == "string_type" and isinstance(given, int | float):
        return f"expected text, got {json.dumps(given)}; put it in quotes"
    shown = "" if item["type"] == "missing" or isinstance(given, dict | list) else f" (got {given!r})"
    return str(item["msg"]).removeprefix("Value error, ") + shown


def _fields(loc: tuple[int | str, ...]) -> list[str]:
    """Return the fields of the part of a job at `loc`, those of the job where there is none."""
    part: Any = JobSpec
    for name in loc:
        field = part.model_fields.get(name)
        part = next((one for one in _types(field.annotation) if issubclass(one, BaseModel)), JobSpec) if field else part
    return list(part.model_fields)


def _types(annotation: Any) -> list[type]:
    """Return the classes that a field may hold: of `Checkpoint | None`, both."""
    return [one for one in getattr(annotation, "__args__", (annotation,)) if isinstance(one, type)]


def sent(spec: JobSpec) -> dict[str, Any]:
    """Return the fields as a server takes them, one of the version before, too, where nothing new is asked for."""
    fields = spec.model_dump(mode="json", exclude_none=True)
    if not fields["restart"]["budgets"]:
        del fields["restart"]["budgets"]
    if not fields["node_selector"]:
        del fields["node_selector"]
    return fields


def prepare(client: Client, spec: JobSpec, *, folder: Path) -> dict[str, Any]:
    """Return the fields to submit. A workdir is packed and uploaded; it counts from `folder`, the job file's."""
    fields = sent(spec)
    if spec.workdir is None:
        return fields
    if spec.snapshot is not None:
        raise SpecError("the job has both 'workdir' and 'snapshot'; give one of them")
    with tempfile.TemporaryDirectory(prefix="penstock-") as temporary:
        archive = Path(temporary) / "snapshot.tar.gz"
        pack((folder / Path(spec.workdir).expanduser()).resolve(), archive)
        fields["snapshot"] = client.upload_snapshot(archive)["sha256"]
    del fields["workdir"]
    return fields
