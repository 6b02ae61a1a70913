"""What the routes work with, and who is calling, as dependencies."""

import asyncio
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated, cast

from anyio import CapacityLimiter
from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from service.api.problems import Refusal
from service.auth.keys import hash_secret, same_hash
from service.catalogue import Catalogue
from service.jobs import ApiKey, Job, JobFolder
from service.reconciler import Reconciler
from service.settings import Settings
from service.store import NotFound, Store
from service.validation.submit import Validator

# The time of a key's last use is for people; it need not cost a write each request.
_KEY_USE_SECONDS = 60.0

MAX_CHECKS_AT_ONCE = 16

_bearer = HTTPBearer(auto_error=False, description="An API key, `planish_...`")
_attempt_bearer = HTTPBearer(
    auto_error=False, scheme_name="AttemptToken", description="The attempt's own token"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceContext:
    """Everything that lives from start to end of one app."""

    settings: Settings
    store: Store
    catalogue: Catalogue
    validator: Validator
    reconciler: Reconciler
    started_at: float = field(default_factory=time.monotonic)
    checking: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(MAX_CHECKS_AT_ONCE))
    """Threads that check jobs. An environment may take a minute to answer, and however many ask
    meanwhile, the other requests must find a thread."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the process is asked to end; streams close themselves then."""

    def folder(self, job: Job) -> JobFolder:
        """The job's folder."""
        return JobFolder(self.settings.jobs_dir / job.id)

    def find_job(self, reference: str) -> Job:
        """The job with this id, else the newest with this name.

        Raises:
            Refusal: 404.
        """
        try:
            return self.store.jobs.find(reference)
        except NotFound:
            raise Refusal(
                HTTPStatus.NOT_FOUND,
                f"there is no job with the id or name {reference!r}; GET /v1/jobs lists them",
                kind="not-found",
            ) from None


def _context(request: Request) -> ServiceContext:
    return cast(ServiceContext, request.app.state.service)


Service = Annotated[ServiceContext, Depends(_context)]


def unauthorized(detail: str) -> Refusal:
    """A 401."""
    return Refusal(
        HTTPStatus.UNAUTHORIZED,
        detail,
        kind="unauthorized",
        headers={"www-authenticate": 'Bearer realm="planish"'},
    )


def _caller(
    service: Service, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> ApiKey:
    if credentials is None:
        raise unauthorized("send an API key in the header `Authorization: Bearer planish_...`")
    secret = credentials.credentials
    key = service.store.keys.by_hash(hash_secret(secret))
    if key is None or not same_hash(secret, key.secret_hash):
        raise unauthorized("this API key is unknown or was revoked")
    if key.last_used_at is None or time.time() - key.last_used_at > _KEY_USE_SECONDS:
        service.store.keys.used(key.id)
    return key


Caller = Annotated[ApiKey, Depends(_caller)]


def _attempt_token(
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_attempt_bearer)],
) -> str:
    if credentials is None:
        raise unauthorized("send the attempt's token in the header `Authorization: Bearer ...`")
    return credentials.credentials


AttemptToken = Annotated[str, Depends(_attempt_token)]
