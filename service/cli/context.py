"""What every command shares: consoles, the client, and exit codes."""

from dataclasses import dataclass
from enum import IntEnum

import typer
from rich.console import Console

from service.cli.connection import resolve
from service.client import Client


class Exit(IntEnum):
    """Exit codes; 0 is success."""

    JOB_FAILED = 1
    """The job that was watched did not end well, or the data that was checked has bad rows."""
    REFUSED = 2
    """The command or the request is wrong: nothing was done."""
    UNREACHABLE = 3
    """The service did not answer, or failed."""
    INTERRUPTED = 130
    """Ctrl-C, as shells have it."""


@dataclass(frozen=True, slots=True)
class Session:
    """The global options."""

    url: str | None
    api_key: str | None

    def client(self, *, patience_seconds: float = 3.0) -> Client:
        """A client for the service that was named.

        Args:
            patience_seconds: how long to wait for a service that is away.

        Raises:
            NotConfigured: none was.
        """
        connection = resolve(self.url, self.api_key)
        return Client(connection.url, connection.api_key, patience_seconds=patience_seconds)


def session_of(context: typer.Context) -> Session:
    """The global options of a command's context."""
    found = context.find_object(Session)
    if found is None:
        raise RuntimeError("the command was called without its root")
    return found


def out() -> Console:
    """For results."""
    return Console(highlight=False, soft_wrap=True)


def err() -> Console:
    """For errors and progress."""
    return Console(stderr=True, highlight=False, soft_wrap=True)
