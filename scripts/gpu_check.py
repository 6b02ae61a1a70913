"""What a GPU shows in a few minutes: steps with each FP8 recipe beside bf16, and decoding.

    python scripts/gpu_check.py --out gpu_check.json           on a machine with a GPU
    python scripts/gpu_check.py --out check.json --dry-run     the same path, tiny, without one

Every part is measured by itself and written down at once: a part that fails leaves its error in the
file and the others run on, and parts that the time does not allow for are left out and named.
Nothing is judged here. Without CUDA the recipes are emulated and the engine is the CPU's, so a dry
run says only that the script runs.
"""

import argparse
import gc
import json
import logging
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from algorithms.algorithm import load_algorithm
from algorithms.batch import Batch, Normalizer
from algorithms.protocols import Sampling
from megatron_backend.models.tensors import RandomTensors
from megatron_backend.runtime import distributed
from service.spec import Fp8Spec, OptimizerSpec, SftSpec
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from service.validation.precision import LEAST_CAPABILITY, has_kernels

logger = logging.getLogger("gpu_check")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is done; all sides of matrices are multiples of 128, as blockwise FP8 wants."""

    model: dict[str, Any]
    rows: int
    length: int
    warm_up: int
    steps: int
    prompts: int
    new_tokens: int


_FAMILY = {
    "model_type": "llama",
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
FULL = Sizes(
    model=_FAMILY
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 32768,
    },
    rows=16,
    length=2048,
    warm_up=3,
    steps=10,
    prompts=128,
    new_tokens=256,
)
TINY = Sizes(
    model=_FAMILY
    | {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
    },
    rows=3,
    length=24,
    warm_up=1,
    steps=2,
    prompts=3,
    new_tokens=5,
)


@dataclass(slots=True)
class Report:
    """The file, written anew after every part."""

    path: Path
    deadline: float
    content: dict[str, Any] = field(default_factory=dict)

    def part(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Measures a part, or writes down why not."""
        if time.monotonic() > self.deadline:
            self.content[name] = {"left_out": "no time was left"}
        else:
            start = time.monotonic()
            try:
                self.content[name] = measure()
            except Exception as error:
                logger.exception("%s failed", name)
                self.content[name] = {"error": f"{type(error).__name__}: {error}"}
            self.content[name]["seconds"] = round(time.monotonic() - start, 2)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        self.write()

    def write(self) -> None:
        """The file as it stands."""
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, with or without a GPU")
    parser.add_argument("--seconds", type=float, default=420, help="no part begins after so many")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    if not torch.cuda.is_available() and not options.dry_run:
        parser.error("there is no GPU here; --dry-run runs the same path on the CPU")
    sizes = TINY if options.dry_run else FULL
    report = Report(options.out, time.monotonic() + options.seconds)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    distributed.initialize(Layout(), 0, address="127.0.0.1", port=port, seed=1)
    try:
        report.content["machine"] = machine(options.dry_run)
        report.write()
        for recipe in (None, *supported_recipes()):
            report.part(f"train {recipe or 'bf16'}", lambda recipe=recipe: train(sizes, recipe))
        report.part("decode", lambda: decode(sizes))
        report.content["ratios"] = ratios(report.content)
        report.write()
    finally:
        distributed.shutdown()


def machine(dry_run: bool) -> dict[str, Any]:
    """What it ran on."""
    cuda = torch.cuda.is_available()
    found: dict[str, Any] = {
        "dry_run": dry_run,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "megatron_core": version("megatron-core"),
    }
    if cuda:
        found["capability"] = list(torch.cuda.get_device_capability())
        found["transformer_engine"] = version("transformer-engine")
    return found


def supported_recipes() -> list[str]:
    """The recipes that this card has kernels for; all of them where they are emulated."""
    if not torch.cuda.is_available():
        return list(LEAST_CAPABILITY)
    capability = torch.cuda.get_device_capability()
    return [name for name in LEAST_CAPABILITY if has_kernels(name, capability)]


def train(sizes: Sizes, recipe: str | None) -> dict[str, Any]:
    """Steps of SFT on random tokens in bf16, with or without FP8."""
    fp8 = None if recipe is None else Fp8Spec.model_validate({"recipe": recipe})
    trainer, _ = trainer_of(sizes, fp8)
    batch = random_batch(sizes)
    normalizer = Normalizer.of(batch)
    losses, seconds = [], []
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    for _ in range(sizes.warm_up + sizes.steps):
        start = time.perf_counter()
        # The loss is read back inside the step, so its end is the GPU's end too.
        losses.append(trainer.train_step(batch, normalizer, learning_rate=1e-4).loss)
        seconds.append(time.perf_counter() - start)
    step = statistics.median(seconds[sizes.warm_up :])
    return {
        "losses": losses,
        "step_seconds": seconds,
        "median_step_seconds": step,
        "tokens_per_second": int(batch.lengths.sum()) / step,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def decode(sizes: Sizes) -> dict[str, Any]:
    """Greedy decoding after a weight sync, and how far its log-probs are from the trainer's."""
    from megatron_backend.generation.rank import GenerationRank

    trainer, config = trainer_of(sizes, None)
    model = [chunk.module for chunk in trainer.chunks]
    length = sizes.length + sizes.new_tokens
    generator = GenerationRank(
        config,
        Layout(),
        padded_vocab=model[0].vocab_size,
        stop_token_ids=[],
        max_length=length,
        dtype=torch.bfloat16,
    )
    syncs = []
    for number in (1, 2):
        start = time.perf_counter()
        generator.sync(model, number)
        syncs.append(time.perf_counter() - start)
    tokens = random_batch(sizes).tokens[0, : sizes.length // 4].tolist()
    prompts = [tokens[index % 7 :] for index in range(sizes.prompts)]
    sampling = Sampling(temperature=0.0, max_new_tokens=sizes.new_tokens, seed=1)
    generator.generate(prompts[:2], range(2), sampling)
    start = time.perf_counter()
    answers = generator.generate(prompts, range(len(prompts)), sampling)
    seconds = time.perf_counter() - start
    return {
        "generated_tokens_per_second": sum(len(one.token_ids) for one in answers) / seconds,
        "sync_seconds": syncs,
        "largest_log_prob_difference": log_prob_difference(trainer, prompts[0], answers[0]),
    }


def log_prob_difference(trainer: Any, prompt: list[int], answer: Any) -> float:
    """Of one answer, between the engine and the trainer."""
    row = torch.tensor([prompt + answer.token_ids])
    mask = torch.zeros(row.shape)
    mask[0, len(prompt) :] = 1
    batch = Batch(tokens=row, lengths=torch.tensor([row.shape[1]]), loss_mask=mask)
    trained = torch.from_numpy(trainer.log_probs(batch).values[0, len(prompt) :])
    return float((trained - torch.tensor(answer.log_probs)).abs().max())


def trainer_of(sizes: Sizes, fp8: Fp8Spec | None) -> tuple[Any, ModelConfig]:
    """A random model with an optimizer."""
    from megatron_backend.models.build import build_model
    from megatron_backend.models.weights import load_weights
    from megatron_backend.training.step import Trainer

    config = ModelConfig.from_hf(sizes.model)
    chunks = build_model(
        config, Layout(), dtype=torch.bfloat16, fp8=fp8, max_length=sizes.length + sizes.new_tokens
    )
    load_weights(chunks, config, RandomTensors(config, seed=1))
    trainer = Trainer(
        chunks,
        config,
        Layout(),
        loss=load_algorithm(SftSpec()),
        optimizer_spec=OptimizerSpec(),
        dtype=torch.bfloat16,
        fp8=fp8,
    )
    return trainer, config


def random_batch(sizes: Sizes) -> Batch:
    """Rows of full length; the second half of each is trained."""
    generator = torch.Generator().manual_seed(1)
    shape = (sizes.rows, sizes.length)
    mask = torch.zeros(shape)
    mask[:, sizes.length // 2 :] = 1
    return Batch(
        tokens=torch.randint(0, sizes.model["vocab_size"], shape, generator=generator),
        lengths=torch.full((sizes.rows,), sizes.length),
        loss_mask=mask,
    )


def ratios(content: dict[str, Any]) -> dict[str, float]:
    """How many times as fast as bf16 each recipe's median step is."""
    plain = content.get("train bf16", {}).get("median_step_seconds")
    return {
        name.removeprefix("train "): plain / part["median_step_seconds"]
        for name, part in content.items()
        if plain and name.startswith("train ") and "median_step_seconds" in part
    }


if __name__ == "__main__":
    main()
