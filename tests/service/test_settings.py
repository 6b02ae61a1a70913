"""What an operator may set, and that it reaches what it is for."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from service.installed import open_launchers
from service.launchers.local import LocalLauncher
from service.settings import Settings


def test_jobs_get_the_data_roots_that_they_were_checked_with(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    settings = Settings(data_dir=tmp_path / "own", data_roots=(tmp_path / "link",))
    assert settings.all_data_roots == (tmp_path / "own" / "data", tmp_path / "real")
    local = open_launchers(settings)["local"]
    assert isinstance(local, LocalLauncher)
    assert local.data_roots == settings.all_data_roots


@pytest.mark.parametrize("field", ["data_dir", "data_roots"])
def test_a_root_cannot_be_split_into_wider_ones(field: str) -> None:
    folder = Path("/a:/b")
    values = {"data_dir": Path("/c")} | {field: folder if field == "data_dir" else (folder,)}
    with pytest.raises(ValidationError, match="must not hold ':'"):
        Settings.model_validate(values)
