"""Writes docs/job-spec.md from the models of `service.spec`; a test fails where it is stale.

.venv/bin/python scripts/job_spec_page.py
"""

import json
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from service.spec import JobSpec, algorithm_specs

PAGE = Path(__file__).parents[1] / "docs" / "job-spec.md"

INTRODUCTION = """\
# The job spec

<!-- Written by scripts/job_spec_page.py from service/spec/; change it there. -->

One document describes a job: it is the body of `POST /v1/jobs` (JSON) and the file of
`planish submit` (YAML). Unknown fields are refused, and everything that can be known to be wrong is
refused at submit, with the field and what would be right. All fields but those marked **needed**
have a default. The service stores the document as sent, and beside it the resolved one
(`resolved_spec` of a job): with all defaults, and with environment versions and checkpoints pinned,
so that it gives the same job again.

The smallest useful jobs:

```yaml
name: first-sft
model: {path: Qwen2.5-0.5B-Instruct}       # a folder under one of the service's model roots
algorithm: {type: sft}
data: {train: file-0123456789abcdef}       # from `planish files upload rows.jsonl`
```

```yaml
name: first-grpo
model: {from: "job:first-sft@latest"}
algorithm: {type: grpo}
environment: {id: reasoning_gym/chain_sum}
training: {steps: 100}
```

## What is checked between fields

- `parallel` goes with the machines, the model and the batch: [planning](planning.md) has every
  rule. On GPUs, tp x cp x pp x dp is nodes x gpus_per_node, less the ranks of a teacher and a
  reward model; `dp: auto` is what is left, and on the CPU the least that uses all machines evenly.
- `rollout.layout.tp` keeps to the same rules for tp where the job samples; it also divides the
  number of ranks, and the vocabulary as training pads it.
- `precision` goes with the GPUs: a job that samples on them needs bf16, a recipe of FP8 needs cards
  and matrices that can do it. On the CPU FP8 is emulated.
- `training.global_batch_size` is a multiple of dp, of dp x micro_batch_size where that is a number,
  of the group size for online algorithms, and of `mini_batches`. Preferences are pairs that stay
  together: it counts pairs, and `training.micro_batch_size` their sequences.
- Other models (`algorithm.value_model`, `algorithm.teacher_model`, `reward.model`) are looked up as
  `model` is, and `resolved_spec` holds what `latest` meant. A critic has the policy's architecture;
  a teacher has its vocabulary; a reward model has a value head, and a policy none.
- `training.max_length` is at most the model's max_position_embeddings, and
  `rollout.max_new_tokens` leaves room in it for the question.
- Models are of one of the [families](models.md) that are supported, with safetensors, a fast
  tokenizer and a chat template, in a folder that lies under a model root once symlinks are
  resolved.
- Files exist and were uploaded with the purpose `fine-tune`; environments exist and take their
  `config`; the cluster is one of the service's launchers
  and has the machines and GPUs.

## Fields
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    seen: dict[type[BaseModel], str] = {}
    parts += _section("", JobSpec, seen)
    for name, spec in algorithm_specs().items():
        parts.append(f"### algorithm: {name}\n\n{spec.summary}.\n")
        parts.append(_table(spec))
    parts_of_algorithms = {
        (f"algorithm.{field}", inner)
        for spec in algorithm_specs().values()
        for field, info in spec.model_fields.items()
        for inner in _models_in(info.annotation)
    }
    for path, model in sorted(parts_of_algorithms, key=lambda part: (part[0], part[1].__name__)):
        parts += _section(path, model, seen)
    return "\n".join(parts)


def _section(path: str, model: type[BaseModel], seen: dict[type[BaseModel], str]) -> Iterator[str]:
    """A model's table, and those of what it holds; one that was shown before is named."""
    title = path or "The document"
    if model in seen:
        yield f"### {title}\n\nAs `{seen[model]}`.\n"
        return
    seen[model] = path
    text = " ".join((model.__doc__ or "").split())
    kind = _kind(model)
    yield f"### {title}{f' (type {kind})' if kind else ''}\n\n{text}\n"
    yield _table(model)
    for name, info in model.model_fields.items():
        alias = info.alias or name
        if alias != "algorithm":
            for inner in _models_in(info.annotation):
                yield from _section(f"{path}.{alias}" if path else alias, inner, seen)


def _kind(model: type[BaseModel]) -> str | None:
    """The `type` that tells a model from others in its place."""
    field = model.model_fields.get("type")
    return field.default if field is not None and isinstance(field.default, str) else None


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            yield candidate


def _table(model: type[BaseModel]) -> str:
    schema = model.model_json_schema()
    needed = set(schema.get("required", ()))
    rows = ["| Field | Type | Default | Meaning |", "|---|---|---|---|"]
    for name, field in schema["properties"].items():
        default = "**needed**" if name in needed else _default(field)
        meaning = " ".join(field.get("description", "").split()).replace("|", "\\|")
        rows.append(f"| `{name}` | {_type(field, schema)} | {default} | {meaning} |")
    return "\n".join(rows) + "\n"


def _default(field: dict[str, Any]) -> str:
    if "additionalProperties" in field:
        return "`{}`"
    if "default" not in field or isinstance(field["default"], dict):
        return "its own defaults"
    if field["default"] is None:
        return "null"
    return f"`{json.dumps(field['default'])}`"


def _type(field: dict[str, Any], schema: dict[str, Any]) -> str:
    if "$ref" in field:
        return "object"
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    for union in ("anyOf", "oneOf", "allOf"):
        if union in field:
            kinds = [
                _type(option, schema) for option in field[union] if option.get("type") != "null"
            ]
            return " or ".join(dict.fromkeys(kinds))
    if field.get("type") == "array":
        return f"list of {_type(field['items'], schema)}"
    return str(field.get("type", "object")) + _bounds(field)


def _bounds(field: dict[str, Any]) -> str:
    signs = {
        "minimum": "≥",
        "exclusiveMinimum": ">",
        "maximum": "≤",
        "exclusiveMaximum": "<",
    }
    found = [f"{sign} {_number(field[name])}" for name, sign in signs.items() if name in field]
    return f" ({', '.join(found)})" if found else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:g}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
