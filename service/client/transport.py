"""One HTTP connection to the service: headers, timeouts, errors, and trying again."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx

from service.client.errors import ApiError, ClientError, ConnectionLost, api_error
from service.client.streams import Message, read_messages

CONNECT_SECONDS = 10.0
# The server sends something every 15 seconds on a stream that lives.
STREAM_READ_SECONDS = 45.0
FIRST_WAIT_SECONDS = 0.25
LONGEST_WAIT_SECONDS = 5.0


class Transport:
    """Sends requests."""

    def __init__(
        self,
        base_url: str,
        api_key: str,
        *,
        timeout_seconds: float,
        patience_seconds: float,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._patience = patience_seconds
        self._http = httpx.Client(
            base_url=base_url,
            headers={"authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(timeout_seconds, connect=CONNECT_SECONDS),
            transport=transport,
        )

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def request(self, method: str, path: str, **options: Any) -> Any:
        """Sends one request and returns the JSON of its answer.

        Raises:
            ApiError: the service refused it.
            ConnectionLost: no answer.
        """
        try:
            response = self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise self._lost(error) from error
        if not response.is_success:
            raise api_error(response)
        try:
            return response.json()
        except ValueError:
            raise ConnectionLost(
                f"what answers at {self._http.base_url} is no Planish service: it sent "
                f"{response.text[:100]!r}"
            ) from None

    def retried(self, method: str, path: str, **options: Any) -> Any:
        """As `request`, for requests that may be sent twice: tries again while it makes sense."""
        return self._patiently(lambda: self.request(method, path, **options))

    def stream(
        self, path: str, *, params: Mapping[str, Any], last_id: str | None
    ) -> Iterator[Message]:
        """Messages of a stream up to its `end` message, across lost connections.

        Raises:
            ApiError: the service refused it.
            ConnectionLost: the service stayed away for longer than the patience.
        """
        wait, deadline = FIRST_WAIT_SECONDS, time.monotonic() + self._patience
        while True:
            try:
                for message in self._stream_once(path, params=params, last_id=last_id):
                    wait, deadline = FIRST_WAIT_SECONDS, time.monotonic() + self._patience
                    if message.id is not None:
                        last_id = message.id
                    yield message
                    if message.event == "end":
                        return
            except (httpx.TransportError, ApiError) as error:
                lost = self._give_up(error, deadline)
                if lost is not None:
                    raise lost from error
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)

    def download(self, path: str, take: Callable[[int, Iterator[bytes]], None]) -> None:
        """Hands the length and the pieces of a body to `take`.

        Raises:
            ApiError: the service refused it.
            ConnectionLost: no answer, or it ended in the middle.
        """
        try:
            with self._http.stream("GET", path) as response:
                if not response.is_success:
                    response.read()
                    raise api_error(response)
                take(int(response.headers.get("content-length", 0)), response.iter_bytes())
        except httpx.TransportError as error:
            raise self._lost(error) from error

    def _stream_once(
        self, path: str, *, params: Mapping[str, Any], last_id: str | None
    ) -> Iterator[Message]:
        headers = {"accept": "text/event-stream"}
        if last_id is not None:
            headers["last-event-id"] = last_id
        timeout = httpx.Timeout(STREAM_READ_SECONDS, connect=CONNECT_SECONDS)
        with self._http.stream(
            "GET", path, params=params, headers=headers, timeout=timeout
        ) as response:
            if not response.is_success:
                response.read()
                raise api_error(response)
            yield from read_messages(response.iter_bytes())

    def _patiently(self, call: Callable[[], Any]) -> Any:
        wait, deadline = FIRST_WAIT_SECONDS, time.monotonic() + self._patience
        while True:
            try:
                return call()
            except (ConnectionLost, ApiError) as error:
                if self._give_up(error, deadline) is not None:
                    raise
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)

    def _give_up(self, error: Exception, deadline: float) -> ClientError | None:
        """What to raise now; None where another try makes sense."""
        if isinstance(error, ApiError) and not error.temporary:
            return error
        if time.monotonic() < deadline:
            return None
        return error if isinstance(error, ClientError) else self._lost(error)

    def _lost(self, error: Exception) -> ConnectionLost:
        return ConnectionLost(
            f"no answer from {self._http.base_url}: {error or type(error).__name__}"
        )
