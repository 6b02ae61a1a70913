"""What tests of several packages share."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A busy machine makes any example slow; that is no fault of what is tested.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first, so that the processes of a run end together.

    Each process takes the next file when it is done with one. The last ones should be small: those
    without a slow test and without ranks, and of them, those with few tests. The order is used with
    `--no-loadscope-reorder`; xdist's own goes by the number of tests alone.
    """
    heavy = {
        item.path
        for item in items
        if "megatron_backend" in item.path.parts
        or any(item.get_closest_marker(name) for name in ("slow", "long"))
    }
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in heavy, -tests[item.path], str(item.path)))


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """Address of an S3 server."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty bucket, and the environment that leads to it."""
    import boto3

    variables = {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret-of-the-storage",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = boto3.resource("s3").Bucket("planish-tests")
    found.create()
    yield found
    found.objects.delete()
    found.delete()
