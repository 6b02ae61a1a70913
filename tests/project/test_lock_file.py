"""The lock file pins what pyproject.toml asks for, and names no index."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "requirements.lock").read_text()


def test_it_names_no_index_address() -> None:
    assert not re.search(r"https?://|--index-url|--find-links", LOCK)


def test_every_dependency_is_pinned_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(re.findall(r"^([a-z0-9-]+)==([^ ;\\]+)", LOCK, flags=re.MULTILINE))
    extras = project["optional-dependencies"]
    asked = [*map(Requirement, [*project["dependencies"], *extras["dev"], *extras["s3"]])]
    for requirement in (one for one in asked if one.name != project["name"]):
        assert requirement.specifier.contains(pins[requirement.name.lower()]), requirement
