"""The process of `planish serve`: settings, socket, uvicorn."""

import contextlib
import logging
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import typer
import uvicorn
from fastapi import FastAPI
from pydantic import ValidationError

from service.app import create_app
from service.auth.keys import hash_secret
from service.cli.connection import SavedConnection, read_saved, save
from service.cli.context import Exit, err, out
from service.cli.database import open_store
from service.installed import InvalidClusters, read_clusters
from service.settings import BOOTSTRAP_KEY_VARIABLE, Settings
from service.store import Store

# Requests that are being answered get so long; streams end at once.
_DRAIN_SECONDS = 3


class _Server(uvicorn.Server):
    """Says when it is ready; ends streams when it is asked to stop, then itself with code 0."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._app = app
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announce()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        service = getattr(self._app.state, "service", None)
        if service is not None:
            service.stopping.set()
        super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own raises the signal again at the end, so a wanted stop looks like a crash.
        before = {
            sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)


def run_server(
    host: str,
    port: int,
    options: Mapping[str, Any],
    *,
    save_connection: bool,
    access_log: bool,
) -> None:
    """Serves until a signal comes.

    Args:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        options: the other settings.
        save_connection: leave address and key for the other commands.
        access_log: log each request.

    Raises:
        typer.Exit: wrong settings, an address in use, or a start that failed.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    listener = _listen(host, port)
    settings = _settings({**options, "host": host, "port": listener.getsockname()[1]})
    _prepare(settings.data_dir)
    _check_clusters(settings)
    with contextlib.closing(open_store(settings.store_url)) as store:
        first_keys: list[str] = []
        app = create_app(settings, store=store, on_first_key=first_keys.append)
        config = uvicorn.Config(
            app,
            log_level="info" if access_log else "warning",
            access_log=access_log,
            server_header=False,
            timeout_graceful_shutdown=_DRAIN_SECONDS,
            ws="none",
        )
        server = _Server(
            config, app, lambda: _announce(settings, store, first_keys, keep=save_connection)
        )
        server.run(sockets=[listener])
    if not server.started:
        raise typer.Exit(Exit.UNREACHABLE)


def _prepare(data_dir: Path) -> None:
    """Makes the data folder now, so that one that cannot be used has a plain message."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=data_dir):
            pass
    except OSError as error:
        err().print(f"the data folder {data_dir} cannot be used: {error.strerror}", markup=False)
        raise typer.Exit(Exit.REFUSED) from None


def _check_clusters(settings: Settings) -> None:
    """Reads the clusters file once, so that a fault in it has a plain message."""
    try:
        read_clusters(settings)
    except InvalidClusters as error:
        err().print(str(error), markup=False)
        raise typer.Exit(Exit.REFUSED) from None


def _settings(options: Mapping[str, Any]) -> Settings:
    # Taken out of the environment: it is no business of the jobs that this process starts.
    key = os.environ.pop(BOOTSTRAP_KEY_VARIABLE, None)
    try:
        return Settings.model_validate({**options, "bootstrap_key": key or None})
    except ValidationError as error:
        for found in error.errors():
            err().print(f"{'.'.join(map(str, found['loc']))}: {found['msg']}", markup=False)
        raise typer.Exit(Exit.REFUSED) from None


def _announce(settings: Settings, store: Store, first_keys: list[str], *, keep: bool) -> None:
    """Says where the service is and, this once, the key that was made."""
    console = out()
    console.print(f"Planish listens on {settings.base_url}", markup=False)
    for made in first_keys:
        console.print(f"API key, shown this once: {made}", markup=False)
    if not keep:
        return
    data_dir, saved = str(settings.data_dir), read_saved()
    brought = settings.bootstrap_key.get_secret_value() if settings.bootstrap_key else None
    # An earlier start of this service may have left the key that it made.
    earlier = saved.api_key if saved is not None and saved.data_dir == data_dir else None
    key = next((key for key in (*first_keys, brought, earlier) if _accepted(store, key)), None)
    path = save(SavedConnection(url=settings.base_url, api_key=key, data_dir=data_dir))
    what = "address and key" if key else "address"
    console.print(f"The other planish commands find the {what} in {path}", markup=False)


def _accepted(store: Store, key: str | None) -> bool:
    """Whether the service takes a key; one that was revoked is not told on."""
    return key is not None and store.keys.by_hash(hash_secret(key)) is not None


def _listen(host: str, port: int) -> socket.socket:
    """The listening socket, made first: the port must be known to the settings."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        err().print(
            f"cannot listen on {host}:{port}: {error.strerror}; is another service running there? "
            "Give another --port.",
            markup=False,
        )
        raise typer.Exit(Exit.REFUSED) from None
    return listener
