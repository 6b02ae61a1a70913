import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quickstart.model import build_config, build_tokenizer
from tests.end_to_end.service_process import ServiceProcess
from tests.ports import free_port

STEPS, ROWS_A_STEP = 120, 10


@pytest.fixture(scope="module")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model, smaller still."""
    root = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(root)
    config = build_config(tokenizer) | {"hidden_size": 32, "intermediate_size": 64}
    (root / "config.json").write_text(json.dumps(config))
    return root


@pytest.fixture
def service(tmp_path: Path, model_root: Path) -> Iterator[ServiceProcess]:
    """A running service; whatever is left of it is ended afterwards."""
    running = ServiceProcess(tmp_path, port=free_port(), model_root=model_root)
    running.start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 short conversations."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    draw = random.Random(1)
    with path.open("w") as file:
        for _ in range(100):
            number = draw.randrange(1000)
            question = {"role": "user", "content": f"State the answer: {number} + 1 ="}
            answer = {"role": "assistant", "content": str(number + 1)}
            file.write(json.dumps({"messages": [question, answer]}) + "\n")
    return path


def sft_job(model_root: Path, file_id: str, *, name: str, **changes: Any) -> dict[str, Any]:
    """A job of twelve epochs of those rows, with a checkpoint every ten steps."""
    config = json.loads((model_root / "config.json").read_text())
    return {
        "name": name,
        "model": {"init": {"config": config, "tokenizer": str(model_root)}},
        "algorithm": {"type": "sft"},
        "data": {"train": file_id},
        "optimizer": {"learning_rate": 1e-3},
        "training": {"steps": STEPS, "global_batch_size": ROWS_A_STEP, "max_length": 64},
        "checkpoint": {"every_steps": 10, "export": False},
        **changes,
    }
