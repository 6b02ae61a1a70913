"""Which service the CLI talks to, with which key.

`planish serve` leaves a file in the user's config folder, mode 0600, so that on the same machine
the other commands need no settings. An address that is given otherwise never gets the key of that
file: a key goes only where it was made for.
"""

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

URL_VARIABLE = "PLANISH_URL"
KEY_VARIABLE = "PLANISH_API_KEY"


class NotConfigured(Exception):
    """It is not known where the service is, or no key is."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A service and a key for it."""

    url: str
    api_key: str


@dataclass(frozen=True, slots=True)
class SavedConnection:
    """What the last `planish serve` of this user left."""

    url: str
    api_key: str | None
    data_dir: str


def saved_path() -> Path:
    """Where the file is: `$XDG_CONFIG_HOME/planish`, by default `~/.config/planish`."""
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config) / "planish" / "connection.json"


def read_saved() -> SavedConnection | None:
    """What the last `planish serve` left; None where there is nothing usable."""
    try:
        return SavedConnection(**json.loads(saved_path().read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # absent, or of another version: as if never saved
        return None


def save(connection: SavedConnection) -> Path:
    """Leaves it for the other commands, readable by this user alone."""
    path = saved_path()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # mkstemp makes the file with mode 0600 before the key is in it.
    descriptor, fresh = tempfile.mkstemp(prefix=".connection-", dir=path.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(asdict(connection), file)
    os.replace(fresh, path)
    return path


def resolve(url: str | None, api_key: str | None) -> Connection:
    """The connection from options (or their environment variables), else the saved one.

    Raises:
        NotConfigured: something is missing, and how to give it.
    """
    saved = read_saved()
    if url is None:
        if saved is None:
            raise NotConfigured(
                f"which service? Give --url or {URL_VARIABLE}, or start one here: "
                "planish serve --data-dir DIR"
            )
        url = saved.url
    url = url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise NotConfigured(f"{url!r} is no address; it begins with http:// or https://")
    if api_key is None and saved is not None and saved.url.rstrip("/") == url:
        api_key = saved.api_key
    if api_key is None:
        raise NotConfigured(f"no API key for {url}: set {KEY_VARIABLE} (or give --key)")
    if not (api_key.isascii() and api_key.isprintable()):
        raise NotConfigured(f"the API key holds characters that no key has; see {KEY_VARIABLE}")
    return Connection(url=url, api_key=api_key)
