"""An app's start and end: what was opened is closed, whichever of the two went wrong."""

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from service import app as app_module
from service.app import create_app
from service.catalogue import Catalogue
from service.launchers.local import LocalLauncher
from service.settings import Settings
from service.store import Store


class Closed:
    """Which things were closed, in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        for kind in (Store, LocalLauncher, Catalogue):
            self._watch(monkeypatch, kind)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, kind: type[Any]) -> None:
        close = kind.close

        def noted(self_: Any) -> None:
            self.names.append(kind.__name__)
            close(self_)

        monkeypatch.setattr(kind, "close", noted)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data")


def test_all_is_closed_at_the_end(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = Closed(monkeypatch)
    with TestClient(create_app(settings)) as client:
        assert client.get("/healthz").status_code == 200
        assert closed.names == []
    assert closed.names == ["Catalogue", "LocalLauncher", "Store"]


@pytest.mark.parametrize("brought", [True, False])
def test_a_start_that_fails_leaves_nothing_open(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, brought: bool
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no room")

    store = Store.open(settings.store_url) if brought else None
    closed = Closed(monkeypatch)
    monkeypatch.setattr(app_module, "sweep", fail)
    with (
        pytest.raises(OSError, match="no room"),
        TestClient(create_app(settings, store=store)),
    ):
        pass
    assert closed.names == ["Catalogue", "LocalLauncher", "Store"]
