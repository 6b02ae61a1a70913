"""The service as an ASGI app. Importing this does nothing; `create_app` opens nothing.

What costs something (the database and its migrations, launchers, the reconciler's thread) is opened
when the server starts the app, and closed when it ends. Jobs are processes of their own and go on.
"""

import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool

from service.api import attempts, events, exports, files, health, jobs, logs, plans, problems
from service.api import catalogue as catalogue_routes
from service.api.context import ServiceContext
from service.api.middleware import BodyLimit, RequestContext
from service.auth.bootstrap import ensure_first_key
from service.catalogue import Catalogue, CatalogueUnavailable
from service.files.storage import sweep
from service.installed import open_launchers
from service.launchers import Launcher
from service.metrics import ServiceMetrics
from service.reconciler import Reconciler, Timing
from service.reconciler.observer import Observer
from service.settings import Settings
from service.spec import EventBatch, JobSpec
from service.store import Store
from service.tracing import ServiceTracing
from service.validation.submit import Validator

_log = logging.getLogger(__name__)

_WARM_AGAIN_SECONDS = 5.0

ROUTERS = (
    jobs.router,
    plans.router,
    events.router,
    logs.router,
    exports.router,
    attempts.router,
    files.router,
    catalogue_routes.router,
    health.router,
)


def create_app(
    settings: Settings,
    *,
    store: Store | None = None,
    launchers: Mapping[str, Launcher] | None = None,
    catalogue: Catalogue | None = None,
    on_first_key: Callable[[str], None] | None = None,
) -> FastAPI:
    """The service.

    Args:
        settings: what the operator set.
        store: closed when the app ends; null opens that of the settings.
        launchers: by their cluster's name, closed likewise; null opens those of the clusters file.
        catalogue: of environments; null asks those that are installed.
        on_first_key: takes the secret of the first API key, where one is made at the start; it is
            told once and kept only as a hash.
    """
    metrics = ServiceMetrics()
    tracing = ServiceTracing(settings.traces_endpoint)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with _running(
            settings,
            store=store,
            launchers=launchers,
            catalogue=catalogue,
            on_first_key=on_first_key,
            metrics=metrics,
            tracing=tracing,
        ) as service:
            app.state.service = service
            yield

    app = FastAPI(
        title="Planish",
        lifespan=lifespan,
        separate_input_output_schemas=False,
        redirect_slashes=False,
        # FastAPI has spans of its own, with what users send in them, which a variable turns on.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.metrics = metrics
    app.add_middleware(BodyLimit, settings=settings)
    app.add_middleware(RequestContext, metrics=metrics.requests, tracing=tracing)
    _add_routes(app, metrics)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def api_routes() -> list[APIRoute]:
    """The routes of the API, without the framework's own pages."""
    return [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]


def _add_routes(app: FastAPI, metrics: ServiceMetrics) -> None:
    problems.install(app, api_routes())
    for router in ROUTERS:
        app.include_router(router)
    for route in api_routes():
        for method in route.methods or ():
            metrics.requests.declare(route.path, method)


@asynccontextmanager
async def _running(
    settings: Settings,
    *,
    store: Store | None,
    launchers: Mapping[str, Launcher] | None,
    catalogue: Catalogue | None,
    on_first_key: Callable[[str], None] | None,
    metrics: ServiceMetrics,
    tracing: ServiceTracing,
) -> AsyncIterator[ServiceContext]:
    """What costs something, open inside the block; the reconciler works there.

    Each thing's end is settled as it is opened, so a start that fails leaves nothing open.
    """
    async with AsyncExitStack() as ends:

        def at_the_end(close: Callable[[], object]) -> None:
            ends.push_async_callback(run_in_threadpool, close)

        tracing.open()
        at_the_end(tracing.close)
        if store is not None:
            at_the_end(store.close)
        await run_in_threadpool(_make_folders, settings)
        if store is None:
            store = await run_in_threadpool(Store.open, settings.store_url)
            at_the_end(store.close)
        opened = open_launchers(settings) if launchers is None else launchers
        for launcher in opened.values():
            at_the_end(launcher.close)
        known = catalogue or Catalogue(
            timeout_seconds=settings.catalogue_timeout_seconds, data_roots=settings.all_data_roots
        )
        if catalogue is None:
            at_the_end(known.close)
        service = await run_in_threadpool(
            _open,
            settings,
            store=store,
            launchers=opened,
            catalogue=known,
            on_first_key=on_first_key,
            observer=metrics.reconciler,
            tracing=tracing,
        )
        at_the_end(metrics.open(store, opened, lambda: health.reconcile_lag(service)))
        service.reconciler.start()
        at_the_end(service.reconciler.stop)
        ends.callback(service.stopping.set)
        # Listing environments imports their libraries, which takes seconds: nobody waits for it.
        threading.Thread(target=_warm, args=(service, metrics), daemon=True).start()
        yield service


def _make_folders(settings: Settings) -> None:
    # A folder that is made here is for this user alone: it will hold what people train on.
    settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    for folder in (settings.jobs_dir, settings.data_dir / "models", settings.data_dir / "data"):
        folder.mkdir(exist_ok=True)


def _open(
    settings: Settings,
    *,
    store: Store,
    launchers: Mapping[str, Launcher],
    catalogue: Catalogue,
    on_first_key: Callable[[str], None] | None,
    observer: Observer,
    tracing: ServiceTracing,
) -> ServiceContext:
    first = ensure_first_key(store, settings)
    if first is not None and on_first_key is not None:
        on_first_key(first)
    removed = sweep(settings.files_dir, _known_files(store))
    if removed:
        _log.warning("removed %d uploads that a crash had left half-made", len(removed))
    return ServiceContext(
        settings=settings,
        store=store,
        catalogue=catalogue,
        validator=Validator(
            settings=settings, store=store, catalogue=catalogue, launchers=launchers
        ),
        reconciler=Reconciler(
            store,
            launchers,
            settings.jobs_dir,
            settings.base_url,
            timing=Timing(sweep=settings.reconcile_seconds),
            observer=observer,
            tracing=tracing,
        ),
    )


def _known_files(store: Store) -> set[str]:
    known: set[str] = set()
    page = store.files.page(limit=1000)
    while page.items:
        known.update(file.id for file in page.items)
        page = store.files.page(limit=1000, after=page.cursor)
    return known


def _warm(service: ServiceContext, metrics: ServiceMetrics) -> None:
    """Lists the environments, however often it takes: a service that is not ready gets no request
    that would try again."""
    while not service.stopping.is_set():
        try:
            known = service.catalogue.environments()
        except CatalogueUnavailable as error:
            if service.catalogue.closed:
                return
            # Not fatal: offline jobs need no environment. /readyz tells.
            _log.warning("the environments cannot be listed, tried again soon: %s", error)
            time.sleep(_WARM_AGAIN_SECONDS)
        else:
            metrics.declare_environments(known)
            return


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, with the bodies that routes read themselves."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title,
            version=app.version,
            description="Post-training of language models on Megatron-Core.",
            routes=app.routes,
        )
        schemas = document["components"]["schemas"]
        for model in (JobSpec, EventBatch, problems.Problem):
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(schema.pop("$defs", {}))
            schemas[model.__name__] = schema
        # FastAPI describes its own shape of a 422, which `problems` has replaced.
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                operation["responses"]["default"] = problems.OPENAPI_RESPONSE
        app.openapi_schema = document
    return app.openapi_schema
