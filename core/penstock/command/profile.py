"""Which server, and with which token: flags and environment first, then the profile that `penstock up` writes, then a
server that was started without `up` in its default folder.

The profile (`~/.penstock/config.json`, 0600, or the file that PENSTOCK_CONFIG names) holds the URL of the local server
and the *path* of its token, so that no secret is copied. A kept token is only sent to the URL it was kept for.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import SpecError, Unavailable
from penstock.process.private import write_private
from penstock.settings import CONFIG

if TYPE_CHECKING:
    from penstock.client import Client

DEFAULT_URL = "http://127.0.0.1:7080"


@dataclass(frozen=True, slots=True)
class UserProfile:
    """A server that this user started. `token_file`: path of its admin token."""

    url: str
    token_file: str


def home() -> Path:
    """Return the folder that `up` uses when none is given. Raises SpecError for a user who has no home folder."""
    try:
        return Path.home() / ".penstock"
    except RuntimeError as error:
        raise SpecError(f"the folder of the profile is unknown ({error}): set HOME") from error


def path() -> Path:
    """Return where the profile lies."""
    return CONFIG.read() or home() / "config.json"


def load() -> UserProfile | None:
    """Return the profile, None if there is none. Raises SpecError if it is damaged or cannot be read."""
    try:
        return UserProfile(**json.loads(path().read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(
            "the profile", path(), error, "set HOME or PENSTOCK_CONFIG, or give --url and --token"
        ) from error
    except (ValueError, TypeError) as error:
        raise SpecError(f"{path()} is damaged ({error}); remove it, or give --url and --token") from error


def local() -> UserProfile | None:
    """Return the server that keeps its state in `~/.penstock/server`, None if none ever did. Raises SpecError."""
    folder = home() / "server"
    try:
        fields = json.loads((folder / "server.json").read_text(encoding="utf-8"))
        return UserProfile(str(fields["url"]), str(folder / "admin.token"))
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError):
        return None
    except OSError as error:
        file = folder / "server.json"
        raise _unreadable("the local server's address", file, error, "set HOME, or give --url and --token") from error


def _unreadable(what: str, file: Path, error: OSError, advice: str) -> SpecError:
    return SpecError(f"{what} in {file} cannot be read: {error.strerror or error}; {advice}", got=str(file))


def save(profile: UserProfile) -> None:
    """Replace the profile in one step. Raises SpecError if it cannot be written."""
    target = path()
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(target, json.dumps(asdict(profile)))
    except OSError as error:
        advice = "set PENSTOCK_CONFIG to a file that can be written"
        raise SpecError(
            f"the profile {target} cannot be written: {error.strerror or error}; {advice}", got=str(target)
        ) from error


def remove(profile: UserProfile) -> None:
    """Remove the profile if it still is this one."""
    try:
        if load() == profile:
            path().unlink(missing_ok=True)
    except (SpecError, OSError):
        return  # not ours any more, or in a folder that cannot be written


def resolve(url: str | None, token: str | None) -> tuple[str, str]:
    """Return URL and token; with both given, no file is read.

    Raises AuthError if no token is known for the URL, Unavailable if no server is, SpecError if a file cannot be read.
    """
    if url and token is not None:
        return url.rstrip("/"), token
    kept = load() or local()
    address = (url or (kept.url if kept else DEFAULT_URL)).rstrip("/")
    if token is not None:
        return address, token
    if kept is not None and kept.url == address:
        try:
            return address, Path(kept.token_file).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            remove(kept)  # its server kept its state in a folder that is gone
        except OSError as error:
            file = Path(kept.token_file)
            raise _unreadable("the token", file, error, "give --token or set PENSTOCK_TOKEN") from error
    from penstock.client import AuthError  # loads httpx

    if url is None:
        raise Unavailable("no server is known: start one with 'penstock up', or give --url and --token")
    raise AuthError(f"no token is known for {address}: give --token or set PENSTOCK_TOKEN")


def connect(url: str | None, token: str | None) -> Client:
    """Return a client for the server that is meant. No connection is made yet."""
    address, secret = resolve(url, token)
    from penstock.client import Client  # loads httpx, 0.1 s that --help need not pay

    return Client(address, token=secret)
