"""What is installed: algorithms and environments."""

from fastapi import APIRouter

from service.api.context import Caller, Service
from service.api.jobs import catalogue_unavailable
from service.api.problems import not_found
from service.api.resources import AlgorithmResource, EnvironmentResource, Listing
from service.catalogue import CatalogueUnavailable
from service.spec import AlgorithmSpec, algorithm_specs

router = APIRouter(prefix="/v1", tags=["catalogue"])


@router.get("/algorithms")
def list_algorithms(_caller: Caller) -> Listing[AlgorithmResource]:
    """The algorithms that a job can name, with their hyperparameters."""
    rows = [_algorithm(spec) for spec in algorithm_specs().values()]
    return Listing(data=rows, has_more=False, next=None)


@router.get("/algorithms/{name}")
def get_algorithm(name: str, _caller: Caller) -> AlgorithmResource:
    """One algorithm, with its hyperparameters."""
    spec = algorithm_specs().get(name)
    if spec is None:
        raise not_found("algorithm", name, "/v1/algorithms")
    return _algorithm(spec)


def _algorithm(spec: type[AlgorithmSpec]) -> AlgorithmResource:
    name = str(spec.model_fields["type"].default)
    ours = spec.__module__.startswith("service.spec.")
    return AlgorithmResource(
        type=name,
        summary=spec.summary,
        online=spec.online,
        rows=None if spec.online else spec.rows,
        head=spec.head,
        documentation=f"docs/algorithms/{name}.md" if ours else None,
        json_schema=spec.model_json_schema(),
    )


@router.get("/environments")
def list_environments(service: Service, _caller: Caller) -> Listing[EnvironmentResource]:
    """The environments that a job can name, with their settings."""
    try:
        known = service.catalogue.environments()
    except CatalogueUnavailable as error:
        raise catalogue_unavailable(error) from error
    rows = [EnvironmentResource(**info.model_dump()) for info in known.values()]
    return Listing(data=rows, has_more=False, next=None)
