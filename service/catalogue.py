"""The environments that are installed, asked for in a process of their own.

The service must not import them: they bring libraries of any weight and quality. So it runs
`python -m environments describe` once, and `python -m environments check` for each reference that
it has not accepted yet; what is installed does not change while the service runs. Neither a failed
call nor a refusal is kept: a file that was missing may be there when the next request comes.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from service.settings import DATA_ROOTS_VARIABLE, joined_roots

MAX_CHECKS_KEPT = 1024
# Each call imports libraries for seconds of CPU.
MAX_CALLS_AT_ONCE = 2
MAX_STDERR_SHOWN = 2000


class EnvironmentInfo(BaseModel):
    """One environment of the registry."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    id: str
    """Name, as in `environment.id` of a job."""
    version: int
    """Newest version."""
    summary: str
    """One line about it."""
    config_schema: dict[str, Any]
    """JSON schema of `environment.config`."""
    max_turns: int
    """Assistant turns after which an episode is cut, unless a job sets less."""
    reward_range: tuple[float, float]
    """Least and largest reward of an episode."""
    tools: list[dict[str, Any]]
    """What the policy may call, in OpenAI's function format."""


class CatalogueUnavailable(Exception):
    """The environments' process failed; nothing is known about them."""


class ConfigFault(BaseModel):
    """One fault that an environment found in its settings."""

    loc: list[str | int]
    message: str


class _Answer(BaseModel):
    version: int | None = None
    errors: list[ConfigFault] = []


class Catalogue:
    """What is known about environments; may be used from any thread."""

    def __init__(self, *, timeout_seconds: float, data_roots: Sequence[Path] = ()) -> None:
        """Asks nobody yet.

        Args:
            timeout_seconds: limit of one call.
            data_roots: folders that environments may read files from.
        """
        self._timeout_seconds = timeout_seconds
        self._data_roots = tuple(data_roots)
        self._lock = threading.Lock()
        self._environments: Mapping[str, EnvironmentInfo] | None = None
        self.failure: str | None = None
        """Why the list could not be had, the last time that it was asked for."""
        self._checks: OrderedDict[str, int] = OrderedDict()  # a reference's version
        self._slots = threading.BoundedSemaphore(MAX_CALLS_AT_ONCE)
        self._running: set[subprocess.Popen[str]] = set()
        self.closed = False
        """Whether `close` was called."""

    @property
    def loaded(self) -> bool:
        """Whether the list is here."""
        return self._environments is not None

    def environments(self) -> Mapping[str, EnvironmentInfo]:
        """Every installed environment, by id.

        Raises:
            CatalogueUnavailable: the list cannot be had.
        """
        with self._lock:  # one process, however many requests wait for it
            if self._environments is None:
                try:
                    self._environments = self._describe()
                except CatalogueUnavailable as error:
                    self.failure = str(error)
                    raise
            return self._environments

    def _describe(self) -> Mapping[str, EnvironmentInfo]:
        output, _ = self._call("describe", None)
        try:
            found = TypeAdapter(list[EnvironmentInfo]).validate_json(output)
        except ValidationError as error:
            raise CatalogueUnavailable(
                f"`python -m environments describe` wrote no usable list: {error}"
            ) from error
        return {info.id: info for info in found}

    def check(
        self, *, id: str, version: int | None, max_turns: int | None, config: Mapping[str, Any]
    ) -> tuple[int | None, list[ConfigFault]]:
        """Checks a reference with the environment's own code.

        Returns:
            The version that it means, or None and what is wrong.

        Raises:
            CatalogueUnavailable: the environments' process failed.
        """
        reference = {"id": id, "version": version, "max_turns": max_turns, "config": config}
        request = json.dumps(reference, sort_keys=True)
        key = hashlib.sha256(request.encode()).hexdigest()  # a config may be large
        with self._lock:
            known = self._checks.get(key)
            if known is not None:
                self._checks.move_to_end(key)
                return known, []
        answer = self._ask(request)
        if answer.version is not None:
            with self._lock:
                self._checks[key] = answer.version
                if len(self._checks) > MAX_CHECKS_KEPT:
                    self._checks.popitem(last=False)
        return answer.version, answer.errors

    def _ask(self, request: str) -> _Answer:
        output, code = self._call("check", request)
        try:
            answer = _Answer.model_validate_json(output)
        except ValidationError as error:
            raise CatalogueUnavailable(
                f"`python -m environments check` wrote no usable answer: {error}"
            ) from error
        if (code == 0) != (answer.version is not None) or (code == 1) != bool(answer.errors):
            raise CatalogueUnavailable(
                f"`python -m environments check` ended with {code} and wrote {output[:200]!r}"
            )
        return answer

    def close(self) -> None:
        """Ends the calls that are running."""
        self.closed = True
        for process in tuple(self._running):
            process.kill()

    def _call(self, command: str, request: str | None) -> tuple[str, int]:
        with self._slots, self._started(command) as process:
            try:
                output, errors = process.communicate(request or "", timeout=self._timeout_seconds)
            except subprocess.TimeoutExpired as error:
                process.kill()
                raise CatalogueUnavailable(
                    f"`python -m environments {command}` took more than {self._timeout_seconds} s"
                ) from error
            finally:
                self._running.discard(process)
        code = process.returncode
        if code not in ((0, 1) if command == "check" else (0,)):
            raise CatalogueUnavailable(
                f"`python -m environments {command}` ended with {code}: "
                f"{errors[-MAX_STDERR_SHOWN:].strip()}"
            )
        return output, code

    def _started(self, command: str) -> subprocess.Popen[str]:
        """The command's process, which `close` ends."""
        try:
            process = _spawn(command, self._data_roots)
        except OSError as error:  # no more processes, memory or files for this one
            raise CatalogueUnavailable(
                f"`python -m environments {command}` cannot be started: {error}"
            ) from error
        self._running.add(process)
        if self.closed:  # perhaps before `close` could see it
            process.kill()
        return process


def _spawn(command: str, data_roots: Sequence[Path]) -> subprocess.Popen[str]:
    # Whatever else the service was told in variables is not for the libraries of environments.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PLANISH_")}
    return subprocess.Popen(
        [sys.executable, "-m", "environments", command],
        env=kept | {DATA_ROOTS_VARIABLE: joined_roots(data_roots)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",  # what libraries of environments write to stderr is theirs
    )
