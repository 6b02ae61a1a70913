"""What can be set about one service process."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from service.auth.keys import KEY_PATTERN

BOOTSTRAP_KEY_VARIABLE = "PLANISH_BOOTSTRAP_KEY"
DATA_ROOTS_VARIABLE = "PLANISH_DATA_ROOTS"
"""How environments, in whatever process, learn which folders their files must lie under."""

MIB = 1024 * 1024


class Settings(BaseModel):
    """Settings of the service. Nothing reads the environment but `planish serve`.

    An operator sets the bootstrap key by its variable and the rest by options. The last six fields,
    from `max_body_bytes` on, have none: they are for tests and for programs that embed the service.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, hide_input_in_errors=True
    )

    data_dir: Path
    """Folder for the database, uploads and job folders; workers see it under the same path."""
    database_url: str | None = None
    """SQLAlchemy URL; null keeps a SQLite file in `data_dir`."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    public_url: str | None = None
    """How workers reach the service; null means `host` and `port`."""
    model_roots: tuple[Path, ...] = ()
    """Folders that jobs may read models and tokenizers from, besides `data_dir`/models."""
    data_roots: tuple[Path, ...] = ()
    """Folders that jobs may read rows and environments their files from, besides
    `data_dir`/data."""
    bootstrap_key: SecretStr | None = None
    """An API key to accept from the start; null makes one at the first start."""
    max_upload_bytes: Annotated[int, Field(ge=1)] = 2048 * MIB
    """Largest uploaded file."""
    clusters_file: Path | None = None
    """YAML file that names the clusters; null means this machine alone, as `local`."""
    max_local_jobs: Annotated[int, Field(ge=1)] = 1
    """How many jobs run at once on this machine, where there is no clusters file."""
    catalogue_timeout_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Limit for one call of the environments' own process."""
    traces_endpoint: str | None = None
    """Base URL of an OTLP/HTTP receiver of traces; null makes none."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 1 * MIB
    """Largest request body, other than an upload or a batch of events."""
    max_event_batch_bytes: Annotated[int, Field(ge=1024)] = 32 * MIB
    """Largest body of a worker's batch of events."""
    max_line_bytes: Annotated[int, Field(ge=1)] = 8 * MIB
    """Longest line of an uploaded JSONL file."""
    reconcile_seconds: Annotated[float, Field(gt=0)] = 0.5
    """Pause between two rounds of the reconciler."""
    reconcile_stall_seconds: Annotated[float, Field(gt=0)] = 30.0
    """After so long without a finished round of the reconciler, the service is not ready."""
    stream_poll_seconds: Annotated[float, Field(gt=0)] = 0.25
    """Pause between two looks for news in an event or log stream."""

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        # Workers get paths below it, and have another working directory.
        return path.absolute()

    @field_validator("data_dir", "data_roots")
    @classmethod
    def _no_separator(cls, value: Path | tuple[Path, ...]) -> Path | tuple[Path, ...]:
        # Roots pass through a variable, as one list: half of a name could be a wider root.
        for path in (value,) if isinstance(value, Path) else value:
            if os.pathsep in str(path):
                raise ValueError(f"the name of a folder must not hold {os.pathsep!r}: {path}")
        return value

    @field_validator("traces_endpoint")
    @classmethod
    def _plain_url(cls, endpoint: str | None) -> str | None:
        # It can be seen in the list of processes, and is handed on to each job's folder.
        url = None if endpoint is None else urlsplit(endpoint)
        if url is not None and (
            url.scheme not in ("http", "https")
            or not url.hostname
            or url.username is not None
            or url.query
            or url.fragment
        ):
            raise ValueError("must be http(s)://HOST:PORT of an OTLP/HTTP receiver, with no key")
        return endpoint

    @field_validator("bootstrap_key")
    @classmethod
    def _well_formed(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and not KEY_PATTERN.fullmatch(key.get_secret_value()):
            raise ValueError(
                f"{BOOTSTRAP_KEY_VARIABLE} must be `planish_` and at least 20 letters, digits, "
                "- or _; leave it unset and the service makes one"
            )
        return key

    @property
    def jobs_dir(self) -> Path:
        """One folder per job (see `service.spec.attempt`)."""
        return self.data_dir / "jobs"

    @property
    def files_dir(self) -> Path:
        """Uploaded files, under ids that the service makes."""
        return self.data_dir / "files"

    @property
    def store_url(self) -> str:
        """SQLAlchemy URL of the database."""
        return self.database_url or f"sqlite:///{self.data_dir / 'planish.db'}"

    @property
    def base_url(self) -> str:
        """How workers reach the service."""
        if self.public_url is not None:
            return self.public_url.rstrip("/")
        everywhere = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
        host = everywhere.get(self.host, f"[{self.host}]" if ":" in self.host else self.host)
        return f"http://{host}:{self.port}"

    @property
    def all_model_roots(self) -> tuple[Path, ...]:
        """Every folder that a job may name a model in, symlinks resolved."""
        return tuple(root.resolve() for root in (self.data_dir / "models", *self.model_roots))

    @property
    def all_data_roots(self) -> tuple[Path, ...]:
        """Every folder that an environment may read files from, symlinks resolved."""
        return tuple(root.resolve() for root in (self.data_dir / "data", *self.data_roots))


def joined_roots(roots: Sequence[Path]) -> str:
    """Roots as the value of `DATA_ROOTS_VARIABLE`."""
    return os.pathsep.join(map(str, roots))
