"""Ray's Jobs API, as far as a launcher needs it, with the faults of its answers.

An id that is taken is answered with 500 and a traceback, as is a head that has just no agent for
jobs, so a 500 says nothing: whoever submits must look whether the job is there. Only 400 says that
the request itself is wrong. All else that is no answer is `LauncherUnavailable`.
"""

import ssl
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx

from service.launchers.protocol import LaunchError, LauncherUnavailable

_MOST_WORDS = 2000
_REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


class RayJobsClient:
    """Asks one Ray cluster; safe to use from several threads."""

    def __init__(
        self,
        address: str,
        *,
        token: Callable[[], str | None] = lambda: None,
        headers: Mapping[str, str] | None = None,
        ca_file: Path | None = None,
        timeout_seconds: float = 20.0,
    ) -> None:
        """Connects to nothing yet.

        Args:
            address: of the dashboard.
            token: Ray's token as it is now; null where Ray wants none.
            headers: more headers of each request.
            ca_file: certificates of the authorities to trust; null trusts the usual ones.
            timeout_seconds: limit for connecting, and for each wait of a request.
        """
        self._address = address.rstrip("/")
        self._token = token
        self._http = httpx.Client(
            base_url=f"{self._address}/api/jobs/",
            headers=dict(headers or {}),
            timeout=timeout_seconds,
            verify=True if ca_file is None else ssl.create_default_context(cafile=str(ca_file)),
            trust_env=False,  # a cluster's head is not reached through the way out to the world
        )

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def job(self, submission_id: str) -> Mapping[str, Any] | None:
        """What Ray says of a job; null where it knows none of this id.

        Raises:
            LauncherUnavailable: no answer.
        """
        answer = self._ask("GET", submission_id)
        if _is_unknown(answer, submission_id):
            return None
        found = self._document(answer)
        if not isinstance(found, dict) or not isinstance(found.get("status"), str):
            raise LauncherUnavailable(
                f"{self._address} is no Ray dashboard: it answers without "
                f"a job's status: {answer.text[:_MOST_WORDS]}"
            )
        return found

    def submit(self, body: Mapping[str, Any]) -> None:
        """Submits a job.

        Raises:
            LaunchError: Ray refuses the request; nothing was started.
            LauncherUnavailable: no answer, or a fault; it may have been started.
        """
        answer = self._ask("POST", "", body)
        if answer.status_code == HTTPStatus.BAD_REQUEST:
            raise LaunchError(f"Ray refuses the job: {_last_line(answer.text)}")
        self._document(answer)

    def stop(self, submission_id: str) -> None:
        """Has Ray ask the job's driver to end; does nothing where it knows none of this id.

        Raises:
            LauncherUnavailable: no answer.
        """
        answer = self._ask("POST", f"{submission_id}/stop")
        if not _is_unknown(answer, submission_id):
            self._document(answer)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        try:
            token = self._token()
        except (OSError, UnicodeDecodeError) as error:
            raise LauncherUnavailable(f"the token of {self._address}: {error}") from error
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        try:
            return self._http.request(method, path, json=body, headers=headers)
        except httpx.HTTPError as error:
            words = str(error) or type(error).__name__
            raise LauncherUnavailable(f"{self._address} does not answer: {words}") from error

    def _document(self, answer: httpx.Response) -> Any:
        if answer.status_code in _REFUSED:
            raise LauncherUnavailable(
                f"{self._address} refuses the service with {answer.status_code}: set token_file or "
                f"token_variable in the clusters file; it says: {_last_line(answer.text)}"
            )
        if not answer.is_success:
            raise LauncherUnavailable(
                f"{self._address} answers with {answer.status_code}: {_last_line(answer.text)}"
            )
        try:
            return answer.json()
        except ValueError as error:
            raise LauncherUnavailable(
                f"{self._address} is no Ray dashboard: it answers without JSON"
            ) from error


def _is_unknown(answer: httpx.Response, submission_id: str) -> bool:
    """Whether it is Ray that knows no such job, and not a proxy that knows no such page."""
    return (
        answer.status_code == HTTPStatus.NOT_FOUND
        and f"{submission_id} does not exist" in answer.text
    )


def _last_line(text: str) -> str:
    """Of a traceback the line that tells what was wrong."""
    lines = text.strip().splitlines()
    return lines[-1][:_MOST_WORDS] if lines else "nothing"
