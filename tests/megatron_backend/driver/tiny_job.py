"""Job folders that a driver runs for real: a tiny random model that learns to repeat letters."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from service.spec import JobContext, Outcome, WorkerEvent
from service.spec.attempt import step_name
from tests.waiting import wait_until

TEMPLATE = (
    "{%- for message in messages %}{{- '<|' + message.role + '|>' + message.content + '<|end|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
SPECIAL = ["<|end|>", "<|pad|>", "<|user|>", "<|assistant|>"]
LETTERS = "abcdefghij"
FILE = "file-0123456789abcdef"
ROWS = 24
MARK = "PLANISH_TEST_JOB"


def write_tokenizer(folder: Path) -> int:
    """A tokenizer of ten letters with a chat template, beside a generation config that knows more
    than the model's config; the size of its vocabulary."""
    vocab = {piece: index for index, piece in enumerate([*SPECIAL, "[UNK]", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        unk_token="[UNK]",
        additional_special_tokens=SPECIAL[2:],
        chat_template=TEMPLATE,
    )
    fast.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 1]}')
    return len(vocab)


def write_job(folder: Path, **spec: Any) -> Path:
    """A job's folder with everything that the service would have put there; the folder."""
    folder.mkdir(parents=True)
    vocab_size = write_tokenizer(folder / "tokenizer")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row(index)) + "\n" for index in range(ROWS)))
    config = {
        "model_type": "qwen2",
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "eos_token_id": 0,
        "pad_token_id": 1,
    }
    parallel = spec.get("parallel", {})
    document = {
        "job_id": "job-1",
        "spec": {
            "name": "tiny",
            "model": {"init": {"config": config, "tokenizer": "tokenizer"}},
            "algorithm": {"type": "sft"},
            "data": {"train": FILE},
            "optimizer": {"learning_rate": 1e-2},
            "training": {"epochs": 2, "global_batch_size": 6, "max_length": 16},
            **spec,
        },
        "dp": parallel.get("dp", 1),
        "model": {"kind": "random", "config": config, "tokenizer": str(folder / "tokenizer")},
        "files": {FILE: str(rows)},
    }
    context = JobContext.model_validate_json(json.dumps(document))
    (folder / "context.json").write_text(context.model_dump_json())
    return folder


def row(index: int) -> dict[str, Any]:
    """A question and its answer; every row is another pair of letters."""
    pair = LETTERS[index % 10] + LETTERS[(index // 10 + 3 * index) % 10]
    return {
        "messages": [
            {"role": "user", "content": pair},
            {"role": "assistant", "content": pair + pair},
        ]
    }


def start(
    folder: Path, attempt: int = 1, *, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """The driver, in a session of its own, with its output in the attempt's log."""
    log = folder / "attempts" / str(attempt) / "log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "megatron_backend", str(folder), "--attempt", str(attempt)],
            stdout=output,
            stderr=output,
            # Ray's titles must not be written over the environment, by which `processes` looks.
            env=os.environ
            | {"OMP_NUM_THREADS": "1", MARK: str(folder), "SPT_NOENV": "1"}
            | dict(environment or {}),
            start_new_session=True,
            text=True,
        )


def processes(folder: Path) -> list[psutil.Process]:
    """Everything that came out of a job's drivers and still runs."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            marked = process.environ().get(MARK) == str(folder)
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def rank_processes(folder: Path) -> list[psutil.Process]:
    """The processes of a job's ranks."""
    return [p for p in processes(folder) if "ray::RankActor" in _command_of(p)]


def _command_of(process: psutil.Process) -> str:
    """Empty where it has ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def wait_for(condition: Callable[[], object], seconds: float = 240.0) -> None:
    """Returns once the condition holds. The limit leaves a job time to start on a busy machine."""
    wait_until(condition, seconds=seconds, pause=0.1)


def events(folder: Path, attempt: int = 1, kind: str | None = None) -> list[WorkerEvent]:
    """What the attempt has recorded so far."""
    path = folder / "attempts" / str(attempt) / "events.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    found = [WorkerEvent.model_validate_json(line) for line in lines]
    return [event for event in found if kind in (None, event.kind)]


def outcome(folder: Path, attempt: int = 1) -> Outcome:
    """What the driver said last."""
    text = (folder / "attempts" / str(attempt) / "outcome.json").read_text()
    return Outcome.model_validate_json(text)


def checkpoint_files(folder: Path, step: int) -> dict[str, bytes]:
    """A checkpoint's files: weights, moments, random numbers, the loop's place; and not the
    manifest, which has the time."""
    saved = folder / "checkpoints" / step_name(step)
    files = {str(path.relative_to(saved)): path for path in saved.rglob("*") if path.is_file()}
    del files["manifest.json"]
    return {name: path.read_bytes() for name, path in files.items()}


def log_text(folder: Path, attempt: int = 1) -> str:
    """The driver's and the ranks' output."""
    return (folder / "attempts" / str(attempt) / "log").read_text()


def start_from_checkpoint(folder: Path, checkpoint: Path) -> None:
    """Lets a job start from another one's checkpoint, as the service resolves `model.from`."""
    path = folder / "context.json"
    document = json.loads(path.read_text())
    document["model"] |= {
        "kind": "checkpoint",
        "weights": str(checkpoint),
        "tokenizer": str(checkpoint / "hf"),
    }
    path.write_text(json.dumps(document))


def run_command(arguments: list[str], *, cwd: Path) -> tuple[int, str]:
    """`python -m megatron_backend` with these arguments: exit code and output."""
    run = subprocess.run(
        [sys.executable, "-m", "megatron_backend", *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return run.returncode, run.stdout
