"""The pages of docs/algorithms say what the registry's specs and the algorithms' own code say."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
import torch
import yaml
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo
from transformers import PreTrainedTokenizerFast

from algorithms.batch import Batch, Normalizer, Outputs, PolicyOutputs, ValueOutputs
from algorithms.loop import run
from service.spec import (
    AlgorithmSpec,
    JobContext,
    JobSpec,
    PolicyGradientSpec,
    ResolvedModel,
    algorithm_specs,
)
from service.spec.base import SpecModel
from tests.algorithms.tiny_policy import EventList, tiny_model
from tests.algorithms.tiny_workers import tiny_workers
from tests.megatron_backend.training.algorithm_variants import variants
from tests.megatron_backend.training.made_up_steps import MadeUpModels, prepared, samples

FOLDER = Path(__file__).parents[2] / "docs" / "algorithms"
OTHERS = {"README", "differences", "policy-gradient"}
TYPES = sorted(algorithm_specs())
every = pytest.mark.parametrize("kind", TYPES)


@cache
def _page(name: str) -> str:
    path = FOLDER / f"{name}.md"
    assert path.is_file(), f"docs/algorithms/{name}.md is missing"
    return path.read_text(encoding="utf-8")


def _linked(kind: str) -> list[str]:
    """The page, and those beside it that it links to."""
    names = re.findall(r"\]\(([\w-]+)\.md[)#]", _page(kind))
    return [_page(kind), *(_page(name) for name in dict.fromkeys(names) if name != kind)]


def _field_rows(text: str) -> Iterator[tuple[str, str]]:
    """(field, default) of each row of the tables whose first column is `Field`."""
    in_table = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            in_table = False
        elif cells[0] == "Field":
            in_table = True
        elif in_table and not set(cells[0]) <= set("-: "):
            yield cells[0].strip("`"), cells[1].strip("`")


def _fields(spec: type[SpecModel], before: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Hyperparameters by their path, those of an option's own model too.

    Where an option has several models, a path may come more than once.
    """
    for name, field in spec.model_fields.items():
        if name == "type" and not before:
            continue
        yield before + name, field
        for model in _models_in(field.annotation):
            if model.__module__.startswith("service.spec.algorithm"):
                yield from _fields(model, f"{before}{name}.")


def _models_in(annotation: Any) -> Iterator[type[SpecModel]]:
    if isinstance(annotation, type) and issubclass(annotation, SpecModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _says(field: FieldInfo, shown: str) -> bool:
    """Whether `shown`, as it would stand in a job file, is the field's default."""
    if field.is_required():
        return shown == "needed"
    if shown == "needed":
        return False
    of_field: TypeAdapter[Any] = TypeAdapter(Annotated[field.annotation, *field.metadata, ...])
    try:
        return bool(of_field.validate_python(yaml.safe_load(shown)) == field.default)
    except ValueError:
        return False


def test_each_page_is_of_an_algorithm_and_the_index_has_all() -> None:
    pages = {path.stem for path in FOLDER.glob("*.md")}
    assert pages - OTHERS == set(TYPES)
    assert [name for name in TYPES if f"]({name}.md)" not in _page("README")] == []


@every
def test_each_hyperparameter_has_its_default_on_the_page(kind: str) -> None:
    """Or on a page that it links to, where that says the same."""
    own, *others = [list(_field_rows(text)) for text in _linked(kind)]
    possible: dict[str, list[FieldInfo]] = {}
    for path, field in _fields(algorithm_specs()[kind]):
        possible.setdefault(path, []).append(field)
    wrong = {}
    for path, fields in possible.items():
        shown = [default for name, default in own if name == path]
        shown = shown or [default for rows in others for name, default in rows if name == path]
        if not any(_says(field, default) for field in fields for default in shown):
            wrong[path] = (shown, [field.default for field in fields])
    assert wrong == {}


@every
def test_a_page_names_no_field_that_the_spec_does_not_have(kind: str) -> None:
    known = {path for path, _ in _fields(algorithm_specs()[kind])}
    assert {name for name, _ in _field_rows(_page(kind))} - known == set()


def _outputs(spec: AlgorithmSpec, batch: Batch) -> Outputs:
    if spec.head == "value":
        return _values(batch)
    candidates = batch.candidates.get("candidate_ids")
    return PolicyOutputs(
        log_probs=MadeUpModels().log_probs(batch),
        entropy=torch.ones_like(batch.loss_mask),
        candidate_log_probs=None if candidates is None else -4.0 - torch.rand(candidates.shape),
    )


def _values(batch: Batch) -> ValueOutputs:
    return ValueOutputs(values=MadeUpModels().values(batch), scores=torch.rand(len(batch)))


def _metrics(spec: AlgorithmSpec) -> set[str]:
    """Names that an algorithm's credit and its losses give."""
    algorithm, step = prepared(spec, samples(spec))
    normalizer = Normalizer.of(step.batch)
    of_loss = algorithm.loss(_outputs(spec, step.batch), step.batch, normalizer).sums
    of_critic = {}
    if spec.critic is not None:
        of_critic = algorithm.value_loss(_values(step.batch), step.batch, normalizer).sums
    return {*step.metrics, *of_loss, *of_critic}


@every
def test_each_metric_of_loss_and_credit_is_explained(kind: str) -> None:
    """On the page, or on one that it links to."""
    given = set().union(*(_metrics(spec) for spec in variants(algorithm_specs()[kind]).values()))
    explained = {name for text in _linked(kind) for name in re.findall(r"`(\w+)`", text)}
    assert given
    assert given - explained == set()


@every
def test_the_job_file_on_the_page_is_one(kind: str) -> None:
    files = re.findall(r"```yaml\n(.*?)```", _page(kind), re.S)
    assert files
    for text in files:
        job = JobSpec.model_validate(yaml.safe_load(text))
        assert job.algorithm.type == kind
        assert job.resources.gpus_per_node == 0


ONLINE = [kind for kind in TYPES if issubclass(algorithm_specs()[kind], PolicyGradientSpec)]


@pytest.mark.parametrize("kind", ONLINE)
def test_the_job_file_trains(kind: str, tmp_path: Path, chatml: PreTrainedTokenizerFast) -> None:
    """On a tiny model, with a small batch, for two steps."""
    document = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", _page(kind), re.S)[0])
    document["training"] |= {"steps": 2, "global_batch_size": 16}
    document["rollout"] |= {"max_new_tokens": 4}
    document |= {"evaluation": {}}
    job = JobSpec.model_validate(document)
    context = JobContext(
        job_id="job-1",
        spec=job,
        dp=1,
        model=ResolvedModel(kind="random", config={}, tokenizer="/model"),
        files={},
    )
    workers = tiny_workers(context, tiny_model(len(chatml)), chatml, tmp_path)
    recorder = EventList()
    assert run(context, workers, chatml, recorder) == 2
    assert [m["episodes"] >= 16 for m in recorder.of("metrics")] == [True, True]
