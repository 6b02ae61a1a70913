"""The registry: versions, near names, what is loaded when, and names that are tricks."""

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from environments import registry
from environments.gsm8k import Gsm8kType
from environments.protocol import EnvironmentType
from environments.registry import (
    Entry,
    Registry,
    RegistryError,
    UnknownEnvironment,
    UnknownVersion,
)

ROOT = Path(__file__).parents[2]


class Versioned(Gsm8kType):
    """math/gsm8k under another id and version."""

    def __init__(self, id: str, version: int) -> None:
        self.id = id
        self.version = version


def entry(id: str, version: int) -> Entry:
    return Entry(id=id, version=version, load=lambda: Versioned(id, version))


def test_the_newest_version_is_the_default() -> None:
    found = Registry([entry("a/b", 2), entry("a/b", 10), entry("a/b", 9)])
    assert found.get("a/b").version == 10
    assert found.get("a/b", 9).version == 9
    assert found.list_environments() == [("a/b", 2), ("a/b", 9), ("a/b", 10)]
    with pytest.raises(UnknownVersion, match="no version 3; it has 2, 9, 10"):
        found.get("a/b", 3)


def test_a_type_is_loaded_when_asked_for_and_once() -> None:
    loads: list[str] = []

    def load() -> EnvironmentType:
        loads.append("a/b")
        return Versioned("a/b", 1)

    found = Registry([Entry(id="a/b", version=1, load=load), entry("c/d", 1)])
    found.list_environments()
    found.get("c/d")
    assert loads == []
    assert found.get("a/b") is found.get("a/b")
    assert loads == ["a/b"]


@pytest.mark.parametrize(
    "entries",
    [
        [entry("a/b", 1), entry("a/b", 1)],
        [entry("a/b", 0)],
        [entry("ab", 1)],
        [entry("../b", 1)],
        [entry("a/b\n", 1)],
        [entry("A/b", 1)],
    ],
)
def test_bad_entries_are_refused(entries: list[Entry]) -> None:
    with pytest.raises(RegistryError):
        Registry(entries)


def test_an_entry_that_loads_as_another_is_refused() -> None:
    found = Registry([Entry(id="a/b", version=1, load=lambda: Versioned("a/b", 2))])
    with pytest.raises(RegistryError, match="loads as a/b version 2"):
        found.get("a/b")


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("math/gsm8", "math/gsm8k"),
        ("tools/calculater", "tools/calculator"),
        ("reasoning_gym/chainsum", "reasoning_gym/chain_sum"),
        ("chain_sum", "reasoning_gym/chain_sum"),
    ],
)
def test_an_unknown_name_is_told_near_ones(asked: str, meant: str) -> None:
    with pytest.raises(UnknownEnvironment, match=meant):
        registry.get(asked)


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "reasoning_gym/../../etc",
        "reasoning_gym/chain_sum/../x",
        "/etc/passwd",
        "reasoning_gym/",
        "",
        "a\0b",
        "x" * 10_000,
        "reasoning_gym/chain_sum\n",
        "reasoning_gym/__init__",
        "reasoning_gym.chain_sum",
        "reasoning_gym/composite",
        "REASONING_GYM/CHAIN_SUM",
    ],
)
def test_tricks_in_names_find_nothing(name: str) -> None:
    with pytest.raises(UnknownEnvironment) as raised:
        registry.get(name)
    assert len(str(raised.value)) < 1000


def test_what_is_installed() -> None:
    ids = {id for id, _ in registry.list_environments()}
    assert {"math/gsm8k", "tools/calculator", "reasoning_gym/chain_sum"} <= ids


def test_reasoning_gym_is_imported_only_where_it_is_needed() -> None:
    program = """
import sys
from environments import registry
from environments.config import parse_config
registry.list_environments()
registry.get("math/gsm8k")
calculator = registry.get("tools/calculator")
parse_config(calculator.config_model, {"questions": {"id": "reasoning_gym/chain_sum"}})
loaded = {"reasoning_gym", "sympy", "numpy", "torch", "ray", "megatron"} & set(sys.modules)
sys.exit(f"imported: {sorted(loaded)}" if loaded else 0)
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


class Broken:
    """An entry point that cannot be used."""

    def __init__(self, error: Exception | None = None) -> None:
        self.name = "theirs"
        self.value = "their.module:environments"
        self._error = error

    def load(self) -> object:
        if self._error:
            raise self._error
        return 3


@pytest.mark.parametrize("error", [ImportError("no torch"), AttributeError("x"), None])
def test_a_broken_entry_point_is_named(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: [Broken(error)])  # noqa: ARG005
    with pytest.raises(RegistryError, match=r"theirs \(their.module:environments\)"):
        registry.installed.__wrapped__()


def test_another_distribution_can_add_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "their_environments.py").write_text(
        "from environments.gsm8k import Gsm8kType\n"
        "from environments.registry import Entry\n"
        "class Theirs(Gsm8kType):\n"
        "    id = 'theirs/problems'\n"
        "    version = 3\n"
        "environments = [Entry(id='theirs/problems', version=3, load=Theirs)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("theirs", "their_environments:environments", registry.GROUP)
    ours = list(registry.entry_points(group=registry.GROUP))
    monkeypatch.setattr(registry, "entry_points", lambda group: [*ours, point])  # noqa: ARG005
    found = registry.installed.__wrapped__()
    assert found.get("theirs/problems").version == 3
    assert found.get("math/gsm8k").version == 1
