"""The calls of the API, typed."""

import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter

from service.api.plan_resources import Plan
from service.api.resources import (
    AlgorithmResource,
    CheckpointResource,
    EnvironmentResource,
    EventResource,
    FileResource,
    JobResource,
    JobSummary,
    Listing,
    LogChunk,
    MetricsRow,
)
from service.client.archive import unpack
from service.client.transport import Transport
from service.client.uploads import Reading
from service.spec import JobSpec

Progress = Callable[[int, int], None]
"""Takes bytes done and bytes in all; 0 in all where that is unknown."""


class Client:
    """Calls one service with one API key. Use it from one thread."""

    def __init__(
        self,
        base_url: str,
        api_key: str,
        *,
        timeout_seconds: float = 60.0,
        patience_seconds: float = 120.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Connects at the first call.

        Args:
            base_url: as `http://127.0.0.1:8000`.
            api_key: `planish_...`.
            timeout_seconds: limit for each read of an answer.
            patience_seconds: how long calls that can be repeated wait for a service that is away.
            transport: how to reach it, where not over the network.
        """
        self._transport = Transport(
            base_url,
            api_key,
            timeout_seconds=timeout_seconds,
            patience_seconds=patience_seconds,
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._transport.close()

    def submit(
        self, spec: JobSpec | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> JobResource:
        """Submits a job, once: a try that is repeated after a lost answer finds the first.

        Raises:
            ApiError: with `errors` for each field that is wrong.
        """
        key = idempotency_key or uuid.uuid4().hex
        found = self._transport.retried(
            "POST", "/v1/jobs", json=_document(spec), headers={"idempotency-key": key}
        )
        return JobResource.model_validate(found)

    def plan(
        self,
        spec: JobSpec | Mapping[str, Any],
        *,
        gpu_memory_gib: float | None = None,
        gpus_per_node: int | None = None,
        nodes: int | None = None,
    ) -> Plan:
        """What a job would become; takes nothing.

        Args:
            spec: the job.
            gpu_memory_gib: memory of one GPU; layouts that fit into it are proposed.
            gpus_per_node, nodes: machines to propose for; null takes the job's own.
        """
        asked = {"gpu_memory_gib": gpu_memory_gib, "gpus_per_node": gpus_per_node, "nodes": nodes}
        found = self._transport.retried(
            "POST",
            "/v1/jobs:plan",
            json=_document(spec),
            params={name: value for name, value in asked.items() if value is not None},
        )
        return Plan.model_validate(found, strict=False)

    def job(self, job: str) -> JobResource:
        """A job, by id or, the newest, by name."""
        return JobResource.model_validate(self._transport.retried("GET", f"/v1/jobs/{_part(job)}"))

    def jobs(self, *, limit: int | None = None, **filters: Any) -> Iterator[JobSummary]:
        """Jobs, newest first, page by page. `filters`: `name`, `state`."""
        return self._pages("/v1/jobs", JobSummary, limit, filters)

    def cancel(self, job: str) -> JobResource:
        """Asks for a job's end."""
        found = self._transport.retried("POST", f"/v1/jobs/{_part(job)}/cancel")
        return JobResource.model_validate(found)

    def events(self, job: str, *, after: int = 0) -> Iterator[EventResource]:
        """A job's events as they come, each once, until it has ended; reconnects by itself."""
        last = str(after) if after else None
        for message in self._transport.stream(
            f"/v1/jobs/{_part(job)}/events", params={}, last_id=last
        ):
            if message.event != "end":
                yield EventResource.model_validate(message.data)

    def wait(
        self, job: str, *, on_event: Callable[[EventResource], None] | None = None
    ) -> JobResource:
        """Waits until a job has ended, well or not, and returns it."""
        for event in self.events(job):
            if on_event is not None:
                on_event(event)
        return self.job(job)

    def log(self, job: str, *, attempt: int | None = None, after: int = 0) -> LogChunk:
        """A piece of an attempt's log (the newest attempt's by default)."""
        params = {"after": after} | ({"attempt": attempt} if attempt else {})
        found = self._transport.retried("GET", f"/v1/jobs/{_part(job)}/logs", params=params)
        return LogChunk.model_validate(found)

    def follow_log(self, job: str, *, attempt: int | None = None) -> Iterator[LogChunk]:
        """An attempt's log as it grows; without `attempt` all of them, until the job has ended."""
        params = {"attempt": attempt} if attempt else {}
        for message in self._transport.stream(
            f"/v1/jobs/{_part(job)}/logs", params=params, last_id=None
        ):
            if message.event != "end":
                yield LogChunk.model_validate(message.data)

    def metrics(self, job: str) -> list[MetricsRow]:
        """The metrics of every step so far."""
        rows: list[MetricsRow] = []
        while True:
            params = {"after_step": rows[-1].step if rows else -1, "limit": 10_000}
            found = self._transport.retried("GET", f"/v1/jobs/{_part(job)}/metrics", params=params)
            page = Listing[MetricsRow].model_validate(found)
            rows += page.data
            if not page.has_more:
                return rows

    def checkpoints(self, job: str) -> list[CheckpointResource]:
        """The checkpoints that can be loaded, oldest first."""
        found = self._transport.retried("GET", f"/v1/jobs/{_part(job)}/checkpoints")
        return Listing[CheckpointResource].model_validate(found).data

    def upload(
        self,
        path: Path,
        *,
        purpose: str = "fine-tune",
        name: str | None = None,
        on_progress: Progress | None = None,
    ) -> FileResource:
        """Uploads a file.

        Raises:
            ApiError: with `errors` for the first 20 lines that are wrong.
        """
        with path.open("rb") as file:
            reading = Reading(file, path.stat().st_size, on_progress)
            found = self._transport.request(
                "POST",
                "/v1/files",
                data={"purpose": purpose},
                files={"file": (name or path.name, reading)},
            )
        return FileResource.model_validate(found)

    def files(self, *, limit: int | None = None) -> Iterator[FileResource]:
        """Uploaded files, newest first."""
        return self._pages("/v1/files", FileResource, limit, {})

    def algorithms(self) -> list[AlgorithmResource]:
        """The installed algorithms."""
        found = self._transport.retried("GET", "/v1/algorithms")
        return Listing[AlgorithmResource].model_validate(found).data

    def algorithm(self, name: str) -> AlgorithmResource:
        """One algorithm, by its `type`.

        Raises:
            ApiError: it is not installed.
        """
        found = self._transport.retried("GET", f"/v1/algorithms/{_part(name)}")
        return AlgorithmResource.model_validate(found)

    def environments(self) -> list[EnvironmentResource]:
        """The installed environments."""
        found = self._transport.retried("GET", "/v1/environments")
        return Listing[EnvironmentResource].model_validate(found).data

    def download_export(
        self, job: str, to: Path, *, on_progress: Progress | None = None
    ) -> list[Path]:
        """Writes the newest export of a job into the folder `to`, whole or not at all.

        Returns:
            The files.

        Raises:
            ApiError: there is no export.
            FileExistsError: `to` is there and not empty.
        """
        written: list[Path] = []
        self._transport.download(
            f"/v1/jobs/{_part(job)}/export",
            lambda size, body: written.extend(unpack(body, size, to, on_progress)),
        )
        return written

    def _pages[Row](
        self, path: str, kind: type[Row], limit: int | None, filters: Mapping[str, Any]
    ) -> Iterator[Row]:
        adapter = TypeAdapter(Listing[kind])  # type: ignore[valid-type]
        left, after = limit, None
        while left is None or left > 0:
            params = dict(filters) | {"limit": min(left or 100, 100)}
            if after is not None:
                params["after"] = after
            page = adapter.validate_python(self._transport.retried("GET", path, params=params))
            yield from page.data
            left = None if left is None else left - len(page.data)
            after = page.next
            if not page.has_more:
                return


def _document(spec: JobSpec | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(spec, JobSpec):
        return spec.model_dump(mode="json", exclude_unset=True)
    return spec


def _part(reference: str) -> str:
    """A job's id or name as one part of a path, whatever a user typed."""
    return quote(reference, safe="")
