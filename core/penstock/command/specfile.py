"""Read a job file (YAML or JSON), check it against `JobSpec`, and turn its workdir into a snapshot."""

from __future__ import annotations

import difflib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from penstock.command.snapshot import pack
from penstock.errors import SpecError
from penstock.protocol.jobspec import JobSpec, pointer

if TYPE_CHECKING:
    from penstock.client import Client


def load(path: Path) -> JobSpec:
    """Return the job that `path` describes. Raises SpecError with a JSON pointer for every fault."""
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    except OSError as error:
        raise SpecError(f"job file {str(path)!r} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"job file {str(path)!r} is no YAML and no JSON: {error}") from error
    return check(fields, name=str(path))


def check(fields: Any, *, name: str) -> JobSpec:
    """Return `fields` as a job. Raises SpecError that names `name` and each wrong field."""
    if not isinstance(fields, dict):
        raise SpecError(f"job file {name!r} holds a {type(fields).__name__}; expected fields such as 'name: my-job'")
    try:
        return JobSpec.model_validate(fields)
    except ValidationError as error:
        faults = [{"pointer": pointer(item["loc"]), "message": _message(dict(item))} for item in error.errors()]
        lines = "".join(f"\n  {fault['pointer'] or '/'}: {fault['message']}" for fault in faults)
        raise SpecError(f"job file {name!r} is not a valid job:{lines}", errors=faults) from error


def _message(item: dict[str, Any]) -> str:
    if item["type"] == "extra_forbidden":
        wrong = str(item["loc"][-1])
        near = difflib.get_close_matches(wrong, JobSpec.model_fields, n=1)
        return "unknown field" + (f"; did you mean {near[0]!r}?" if near else "")
    given = item.get("input")
    shown = "" if item["type"] == "missing" or isinstance(given, dict | list) else f" (got {given!r})"
    return str(item["msg"]).removeprefix("Value error, ") + shown


def prepare(client: Client, spec: JobSpec, *, folder: Path) -> dict[str, Any]:
    """Return the fields to submit. A workdir is packed and uploaded; it counts from `folder`, the job file's."""
    fields = spec.model_dump(mode="json", exclude_none=True)
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
