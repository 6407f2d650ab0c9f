"""The environment of a job that is submitted from a shell: its file's `env`, `--env` over it, exported settings below.

Pure: the environment comes as a mapping. What passes becomes part of the job's `env`, so the server shows what ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import typer

from penstock.command.specfile import with_env
from penstock.protocol.environment import Exported, exported, kind_of
from penstock.protocol.jobspec import JobSpec
from penstock.settings import VariableKind


def given(pairs: Sequence[str]) -> dict[str, str]:
    """Return the variables of `--env NAME=VALUE`, the last one of a name. Raises BadParameter."""
    found = {}
    for pair in pairs:
        name, is_set, value = pair.partition("=")
        if not name or not is_set:
            raise typer.BadParameter(f"--env is {pair!r}; expected NAME=VALUE")
        found[name] = value
    return found


def with_environment(spec: JobSpec, environ: Mapping[str, str], over: Mapping[str, str]) -> tuple[JobSpec, list[str]]:
    """Return the job with `over` and the settings of `environ` that it does not set, and a sentence for each group.

    Raises SpecError for a variable that the agent sets, or that holds text that no process can be given.
    """
    own = {**spec.env, **over}
    found = exported(environ, own, has_checkpoint=spec.checkpoint is not None)
    return with_env(spec, {**found.passed, **own}), _sentences(found, own)


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the settings that pass to jobs."""
    return {name: value for name, value in environ.items() if kind_of(name) is not VariableKind.SETTING}


def _sentences(found: Exported, own: Mapping[str, str]) -> list[str]:
    passed = [f"{name}={value}" for name, value in found.passed.items()]
    overruled = [f"{name}={value} ({_of_job(name, own)})" for name, value in found.overruled.items()]
    groups = [
        ("passed from the environment: ", passed, ""),
        ("not passed from the environment, because the job sets them: ", overruled, "; --env NAME=VALUE overrides"),
        ("not passed from the environment, because they are paths: ", found.paths, "; --env NAME=VALUE passes them"),
        ("not passed from the environment, because Penstock has no such settings: ", found.unknown, ""),
    ]
    return [f"{start}{', '.join(names)}{end}" for start, names, end in groups if names]


def _of_job(name: str, own: Mapping[str, str]) -> str:
    return f"the job: {own[name]}" if name in own else "the job by another name or field"
