"""The few requests that the launcher makes of the API server, each with a time limit.

Objects are plain JSON. What the server answers is one of four things here: the object, that there
is none, `Refused` (it will never take that), or `LauncherUnavailable` (nothing is known).
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import kubernetes
import urllib3
from kubernetes.client.exceptions import ApiException
from kubernetes.config import ConfigException, load_incluster_config, load_kube_config

from service.launchers.kuberay.manifest import GROUP, PLURAL, VERSION
from service.launchers.protocol import LauncherUnavailable

NOT_FOUND, CONFLICT, GONE, TOO_MANY = 404, 409, 410, 429
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


class Refused(Exception):
    """The API server will not do it, and would not if it were asked again."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Gone(Exception):
    """The server has no history from that version on (410); list again."""


class Api:
    """One namespace of one cluster. Connects at its first request, and not once it is closed."""

    def __init__(
        self,
        namespace: str,
        *,
        kubeconfig: str | None = None,
        context: str | None = None,
        timeout_seconds: float = 10.0,
    ) -> None:
        """Nothing is read yet.

        Args:
            namespace: that all is in.
            kubeconfig: its file; null takes the pod's own account, or what kubectl would take.
            context: of the kubeconfig; null takes the current one.
            timeout_seconds: for each answer.
        """
        self.namespace = namespace
        self._kubeconfig = kubeconfig
        self._context = context
        self._timeout = timeout_seconds
        self._lock = threading.Lock()
        self._closed = False
        self._opened: kubernetes.client.ApiClient | None = None
        self._streams: set[urllib3.HTTPResponse] = set()

    def close(self) -> None:
        """Closes its connections for good; a stream that somebody reads ends."""
        with self._lock:
            self._closed = True
            for stream in self._streams:
                _end(stream)
            if self._opened is not None:
                self._opened.rest_client.pool_manager.clear()
                self._opened = None

    def create_rayjob(self, manifest: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Makes a RayJob; a field that the server does not know is refused.

        Raises:
            Refused: with status 409, there is one of that name.
            LauncherUnavailable: no answer; it may have been made.
        """
        return self._json(
            lambda options: self._custom().create_namespaced_custom_object(
                GROUP,
                VERSION,
                self.namespace,
                PLURAL,
                manifest,
                field_validation="Strict",
                dry_run="All" if dry_run else None,
                **options,
            )
        )

    def get_rayjob(self, name: str) -> dict[str, Any] | None:
        """A RayJob, as it is now; null where there is none."""
        try:
            return self._json(
                lambda options: self._custom().get_namespaced_custom_object(
                    GROUP, VERSION, self.namespace, PLURAL, name, **options
                )
            )
        except Refused as error:
            _raise_unless_absent(error)
            return None

    def delete_rayjob(self, name: str) -> None:
        """Asks for a RayJob's end; it stays, marked, until its pods are gone."""
        try:
            self._json(
                lambda options: self._custom().delete_namespaced_custom_object(
                    GROUP,
                    VERSION,
                    self.namespace,
                    PLURAL,
                    name,
                    propagation_policy="Foreground",
                    **options,
                )
            )
        except Refused as error:
            _raise_unless_absent(error)

    def delete_pod(self, name: str, *, grace_seconds: int) -> None:
        """Asks for a pod's end within `grace_seconds`, which can shorten an earlier wish."""
        try:
            self._json(
                lambda options: self._core().delete_namespaced_pod(
                    name, self.namespace, grace_period_seconds=grace_seconds, **options
                )
            )
        except Refused as error:
            _raise_unless_absent(error)

    def rayjobs(self, selector: str) -> dict[str, Any]:
        """A list of RayJobs, with the version that it is of."""
        return self._json(lambda options: self._list_rayjobs(label_selector=selector, **options))

    def pods(self, selector: str) -> dict[str, Any]:
        """A list of pods, with the version that it is of."""
        return self._json(lambda options: self._list_pods(label_selector=selector, **options))

    def events_of(self, name: str) -> list[dict[str, Any]]:
        """Events about an object, whatever its kind."""
        return list(
            self._json(
                lambda options: self._core().list_namespaced_event(
                    self.namespace, field_selector=f"involvedObject.name={name}", **options
                )
            )["items"]
        )

    def watch(
        self, kind: str, selector: str, version: str, *, seconds: int
    ) -> Iterator[dict[str, Any]]:
        """What happens to `rayjobs` or `pods` after a version, until the server ends the stream.

        Raises:
            Gone: the version is too old.
            LauncherUnavailable: the connection broke.
        """
        lister = {"rayjobs": self._list_rayjobs, "pods": self._list_pods}[kind]
        # The server ends the stream by itself; a silence beyond that is a dead connection.
        options = {"_preload_content": False, "_request_timeout": (self._timeout, seconds + 10.0)}
        with _translated():
            response = lister(
                label_selector=selector,
                resource_version=version,
                watch=True,
                allow_watch_bookmarks=True,
                timeout_seconds=seconds,
                **options,
            )
            try:
                _raise_for(response.status, response.data if response.status >= 300 else b"")
                with self._kept(response):
                    yield from map(_event, _lines(response))
            finally:
                response.close()

    @contextmanager
    def _kept(self, stream: urllib3.HTTPResponse) -> Iterator[None]:
        """Inside the block `close` ends the stream, also where it came first."""
        with self._lock:
            self._streams.add(stream)
            if self._closed:
                _end(stream)
        try:
            yield
        finally:
            with self._lock:
                self._streams.discard(stream)

    def _list_rayjobs(self, **options: Any) -> Any:
        return self._custom().list_namespaced_custom_object(
            GROUP, VERSION, self.namespace, PLURAL, **options
        )

    def _list_pods(self, **options: Any) -> Any:
        return self._core().list_namespaced_pod(self.namespace, **options)

    def _custom(self) -> kubernetes.client.CustomObjectsApi:
        return kubernetes.client.CustomObjectsApi(self._client())

    def _core(self) -> kubernetes.client.CoreV1Api:
        return kubernetes.client.CoreV1Api(self._client())

    def _json(self, request: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        options = {"_preload_content": False, "_request_timeout": (self._timeout, self._timeout)}
        with _translated():
            response = request(options)
            body = response.data
            _raise_for(response.status, body)
            found: dict[str, Any] = json.loads(body)
            return found

    def _client(self) -> kubernetes.client.ApiClient:
        with self._lock:
            if self._closed:
                raise LauncherUnavailable("the connection to Kubernetes is closed")
            if self._opened is None:
                self._opened = self._open()
            return self._opened

    def _open(self) -> kubernetes.client.ApiClient:
        settings = kubernetes.client.Configuration()
        if self._kubeconfig is None and self._context is None and _SERVICE_ACCOUNT.exists():
            load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        else:
            load_kube_config(  # type: ignore[no-untyped-call]
                self._kubeconfig, context=self._context, client_configuration=settings
            )
        settings.retries = False  # the caller asks again
        settings.connection_pool_maxsize = 8
        return kubernetes.client.ApiClient(settings)


@contextmanager
def _translated() -> Iterator[None]:
    """Errors of the client as ours."""
    try:
        yield
    except ApiException as error:
        _raise_for(error.status or 0, error.body or "")
        raise LauncherUnavailable(f"the Kubernetes API server: {error.reason}") from error
    except (urllib3.exceptions.HTTPError, OSError, json.JSONDecodeError) as error:
        raise LauncherUnavailable(f"the Kubernetes API server does not answer: {error}") from error
    except ConfigException as error:
        raise LauncherUnavailable(f"there is no way to reach Kubernetes: {error}") from error


def _raise_for(status: int, body: bytes | str) -> None:
    if 200 <= status < 300:
        return
    message = _message(body)
    if status == GONE:
        raise Gone(message)
    if 400 <= status < 500 and status not in (401, 408, TOO_MANY):
        raise Refused(status, message)
    raise LauncherUnavailable(f"the Kubernetes API server answered {status}: {message}")


def _message(body: bytes | str) -> str:
    """The server's own words, which are in a Status object."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else body
    try:
        return str(json.loads(text)["message"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return text[:500]


def _raise_unless_absent(error: Refused) -> None:
    if error.status != NOT_FOUND:
        raise LauncherUnavailable(f"the Kubernetes API server refuses: {error}") from error


def _end(stream: urllib3.HTTPResponse) -> None:
    """Ends a stream that another thread reads, if the server has not ended it already.

    Whoever reads a stream's last bytes gives its socket back before anybody else can know; what
    `shutdown` then finds is a socket that is closed (OSError) or gone (the others). It may go even
    between urllib3's look and its call, which is then one of None (TypeError, AttributeError).
    """
    with suppress(OSError, RuntimeError, ValueError, TypeError, AttributeError):
        stream.shutdown()


def _lines(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    rest = b""
    for part in response.stream(amt=None, decode_content=True):
        *whole, rest = (rest + part).split(b"\n")
        yield from filter(None, whole)


def _event(line: bytes) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(line)
    if event["type"] == "ERROR":
        status: Mapping[str, Any] = event["object"]
        _raise_for(int(status.get("code", 0)), json.dumps(status))
    return event
