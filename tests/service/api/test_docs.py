"""The pages in docs/ say what the code does."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.app import api_routes
from service.metrics.catalogue import CATALOGUE
from service.spec import Reason
from tests.service.running_service import RunningService

ROOT = Path(__file__).parents[3]
ENDPOINTS = sorted((method, r.path) for r in api_routes() for method in r.methods or ())


def sections() -> dict[str, str]:
    """The text below each `### METHOD /path` of docs/api.md."""
    page = (ROOT / "docs" / "api.md").read_text()
    parts = re.split(r"^### (.+)$", re.split(r"^## Conventions", page, flags=re.M)[1], flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize(("method", "path"), ENDPOINTS)
def test_every_endpoint_is_documented(method: str, path: str) -> None:
    text = sections()[f"{method} {path}"]
    assert "Errors:" in text
    assert "```bash\ncurl" in text


def test_no_endpoint_is_documented_that_is_not_there() -> None:
    assert set(sections()) == {f"{method} {path}" for method, path in ENDPOINTS}


def test_every_parameter_is_documented(service: RunningService) -> None:
    document = service.http.get("/openapi.json").json()
    known = sections()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            text = known[f"{method.upper()} {path}"].lower()
            for parameter in operation.get("parameters", ()):
                if parameter["in"] != "path":
                    assert parameter["name"].lower() in text, (method, path, parameter["name"])


def test_every_metric_is_in_the_catalogue(service: RunningService) -> None:
    """docs/metrics.md is made from it; see tests/project/test_metrics_catalogue.py."""
    exposed = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families(service.http.get("/metrics").text)
    }
    known = {metric.name for metric in CATALOGUE}
    only_where_there_is_a_watch = {"planish_launcher_watch_age_seconds"}
    assert exposed - only_where_there_is_a_watch == known - only_where_there_is_a_watch


def test_every_reason_is_documented() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    for reason in Reason:
        assert reason in page


def test_kinds_of_problems_are_documented() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    for source in (ROOT / "service" / "api").glob("*.py"):
        for kind in re.findall(r'kind="([a-z-]+)"', source.read_text()):
            assert f"`{kind}`" in page, (source.name, kind)


def _page_script() -> ModuleType:
    script = ROOT / "scripts" / "job_spec_page.py"
    spec = importlib.util.spec_from_file_location("job_spec_page", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_job_spec_page_is_current() -> None:
    script = _page_script()
    stale = "run .venv/bin/python scripts/job_spec_page.py"
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), stale


def test_the_openapi_document_has_the_bodies_that_routes_read_themselves(
    service: RunningService,
) -> None:
    document = service.http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', str(document).replace("'", '"')))
    assert references <= schemas.keys()
    assert "HTTPValidationError" not in schemas
    for operations in document["paths"].values():
        for operation in operations.values():
            assert "application/problem+json" in operation["responses"]["default"]["content"]
    assert schemas["JobSpec"]["properties"]["parallel"]["$ref"].endswith("/ParallelSpec")
    assert schemas["EventBatch"]["required"] == ["events"]
