"""What an operator says about a Ray cluster that runs by itself."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, PositiveFloat, StringConstraints, field_validator, model_validator

from service.launchers.cluster import RESERVED_PREFIX, RemoteCluster, Site, VariableName
from service.launchers.ray_jobs.client import RayJobsClient

if TYPE_CHECKING:
    from service.launchers.ray_jobs.launcher import RayJobsLauncher

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class RayJobsCluster(RemoteCluster):
    """A Ray cluster, spoken to over the Jobs API of its dashboard."""

    type: Literal["ray_jobs"]
    address: Annotated[str, StringConstraints(pattern=r"^https?://[^\s?#@]+$")]
    """Of its dashboard, as `http://ray-head:8265`."""
    token_variable: VariableName | None = None
    """Environment variable of the service that holds Ray's token (`RAY_AUTH_MODE=token`)."""
    token_file: Path | None = None
    """File that holds Ray's token; it is read for each request, so a new one is taken up."""
    headers: Mapping[str, str] = Field(default_factory=dict)
    """More headers of each request, for a proxy in between. Not for secrets."""
    ca_file: Path | None = None
    """Certificates of the authorities to trust for https; null trusts the usual ones."""
    python: Text = "python3"
    """The worker's interpreter, on the cluster's machines."""
    env: Mapping[VariableName, str] = Field(default_factory=dict)
    """Variables for driver and ranks. Ray shows them to whoever sees its dashboard: a secret
    belongs in the environment that Ray itself is started with."""
    driver_resources: Mapping[Text, PositiveFloat] = Field(default_factory=dict)
    """What each driver takes of Ray's own resources (`ray start --resources`), as `{driver: 1}`.
    It decides where drivers run and how many at once; without it all run on the head."""
    poll_seconds: PositiveFloat = 2.0
    """How often a job's state is asked for."""
    timeout_seconds: PositiveFloat = 20.0
    """Limit for one request. The first submission to a Ray takes some seconds."""

    @field_validator("env")
    @classmethod
    def _not_our_own(cls, env: Mapping[str, str]) -> Mapping[str, str]:
        for name in env:
            if name.startswith(RESERVED_PREFIX):
                raise ValueError(f"{name} is set by the launcher")
        return env

    @model_validator(mode="after")
    def _can_be_used(self) -> Self:
        if self.token_file is not None and self.token_variable is not None:
            raise ValueError("give token_file or token_variable, not both")
        if self.token_variable is not None and not os.environ.get(self.token_variable):
            raise ValueError(
                f"the environment variable {self.token_variable} (token_variable) is not set"
            )
        if self.ca_file is not None and not self.ca_file.is_file():
            raise ValueError(f"ca_file: there is no file {self.ca_file}")
        return self

    def open(self, site: Site) -> "RayJobsLauncher":
        """The launcher."""
        from service.launchers.ray_jobs.launcher import RayJobsLauncher

        client = RayJobsClient(
            self.address,
            token=self._token,
            headers=self.headers,
            ca_file=self.ca_file,
            timeout_seconds=self.timeout_seconds,
        )
        return RayJobsLauncher(self, site, client=client)

    def _token(self) -> str | None:
        """Ray's token as it is now.

        Raises:
            OSError: its file cannot be read.
        """
        if self.token_file is not None:
            return self.token_file.read_text(encoding="ascii").strip()
        return None if self.token_variable is None else os.environ[self.token_variable]
