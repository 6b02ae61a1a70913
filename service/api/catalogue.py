"""What is installed: algorithms and environments."""

from fastapi import APIRouter

from service.api.context import Caller, Service
from service.api.jobs import catalogue_unavailable
from service.api.resources import AlgorithmResource, EnvironmentResource, Listing
from service.catalogue import CatalogueUnavailable
from service.spec import algorithm_specs

router = APIRouter(prefix="/v1", tags=["catalogue"])


@router.get("/algorithms")
def list_algorithms(_caller: Caller) -> Listing[AlgorithmResource]:
    """The algorithms that a job can name, with their hyperparameters."""
    rows = [
        AlgorithmResource(
            type=name,
            summary=spec.summary,
            online=spec.online,
            json_schema=spec.model_json_schema(),
        )
        for name, spec in algorithm_specs().items()
    ]
    return Listing(data=rows, has_more=False, next=None)


@router.get("/environments")
def list_environments(service: Service, _caller: Caller) -> Listing[EnvironmentResource]:
    """The environments that a job can name, with their settings."""
    try:
        known = service.catalogue.environments()
    except CatalogueUnavailable as error:
        raise catalogue_unavailable(error) from error
    rows = [EnvironmentResource(**info.model_dump()) for info in known.values()]
    return Listing(data=rows, has_more=False, next=None)
