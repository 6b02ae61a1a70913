"""What the reference said is asked for once, and never taken from a torn or foreign file."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from algorithms.algorithm import load_algorithm
from algorithms.batch import Batch
from algorithms.data.collation import collate
from algorithms.data.dataset import Dataset
from algorithms.data.examples import Example, Pair
from algorithms.loop import open_loop
from algorithms.protocols import Workers
from algorithms.reference_cache import ReferenceCache, reference_key
from service.spec import JobContext, JobSpec, ResolvedModel
from tests.algorithms.tiny_policy import EventList, FolderCheckpoints, TinyPolicy, tiny_model

FILE_ID = "file-0123456789abcdef"


def _example(prompt: int, answer: int) -> Example:
    tokens = torch.arange(prompt + answer, dtype=torch.int32)
    trained = torch.tensor([0] * prompt + [1] * answer, dtype=torch.uint8)
    return Example(tokens=tokens, trained=trained)


PAIRS = [
    Pair(chosen=_example(2, 3), rejected=_example(2, 1)),
    Pair(chosen=_example(1, 2), rejected=_example(1, 6)),
    Pair(chosen=_example(3, 1), rejected=_example(3, 2)),
]
SIZES = [4, 8, 3]


def _batch(*rows: int) -> Batch:
    return collate([PAIRS[row] for row in rows], padding_id=0, max_length=64)


def _cache(
    folder: Path | None, key: str = "k", warnings: list[str] | None = None
) -> ReferenceCache:
    warn = [].append if warnings is None else warnings.append
    return ReferenceCache(key, SIZES, folder=folder, warn=warn)


class _Model:
    """Log-probs that tell which call they come from."""

    def __init__(self) -> None:
        self.calls = 0

    def of(self, batch: Batch) -> Tensor:
        self.calls += 1
        return _said_in_call(self.calls, batch)


def _said_in_call(call: int, batch: Batch) -> Tensor:
    draw = torch.Generator().manual_seed(call)
    return torch.randn(batch.loss_mask.shape, generator=draw) * batch.loss_mask


def test_a_row_is_asked_once_and_comes_back_at_its_place() -> None:
    cache, model = _cache(None), _Model()
    first, second = _batch(0, 1), _batch(2, 0)
    said = cache.log_probs(first, [0, 1], lambda: model.of(first))
    assert torch.equal(said, _said_in_call(1, first))
    again = cache.log_probs(second, [2, 0], lambda: model.of(second))
    width = min(said.shape[1], again.shape[1])
    assert torch.equal(again[2:, :width], said[:2, :width])  # row 0, as it was said before
    assert torch.equal(again[:2], _said_in_call(2, second)[:2])
    turned = _batch(1, 2, 0)
    cache.log_probs(turned, [1, 2, 0], lambda: pytest.fail("all three are known"))
    assert len(cache) == 3


def test_what_fills_a_batch_up_is_not_kept() -> None:
    cache, model = _cache(None), _Model()
    batch = _batch(1, 1)
    batch.loss_mask[2:] = 0.0
    said = cache.log_probs(batch, [1], lambda: model.of(batch))
    assert len(cache) == 1
    assert not said[2:].any()


def test_what_is_no_number_is_asked_for_again(tmp_path: Path) -> None:
    model, batch = _Model(), _batch(0, 1)
    broken = _said_in_call(7, batch)
    broken[2, 1] = torch.nan  # of row 1
    cache = _cache(tmp_path)
    said = cache.log_probs(batch, [0, 1], lambda: broken)
    assert said[2].isnan().sum() == 1
    assert len(cache) == len(_cache(tmp_path)) == 1
    assert cache.log_probs(batch, [0, 1], lambda: model.of(batch)).isfinite().all()
    assert len(cache) == len(_cache(tmp_path)) == 2


def test_the_next_process_finds_it_on_disk(tmp_path: Path) -> None:
    model, batch = _Model(), _batch(0, 1, 2)
    said = _cache(tmp_path / "r").log_probs(batch, [0, 1, 2], lambda: model.of(batch))
    later = _cache(tmp_path / "r")
    assert len(later) == 3
    assert torch.equal(
        later.log_probs(batch, [0, 1, 2], lambda: pytest.fail("it is on disk")), said
    )


def _record_bytes(row: int) -> int:
    return 12 + 4 * SIZES[row] + 16


@pytest.mark.parametrize("lost", [1, 16, 20, _record_bytes(2) - 1])
def test_a_torn_record_is_not_used_and_those_before_it_are(tmp_path: Path, lost: int) -> None:
    model, batch = _Model(), _batch(0, 1, 2)
    _cache(tmp_path).log_probs(batch, [0, 1, 2], lambda: model.of(batch))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-lost])
    later = _cache(tmp_path)
    assert len(later) == 2
    later.log_probs(batch, [0, 1, 2], lambda: model.of(batch))
    assert len(_cache(tmp_path)) == 3  # what was lost stands in the second process's own file


@pytest.mark.parametrize("place", [0, 9, 13, 12 + 4 * SIZES[0] + 3])
def test_a_byte_that_changed_is_not_used(tmp_path: Path, place: int) -> None:
    model, batch = _Model(), _batch(0)
    _cache(tmp_path).log_probs(batch, [0], lambda: model.of(batch))
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(bytes(content))
    assert len(_cache(tmp_path)) == 0


def test_a_file_of_another_key_is_not_used_under_whatever_name(tmp_path: Path) -> None:
    model, batch = _Model(), _batch(0)
    _cache(tmp_path, "a" * 32).log_probs(batch, [0], lambda: model.of(batch))
    (file,) = tmp_path.iterdir()
    assert len(_cache(tmp_path, "b" * 32)) == 0
    file.rename(tmp_path / file.name.replace("a" * 32, "b" * 32))
    assert len(_cache(tmp_path, "b" * 32)) == 0


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    warnings: list[str] = []
    model, batch = _Model(), _batch(0)
    cache = ReferenceCache("k", SIZES, folder=tmp_path / "file" / "r", warn=warnings.append)
    cache.log_probs(batch, [0], lambda: model.of(batch))
    cache.log_probs(batch, [0], lambda: pytest.fail("it is in memory"))
    assert len(warnings) == 1
    assert "not kept on disk" in warnings[0]


def _context(path: Path, algorithm: dict[str, Any], **training: Any) -> JobContext:
    spec = JobSpec.model_validate(
        {
            "name": "pairs",
            "model": {"path": "tiny"},
            "algorithm": algorithm,
            "data": {"train": FILE_ID, "validation": FILE_ID},
            "optimizer": {"learning_rate": 0.01},
            "training": {"steps": 5, "global_batch_size": 4, "max_length": 64, **training},
            "checkpoint": {"every_steps": 2},
        }
    )
    model = ResolvedModel(kind="random", config={}, tokenizer="tiny")
    return JobContext(job_id="job-1", spec=spec, dp=1, model=model, files={FILE_ID: str(path)})


def _file(folder: Path, kind: str) -> Path:
    rows = []
    for index in range(6):
        prompt = {"role": "user", "content": f"What is {index}?"}
        good = {"role": "assistant", "content": f"It is {index}."}
        if kind == "pairs":
            bad = {"role": "assistant", "content": "No."}
            rows.append({"prompt": [prompt], "chosen": [good], "rejected": [bad]})
        else:
            rows.append({"messages": [prompt, good], "label": index % 2 == 0})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _run(
    context: JobContext, tokenizer: PreTrainedTokenizerFast, folder: Path, *, cached: bool
) -> tuple[list[dict[str, Any]], list[str], list[Any]]:
    policy = TinyPolicy(
        tiny_model(len(tokenizer)),
        load_algorithm(context.spec.algorithm),
        stop_id=tokenizer.eos_token_id,
    )
    recorder = EventList()
    (folder / "c").mkdir(parents=True, exist_ok=True)
    workers = Workers(
        train=policy, generator=None, checkpoints=FolderCheckpoints(folder / "c", policy)
    )
    loop = open_loop(context, workers, tokenizer, recorder, folder=folder / "r" if cached else None)
    if not cached:
        loop.references = loop.validation_references = None
    loop.run()
    return recorder.of("metrics"), policy.log, recorder.of("evaluation")


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [("pairs", {"type": "dpo"}), ("labels", {"type": "kto"})],
    ids=["dpo", "kto"],
)
def test_with_and_without_the_cache_a_job_is_the_same(
    tmp_path: Path, chatml: PreTrainedTokenizerFast, kind: str, algorithm: dict[str, Any]
) -> None:
    context = _context(_file(tmp_path, kind), algorithm)
    with_it, asked, measured = _run(context, chatml, tmp_path / "a", cached=True)
    without, asked_anew, measured_anew = _run(context, chatml, tmp_path / "b", cached=False)
    assert [m["loss"] for m in with_it] == pytest.approx([m["loss"] for m in without], abs=1e-6)
    assert [m["loss"] for m in measured] == pytest.approx(
        [m["loss"] for m in measured_anew], abs=1e-6
    )
    assert len(measured) == 2  # the validation file has its reference, too
    calls, calls_anew = asked.count("log_probs reference"), asked_anew.count("log_probs reference")
    # 6 rows in batches of 4: two batches of training and two of validation meet new rows.
    of_mismatched = calls_anew - (5 + 2 * 2)  # KTO asks for its reference point each time
    assert calls == 4 + of_mismatched
    # Another attempt that begins anew asks for none of them again.
    for saved in (tmp_path / "a" / "c").iterdir():
        saved.unlink()
    again, later, _ = _run(context, chatml, tmp_path / "a", cached=True)
    assert later.count("log_probs reference") == of_mismatched
    assert [m["loss"] for m in again] == [m["loss"] for m in with_it]


def test_the_key_is_of_model_data_and_template(tmp_path: Path) -> None:
    context = _context(_file(tmp_path, "pairs"), {"type": "dpo"})
    dataset = Dataset(examples=PAIRS)
    key = reference_key(context, dataset)
    assert reference_key(context, Dataset(examples=[*PAIRS])) == key

    other_rows = Dataset(examples=[PAIRS[1], PAIRS[0], PAIRS[2]])
    mask = dataclasses.replace(PAIRS[0].chosen, trained=torch.zeros(5, dtype=torch.uint8))
    other_mask = Dataset(examples=[dataclasses.replace(PAIRS[0], chosen=mask), *PAIRS[1:]])
    weights = tmp_path / "model"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(b"1")
    stored = ResolvedModel(kind="huggingface", config={}, tokenizer="t", weights=str(weights))
    of_weights = context.model_copy(update={"model": stored})
    keys = [
        key,
        reference_key(context, other_rows),
        reference_key(context, other_mask),
        reference_key(_context(tmp_path / "rows.jsonl", {"type": "dpo"}, seed=2), dataset),
        reference_key(of_weights, dataset),
    ]
    (weights / "model.safetensors").write_bytes(b"12")
    keys.append(reference_key(of_weights, dataset))
    assert len(set(keys)) == len(keys)
