"""What the ranks do in tests of FP8: train with a recipe, and tell what the layers saw."""

import dataclasses
from math import nan
from pathlib import Path
from typing import Any
from unittest import mock
from zlib import crc32

import torch

from algorithms.batch import Batch, Normalizer
from service.spec import Fp8Spec, SftSpec
from service.spec.layout import Layout
from tests.megatron_backend.training.training_runs import LEARNING_RATE, random_batch


def trainer_with(
    fp8: Fp8Spec | None,
    layout: Layout,
    *,
    name: str = "qwen3",
    dtype: torch.dtype = torch.float32,
    recompute: Any = "none",
    aligned: bool = True,
) -> Any:
    """A trainer whose products are in 8 bits; `aligned` pads as the recipe asks for."""
    from algorithms.algorithm import load_algorithm
    from megatron_backend.models.build import build_model
    from megatron_backend.models.tensors import RandomTensors
    from megatron_backend.models.weights import load_weights
    from megatron_backend.training.step import Trainer
    from service.spec import OptimizerSpec
    from service.spec.model_config import ModelConfig
    from tests.megatron_backend.small_models import CONFIGS

    config = ModelConfig.from_hf(CONFIGS[name])
    model = build_model(config, layout, dtype=dtype, recompute=recompute, fp8=fp8)
    load_weights(model, config, RandomTensors(config, seed=1))
    return Trainer(
        model,
        config,
        layout,
        loss=load_algorithm(SftSpec()),
        optimizer_spec=OptimizerSpec(),
        dtype=dtype,
        fp8=fp8 if aligned else None,
        # Several forward passes a step, so that delayed scales move inside it.
        micro_batch_tokens=32,
    )


def linears(trainer: Any) -> dict[str, Any]:
    """The linear layers of the transformer layers, by name."""
    return {
        name: module
        for chunk in trainer.chunks
        for name, module in chunk.module.decoder.named_modules()
        if ".linear_" in name
    }


def memory(trainer: Any) -> dict[str, torch.Tensor]:
    """Scales and histories of every layer."""
    return {name: module.get_extra_state() for name, module in linears(trainer).items()}


def steps(trainer: Any, batches: list[Batch]) -> list[float]:
    """The loss of a step on each batch."""
    return [
        trainer.train_step(batch, Normalizer.of(batch), learning_rate=LEARNING_RATE).loss
        for batch in batches
    ]


def batches(count: int = 3) -> list[Batch]:
    """Batches of rows of different lengths."""
    return [random_batch(seed=seed, rows=6, length=21) for seed in range(3, 3 + count)]


def train_recipes(_rank: int, layout: Layout, specs: list[Fp8Spec | None], name: str) -> Any:
    """Losses of three steps with each recipe."""
    return [steps(trainer_with(spec, layout, name=name), batches()) for spec in specs]


def train_delayed(_rank: int, layout: Layout, recompute: str) -> tuple[list[float], Any]:
    """Losses with delayed scaling, and what it remembers."""
    trainer = trainer_with(Fp8Spec(recipe="delayed", amax_history=4), layout, recompute=recompute)
    return steps(trainer, batches()), memory(trainer)


def train_padded(_rank: int, aligned: bool) -> tuple[float, Any]:
    """One step's loss with delayed scaling, and what the layers saw, with and without filler."""
    spec = Fp8Spec(recipe="delayed", amax_history=4)
    trainer = trainer_with(spec, Layout(), aligned=aligned)
    batch = random_batch(rows=3, length=11)
    return steps(trainer, [batch])[0], memory(trainer)


def train_with_loud_filler(
    _rank: int, layout: Layout, name: str, recompute: str, rows: int
) -> list[tuple[list[float], Any, int]]:
    """Two steps' losses with delayed scaling, what the layers saw, and how many slots were blank:
    with the filler that rows get, and with a token in its place that no row has, of which attention
    gives no numbers."""
    from megatron_backend.training import micro_batch

    loud, lay_out, results = 100, micro_batch.lay_out, []
    given = [random_batch(seed=seed, rows=rows, length=11, vocab=loud) for seed in (3, 4)]
    for louder in (False, True):
        blanks = 0

        def with_filler(batch: Batch, cut: Any, louder: bool = louder) -> Any:
            nonlocal blanks
            stream = lay_out(batch, cut)
            if stream.blank is None:
                return stream
            blanks += int(stream.blank.sum())
            tokens = stream.tokens.masked_fill(stream.blank, loud) if louder else stream.tokens
            return dataclasses.replace(stream, tokens=tokens)

        spec = Fp8Spec(recipe="delayed", amax_history=4)
        trainer = trainer_with(spec, layout, name=name, recompute=recompute)
        if louder:
            lose_filler(trainer)
        with mock.patch.object(micro_batch, "lay_out", with_filler):
            losses = steps(trainer, given)
        results.append((losses, memory(trainer), blanks))
    return results


def lose_filler(trainer: Any) -> None:
    """What attention gives in blank slots is NaN, before anything else looks at it."""
    for chunk in trainer.model:
        for layer in chunk.decoder.layers:
            attention = layer.self_attention.core_attention

            def lossy(*args: Any, _forward: Any = attention.forward, **kwargs: Any) -> torch.Tensor:
                output: torch.Tensor = _forward(*args, **kwargs)
                blank = kwargs["packed_seq_params"].blank
                return output if blank is None else output.index_fill(0, blank.nonzero()[:, 0], nan)

            attention.forward = lossy


def evaluate_and_reload(_rank: int) -> tuple[bool, bool, list[str]]:
    """Whether an evaluation left the memory alone, whether a checkpoint's state brings it back, and
    the names under which it is kept."""
    spec = Fp8Spec(recipe="delayed", amax_history=4)
    trainer = trainer_with(spec, Layout())
    steps(trainer, batches(1))
    before = memory(trainer)
    batch = dataclasses.replace(random_batch(seed=9), per_token={})
    trainer.log_probs(batch)
    trainer.evaluate_loss(batch, Normalizer.of(batch))
    untouched = _equal(before, memory(trainer))
    fresh = trainer_with(spec, Layout())
    state = trainer.chunks[0].module.state_dict()
    fresh.chunks[0].module.load_state_dict(state)
    kept = [name for name, value in state.items() if name.endswith("_extra_state")]
    return (
        untouched,
        _equal(before, memory(fresh)),
        [name for name in kept if state[name] is not None],
    )


def layers_in_8_bits(_rank: int, border: int) -> list[str]:
    """Names of the layers whose products are in 8 bits."""
    spec = Fp8Spec(recipe="tensorwise", first_last_bf16_layers=border)
    found = linears(trainer_with(spec, Layout(), name="qwen3_moe"))
    return [name for name, module in found.items() if getattr(module, "rounding", None)]


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def save_and_go_on(_rank: int, folder: Path) -> tuple[list[float], list[float], bool]:
    """Losses after a checkpoint, of the trainer that wrote it and of one that read it, and whether
    they remember the same in the end."""
    from megatron_backend.checkpoint import contents
    from megatron_backend.checkpoint.torch_dist import load_state, save_state

    for name in (contents.STATE, contents.RANDOM):
        (folder / name).mkdir()
    spec = Fp8Spec(recipe="delayed", amax_history=4)
    trainer, resumed = trainer_with(spec, Layout()), trainer_with(spec, Layout())
    first, *rest = batches(3)
    steps(trainer, [first])
    save_state(folder, {"": trainer})
    load_state(folder, {"": resumed}, same_layout=True)
    losses, again = steps(trainer, rest), steps(resumed, rest)
    return losses, again, _equal(memory(trainer), memory(resumed))


def save_own_memory(_rank: int, layout: Layout, name: str, folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint of layers that each remember something else; what this rank's do.

    Training would not tell all apart: ranks share the maxima of the experts in the same place.
    """
    from megatron_backend.checkpoint.torch_dist import save_state

    trainer = trainer_with(Fp8Spec(recipe="delayed", amax_history=4), layout, name=name)
    for place, module in linears_of_whole_model(trainer).items():
        generator = torch.Generator().manual_seed(crc32(place.encode()))
        module.set_extra_state(torch.rand(5, 3, generator=generator))
    save_state(folder, {"": trainer})
    return whole_model_memory(trainer)


def load_and_save(
    _rank: int, layout: Layout, name: str, folder: Path, again: Path
) -> dict[str, torch.Tensor]:
    """The checkpoint under another layout, saved again; what this rank's layers remember."""
    from megatron_backend.checkpoint.torch_dist import load_state, save_state

    trainer = trainer_with(Fp8Spec(recipe="delayed", amax_history=4), layout, name=name)
    load_state(folder, {"": trainer}, same_layout=False)
    save_state(again, {"": trainer})
    return whole_model_memory(trainer)


def whole_model_memory(trainer: Any) -> dict[str, torch.Tensor]:
    """Scales and histories of this rank's layers, by their names in the whole model."""
    found = linears_of_whole_model(trainer)
    return {place: module.get_extra_state() for place, module in found.items()}


def linears_of_whole_model(trainer: Any) -> dict[str, Any]:
    """This rank's linear layers; layers and experts are numbered as in the whole model."""
    found = {}
    for chunk in trainer.model:
        for layer in chunk.decoder.layers:
            for name, module in layer.named_modules():
                if ".linear_" not in name:
                    continue
                head, experts, rest = name.partition(".local_experts.")
                if experts:
                    index, _, kind = rest.partition(".")
                    name = f"{head}.experts.{layer.mlp.local_expert_indices[int(index)]}.{kind}"
                found[f"{layer.layer_number}.{name}"] = module
    return found
