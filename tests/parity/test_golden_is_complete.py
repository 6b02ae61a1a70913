"""Every algorithm, and every named option of one, is held to somebody else's values."""

import re
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from service.spec import AlgorithmSpec, RolloutCorrection, algorithm_specs
from service.spec.base import SpecModel
from tests.parity import cases, golden_files

ROOT = Path(__file__).parents[2]
PACKAGES = ("liger-kernel", "openrlhf", "trl", "verl")
OWN = {
    name: of
    for name, of in algorithm_specs().items()
    if of.implementation.startswith("algorithms.")
}
"""Those that come with Planish: others may be installed beside them."""
SPECS = [spec for table in cases.WITH_SPECS for specs in table.values() for spec in specs]
CORRECTIONS = [one for ones in cases.CORRECTIONS.values() for one in ones]


def _golden() -> dict[str, golden_files.Golden]:
    return {package: golden_files.read(package) for package in PACKAGES}


def test_each_package_has_its_file() -> None:
    assert tuple(golden_files.packages()) == PACKAGES


@pytest.mark.parametrize("package", PACKAGES)
def test_the_values_were_made_with_the_pinned_packages_on_these_batches(package: str) -> None:
    pins: dict[str, str] = {}
    for name in ("packages.txt", "packages-no-deps.txt"):
        text = (ROOT / "tests" / "parity" / name).read_text()
        assert not re.search(r"https?:|--index|--find", text)
        pins |= dict(re.findall(r"^([a-z-]+)==(\S+)$", text, flags=re.MULTILINE))
    golden = golden_files.read(package)
    assert package in golden["versions"]
    assert golden["versions"] == {name: pins[name] for name in golden["versions"]}
    assert golden["inputs"] == golden_files.DIGESTS


def test_every_case_is_held_to_ours() -> None:
    written = {case for golden in _golden().values() for case in golden["cases"]}
    used = {case for table in cases.WITH_SPECS for case in table}
    used |= {*cases.CORRECTIONS, *cases.OVERLONG, *cases.KL}
    used |= {*cases.CHOSEN_LIKELIHOODS, *cases.ONE_BY_ONE}
    assert used == written


def _cases_of(name: str, tables: Sequence[cases.Cases]) -> set[str]:
    """Those that an algorithm is held to."""
    return {
        case
        for table in tables
        for case, specs in table.items()
        if any(spec.type == name for spec in specs)
    }


@pytest.mark.parametrize("name", sorted(OWN))
def test_every_algorithm_has_its_loss_and_its_advantages_from_a_package(name: str) -> None:
    of_advantages = _cases_of(name, cases.ADVANTAGES)
    assert _cases_of(name, cases.WITH_SPECS) - of_advantages, f"no loss of {name} has a reference"
    spec = next(spec for spec in SPECS if spec.type == name)
    has_advantages = spec.online and spec.learns_from_rewards
    assert bool(of_advantages) == has_advantages


def _options(of: type[SpecModel]) -> Iterator[tuple[str, Any]]:
    """(field, value) of each value that a field has by name."""
    for field, info in of.model_fields.items():
        kinds = [info.annotation, *typing.get_args(info.annotation)]
        for kind in kinds:
            kind = getattr(kind, "__value__", kind)
            if typing.get_origin(kind) is Literal and field != "type":
                yield from ((field, value) for value in typing.get_args(kind))
            if kind is bool:
                yield from ((field, value) for value in (False, True))


@pytest.mark.parametrize("name", sorted(OWN))
def test_every_named_option_of_an_algorithm_is_among_them(name: str) -> None:
    """Options that every policy-gradient algorithm has are its base's, and count for all."""
    seen = {(field, getattr(spec, field)) for spec in SPECS for field in _fields(type(spec))}
    assert [option for option in _options(OWN[name]) if option not in seen] == []


def test_every_named_option_of_a_rollout_correction_is_among_them() -> None:
    seen = {(field, getattr(one, field)) for one in CORRECTIONS for field in ("level", "mode")}
    assert set(_options(RolloutCorrection)) == seen


def _fields(of: type[AlgorithmSpec]) -> list[str]:
    return [field for field, _ in _options(of)]


PAGE = (ROOT / "docs" / "algorithms" / "differences.md").read_text()


@pytest.mark.parametrize("package", PACKAGES)
def test_users_are_told_the_versions(package: str) -> None:
    assert f"{package} {golden_files.read(package)['versions'][package]}".lower() in PAGE.lower()


def test_every_conversion_is_explained_to_users() -> None:
    section = PAGE.split("## Where a reference is converted")[1]
    rows = set(re.findall(r"^\| `([a-z-]+)` \|", section, flags=re.MULTILINE))
    used = {
        row
        for golden in _golden().values()
        for entry in golden["cases"].values()
        for row in entry["of"]["differs"].values()
    }
    assert rows == used
