"""Writes what the chart takes from elsewhere: `python scripts/helm_generate.py [--check]`.

- helm/planish/README.md: the table of values, from the comments of values.yaml.
- helm/planish/values.schema.json: the types of clusters, from their own models in `service`.
- helm/planish/files/: the rules of deploy/prometheus and the dashboards of deploy/grafana. Helm
  packs nothing from outside a chart's folder, so they are copied.

With `--check` nothing is written; what is out of date is named, and the exit status is 1.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
CHART = ROOT / "helm" / "planish"
BEGIN, END = "<!-- values: begin -->", "<!-- values: end -->"
COPIES = {
    "rules": ROOT / "deploy" / "prometheus" / "rules",
    "dashboards": ROOT / "deploy" / "grafana" / "dashboards",
}
TYPES_OF_CLUSTERS = ("kuberay", "ray_jobs", "slurm")
# What in a JSON schema is for people only.
_PROSE = frozenset({"title", "description", "default", "examples", "format"})


@dataclass(frozen=True, slots=True)
class Value:
    """One value of the chart: a row of the table."""

    path: str
    default: str
    text: str


def main() -> int:
    """Writes the files, or with `--check` says which are out of date."""
    parser = argparse.ArgumentParser(description="Writes what the chart takes from elsewhere.")
    parser.add_argument("--check", action="store_true", help="write nothing; say what is old")
    check = parser.parse_args().check
    sys.path.insert(0, str(ROOT))
    wanted = generated()
    old = [path for path, text in wanted.items() if _read(path) != text]
    superfluous = [path for path in _copies() if path not in wanted]
    for path in [*old, *superfluous]:
        print(path.relative_to(ROOT))  # noqa: T201
    if check:
        return 1 if old or superfluous else 0
    for path in old:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path], encoding="utf-8")
    for path in superfluous:
        path.unlink()
    return 0


def generated() -> Mapping[Path, str]:
    """Each file that is made, with its text."""
    readme = CHART / "README.md"
    schema = CHART / "values.schema.json"
    values = (CHART / "values.yaml").read_text(encoding="utf-8")
    files = {
        readme: with_table(readme.read_text(encoding="utf-8"), read_values(values)),
        schema: with_clusters(json.loads(schema.read_text(encoding="utf-8"))),
    }
    for name, source in COPIES.items():
        for path in sorted(source.glob("*.yml" if name == "rules" else "*.json")):
            files[CHART / "files" / name / path.name] = path.read_text(encoding="utf-8")
    return files


def read_values(text: str) -> list[Value]:
    """The values of a values.yaml with their comments.

    Raises:
        ValueError: a value has no comment `# -- ...` in the line above it.
    """
    return list(_values_below(yaml.compose(text), text.splitlines(), ""))


def _values_below(node: Any, lines: list[str], prefix: str) -> Iterator[Value]:
    for key, child in node.value:
        path = f"{prefix}{key.value}"
        above = lines[key.start_mark.line - 1].strip() if key.start_mark.line else ""
        if above.startswith("# -- "):
            default = yaml.safe_load(yaml.serialize(child))
            yield Value(path, json.dumps(default, ensure_ascii=False), above[5:])
        elif isinstance(child, yaml.MappingNode) and child.value:
            yield from _values_below(child, lines, f"{path}.")
        else:
            raise ValueError(f"values.yaml: {path} has no comment `# -- ...` above it")


def with_table(readme: str, values: list[Value]) -> str:
    """README.md with the table of values between its two marks."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    rows = [f"| `{v.path}` | `{v.default}` | {v.text.replace('|', '\\|')} |" for v in values]
    table = "\n".join(["| value | default | |", "|---|---|---|", *rows])
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def with_clusters(schema: dict[str, Any]) -> str:
    """The schema of the values, with what the installed types of clusters take."""
    definitions = {
        name: value for name, value in schema["$defs"].items() if not name.startswith("cluster")
    }
    kinds = {entry.name: entry for entry in entry_points(group="planish.launchers")}
    for kind in TYPES_OF_CLUSTERS:
        model = kinds[kind].load()
        made = model.model_json_schema(
            mode="validation", ref_template=f"#/$defs/cluster_{kind}_{{model}}"
        )
        for name, part in made.pop("$defs", {}).items():
            definitions[f"cluster_{kind}_{name}"] = _plain(part)
        # The chart fills in some of what the model asks for.
        definitions[f"cluster_{kind}"] = {**_plain(made), "required": ["type"]}
    definitions["cluster"] = {
        "type": "object",
        "required": ["type"],
        # Drivers on the control plane's own pod would need a worker's image.
        "properties": {"type": {"type": "string", "not": {"const": "local"}}},
        "allOf": [
            {
                "if": {"properties": {"type": {"const": kind}}},
                "then": {"$ref": f"#/$defs/cluster_{kind}"},
            }
            for kind in TYPES_OF_CLUSTERS
        ],
    }
    return json.dumps({**schema, "$defs": definitions}, indent=2) + "\n"


def _plain(part: Any, *, names: bool = False) -> Any:
    """A JSON schema without its prose. `names` says that the keys are names of properties."""
    if isinstance(part, list):
        return [_plain(item) for item in part]
    if not isinstance(part, dict):
        return part
    return {
        key: _plain(value, names=not names and key in {"properties", "$defs"})
        for key, value in part.items()
        if names or key not in _PROSE
    }


def _copies() -> list[Path]:
    return [path for name in COPIES for path in sorted((CHART / "files" / name).glob("*"))]


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
