"""`paddle.version`: the release of Fluid whose API this is."""

from __future__ import annotations

import re

from penstock.errors import SpecError
from penstock.version import __version__ as _penstock

full_version = "1.8.5"
major, minor, patch = full_version.split(".")
rc = "0"
istaged = True
commit = f"penstock-{_penstock}"
with_mkl = "ON"


def mkl() -> str:
    """Return whether MKL is used, as Fluid writes it."""
    return with_mkl


def require_version(min_version: str, max_version: str | None = None) -> None:
    """Check that the release of Fluid's API, 1.8.5, is in a range, bounds included. Raises SpecError."""
    bounds = [_numbers(text) for text in (min_version, full_version, max_version or full_version)]
    if bounds != sorted(bounds):
        raise SpecError(
            f"the script requires Fluid {min_version} to {max_version or 'any later'}; Penstock has the API of "
            f"{full_version}",
            got=full_version,
        )


def _numbers(text: object) -> tuple[int, ...]:
    if not isinstance(text, str) or not re.fullmatch(r"\d+(\.\d+){0,3}", text):
        raise SpecError(f"{text!r} is no version; expected a text like '1.8.5'", got=text)
    return tuple(int(part) for part in [*text.split("."), *"000"][:4])


def show() -> None:
    """Print the release."""
    print(f"full_version: {full_version}\ncommit: {commit}")
