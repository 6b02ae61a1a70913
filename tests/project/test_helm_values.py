"""The chart's values, their schema, their table and what is made from elsewhere are in step."""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from scripts import helm_generate

CHART = helm_generate.CHART
SCHEMA = yaml.safe_load((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
VALUE_FILES = sorted((CHART / "ci").glob("*-values.yaml"))


def test_what_is_made_from_elsewhere_is_up_to_date() -> None:
    old = [
        str(path.relative_to(helm_generate.ROOT))
        for path, text in helm_generate.generated().items()
        if not path.exists() or path.read_text() != text
    ]
    assert not old, "run .venv/bin/python scripts/helm_generate.py"


def test_check_says_what_is_out_of_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("README.md", "values.yaml", "values.schema.json"):
        (tmp_path / name).write_text((CHART / name).read_text())
    values = tmp_path / "values.yaml"
    values.write_text(values.read_text().replace("replicas: 1\n", "replicas: 3\n"))
    (tmp_path / "files" / "rules").mkdir(parents=True)
    (tmp_path / "files" / "rules" / "gone.yml").write_text("")
    monkeypatch.setattr(helm_generate, "CHART", tmp_path)
    monkeypatch.setattr(helm_generate, "ROOT", tmp_path)
    monkeypatch.setattr(helm_generate, "COPIES", {"rules": tmp_path / "nothing"})
    monkeypatch.setattr(sys, "argv", ["helm_generate.py", "--check"])
    assert helm_generate.main() == 1
    assert capsys.readouterr().out.split() == ["README.md", "files/rules/gone.yml"]
    monkeypatch.setattr(sys, "argv", ["helm_generate.py"])
    assert helm_generate.main() == 0
    monkeypatch.setattr(sys, "argv", ["helm_generate.py", "--check"])
    assert helm_generate.main() == 0
    assert "| `replicas` | `3` |" in (tmp_path / "README.md").read_text()


def test_a_value_without_a_comment_is_refused() -> None:
    text = "# -- Said\na: 1\nb:\n  # -- Said too\n  c: []\n  d: 2\n"
    with pytest.raises(ValueError, match=r"b\.d has no comment"):
        helm_generate.read_values(text)


def test_each_value_is_in_the_schema_and_the_other_way_round() -> None:
    described = dict(_described(SCHEMA))
    documented = {value.path for value in helm_generate.read_values(_text("values.yaml"))}
    assert documented <= described.keys()
    # `global` is Helm's own, and what is below a row of the table needs none.
    leaves = {path for path, part in described.items() if "properties" not in part} - {"global"}
    assert not {path for path in leaves - documented if not _below(path, documented)}


def test_nothing_unknown_is_taken() -> None:
    # A pod's security is written as Kubernetes writes it.
    parts = {"": SCHEMA, **dict(_described(SCHEMA))}
    del parts["podSecurityContext"]
    for path, part in parts.items():
        if "properties" in part:
            assert part.get("additionalProperties") is False, path


@pytest.mark.parametrize("path", VALUE_FILES, ids=lambda path: path.stem)
def test_the_value_files_hold_to_the_schema(path: Path) -> None:
    values = _merged(VALUES, yaml.safe_load(path.read_text()))
    jsonschema.validate(values, SCHEMA, cls=jsonschema.Draft7Validator)


def test_the_chart_installs_this_version() -> None:
    project = tomllib.loads((helm_generate.ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load(_text("Chart.yaml"))
    assert chart["appVersion"] == chart["version"] == project["version"]


def _text(name: str) -> str:
    return (CHART / name).read_text()


def _below(name: str, others: set[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in others)


def _described(schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each path that a schema describes, and how."""
    for name, part in schema["properties"].items():
        yield f"{prefix}{name}", part
        if "properties" in part:
            yield from _described(part, f"{prefix}{name}.")


def _merged(base: Any, over: Any) -> Any:
    """As helm merges values: mappings by key, all else replaced."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return {**base, **{name: _merged(base.get(name), value) for name, value in over.items()}}
