"""What each rank does in test_reshard.py; it runs inside the processes of `Ranks`."""

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from algorithms.batch import Batch, Normalizer
from megatron_backend.checkpoint import contents
from service.spec.layout import Layout
from tests.megatron_backend.small_models import CONFIGS

LEARNING_RATE = 3e-3


def batch(seed: int) -> Batch:
    """8 rows of 12 tokens, of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 13, (8,), generator=generator)
    mask = (torch.arange(12) < lengths[:, None]).float()
    mask[:, 0] = 0
    tokens = torch.randint(3, 101, (8, 12), generator=generator)
    return Batch(tokens=tokens, lengths=lengths, loss_mask=mask)


def trainer(
    layout: Layout, name: str, *, dtype: torch.dtype = torch.float32, **optimizer: Any
) -> Any:
    """A model with random weights, its optimizer, and SFT's loss."""
    from algorithms.sft import Sft
    from megatron_backend.models.build import build_model
    from megatron_backend.models.tensors import RandomTensors
    from megatron_backend.models.weights import load_weights
    from megatron_backend.training.step import Trainer
    from service.spec import OptimizerSpec, SftSpec
    from service.spec.model_config import ModelConfig

    config = ModelConfig.from_hf(CONFIGS[name])
    model = build_model(config, layout, dtype=dtype, max_length=64)
    load_weights(model, config, RandomTensors(config, 1))
    return Trainer(
        model,
        config,
        layout,
        loss=Sft(SftSpec()),
        optimizer_spec=OptimizerSpec(**{"weight_decay": 0.1, **optimizer}),
        dtype=dtype,
    )


def take_steps(trained: Any, first: int, count: int) -> list[float]:
    """Losses of some steps, each on its own batch."""
    return [
        trained.train_step(
            batch(step), Normalizer.of(batch(step)), learning_rate=LEARNING_RATE
        ).loss
        for step in range(first, first + count)
    ]


def save_bf16(_rank: int, layout: Layout, folder: Path) -> list[float]:
    """Three steps in bfloat16, a checkpoint, and five steps more; the last five losses."""
    from megatron_backend.checkpoint.torch_dist import save_state

    trained = trainer(layout, "qwen2-tied", dtype=torch.bfloat16)
    take_steps(trained, 0, 3)
    save_state(folder, {"": trained})
    return take_steps(trained, 3, 5)


def load_bf16(_rank: int, layout: Layout, folder: Path) -> list[float]:
    """The checkpoint in a fresh bfloat16 model, and five steps more."""
    from megatron_backend.checkpoint.torch_dist import load_state

    trained = trainer(layout, "qwen2-tied", dtype=torch.bfloat16)
    load_state(folder, {"": trained}, same_layout=False)
    return take_steps(trained, 3, 5)


def save_loss_scale(_rank: int, layout: Layout, name: str, folder: Path) -> None:
    """A checkpoint in float16 of a loss scale that was halved, and on its way to grow again."""
    from megatron_backend.checkpoint.torch_dist import save_state

    trained = trainer(layout, name, dtype=torch.float16)
    for part in trained.optimizer.chained_optimizers:
        part.grad_scaler._scale.fill_(2.0**9)
        part.grad_scaler._growth_tracker = 7
    save_state(folder, {"": trained})


def load_loss_scale(_rank: int, layout: Layout, name: str, folder: Path) -> list[tuple[float, int]]:
    """Scale and growth of a fresh trainer's optimizers once it has loaded the checkpoint."""
    from megatron_backend.checkpoint.torch_dist import load_state

    trained = trainer(layout, name, dtype=torch.float16)
    load_state(folder, {"": trained}, same_layout=False)
    scalers = [part.grad_scaler for part in trained.optimizer.chained_optimizers]
    return [(scaler.scale.item(), scaler._growth_tracker) for scaler in scalers]


def save(_rank: int, layout: Layout, name: str, folder: Path, out: Path) -> list[float]:
    """Three steps, a checkpoint, and two steps more; the last two losses."""
    from megatron_backend.checkpoint.torch_dist import save_state

    trained = trainer(layout, name)
    take_steps(trained, 0, 3)
    save_state(folder, {"": trained})
    write_state(trained, layout, name, out)
    return take_steps(trained, 3, 2)


def load(_rank: int, layout: Layout, name: str, folder: Path, out: Path) -> list[float]:
    """The checkpoint under another layout, and two steps more."""
    from megatron_backend.checkpoint.torch_dist import load_state

    trained = trainer(layout, name)
    load_state(folder, {"": trained}, same_layout=False)
    write_state(trained, layout, name, out)
    return take_steps(trained, 3, 2)


def load_with_other_settings(
    _rank: int, layout: Layout, name: str, folder: Path, out: Path, settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """The checkpoint under an optimizer with other settings; its groups at the next step."""
    from megatron_backend.checkpoint.torch_dist import load_state

    trained = trainer(layout, name, **settings)
    load_state(folder, {"": trained}, same_layout=False)
    write_state(trained, layout, name, out)
    take_steps(trained, 3, 1)
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in trained.optimizer.param_groups
    ]


def write_state(trained: Any, layout: Layout, name: str, out: Path) -> None:
    """Weights and both moments as Hugging Face tensors, so that no layout is left in them.

    The moments are put together by hand from the optimizer's flat shards, and written by the
    exporter in the place of the weights.
    """
    from megatron_backend.models.export import export_hf
    from service.spec.model_config import ModelConfig

    model = trained.chunks[0].module
    config = ModelConfig.from_hf(CONFIGS[name])
    moments = {kind: _moments(trained, kind) for kind in ("exp_avg", "exp_avg_sq")}
    export_hf([model], config, layout, out / "weights")
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for kind, tensors in moments.items():
            for parameter, moment in zip(model.parameters(), tensors, strict=True):
                parameter.copy_(moment)
            export_hf([model], config, layout, out / kind)
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.copy_(value)


def _moments(trained: Any, kind: str) -> list[torch.Tensor]:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    tensors = []
    (optimizer,) = trained.optimizer.chained_optimizers
    for parameter in trained.chunks[0].module.parameters():
        whole = torch.zeros(parameter.numel())
        if parameter in optimizer.model_param_gbuf_map:
            span = optimizer._get_model_param_range_map(parameter)["param"]
            index, order = optimizer.model_param_group_index_map[parameter]
            shard = optimizer.optimizer.param_groups[index]["params"][order]
            whole[span.start : span.end] = optimizer.optimizer.state[shard][kind].reshape(-1)
        torch.distributed.all_reduce(whole, group=group)
        tensors.append(whole.reshape(parameter.shape))
    return tensors


def save_twice(
    _rank: int, layout: Layout, name: str, sizes: dict[str, Any], direct: Path, copied: Path
) -> list[float]:
    """One state, saved at once and in the background while two more steps are taken.

    Returns:
        The losses of those two steps.
    """
    from megatron_backend.checkpoint.torch_dist import StateWriter, save_state

    trained = wide_trainer(layout, name, sizes)
    writer = StateWriter()
    take_steps(trained, 0, 1)
    # The second save of a writer reuses the plan of its first.
    assert writer.begin(copied / "first", {"": trained}, background=True) is None
    take_steps(trained, 1, 1)
    first = writer.result(wait=True)
    assert first is not None
    assert first.error is None
    written = save_state(direct, {"": trained})
    assert writer.begin(copied / "second", {"": trained}, background=True) is None
    losses = take_steps(trained, 2, 2)
    second = writer.result(wait=True)
    assert second is not None
    assert second.error is None
    assert second.files.keys() == written.files.keys()
    writer.close()
    return losses


def save_with_no_memory_on_rank_1(
    rank: int, layout: Layout, folder: Path, call: str
) -> tuple[Any, Any]:
    """What a save says where `call` finds no memory for one rank's copy, and then where it does."""
    from megatron_backend.checkpoint.torch_dist import StateWriter

    def refuse(*_arguments: Any, **_more: Any) -> None:
        raise OSError(errno.ENOMEM, f"no memory from {call}")

    writer, models = StateWriter(), {"": trainer(layout, "qwen2")}
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            module = {"memfd_create": os, "ftruncate": os, "mmap": mmap}[call]
            patch.setattr(module, call, refuse)
        refused = writer.begin(folder, models, background=True)
    assert writer.begin(folder, models, background=True) is None
    written = writer.result(wait=True)
    writer.close()
    return refused, written


def load_and_save(
    _rank: int, layout: Layout, name: str, sizes: dict[str, Any], folder: Path, again: Path
) -> list[float]:
    """A checkpoint under another layout, saved again, and two steps more."""
    from megatron_backend.checkpoint.torch_dist import load_state, save_state

    trained = wide_trainer(layout, name, sizes)
    load_state(folder, {"": trained}, same_layout=False)
    save_state(again, {"": trained})
    return take_steps(trained, 2, 2)


def go_on(
    _rank: int, layout: Layout, name: str, sizes: dict[str, Any], folder: Path
) -> tuple[list[float], list[float], list[str]]:
    """Losses after a checkpoint, of the trainer that wrote it and of one that read it, and whose
    parameters are not the same in the end."""
    from megatron_backend.checkpoint.torch_dist import load_state, save_state

    trained, resumed = wide_trainer(layout, name, sizes), wide_trainer(layout, name, sizes)
    take_steps(trained, 0, 2)
    save_state(folder, {"": trained})
    torch.distributed.barrier()  # rank 0 writes what all of them read
    expected = take_steps(trained, 2, 3)
    load_state(folder, {"": resumed}, same_layout=True)
    losses = take_steps(resumed, 2, 3)
    pairs = [
        (name, one, two)
        for chunk, other in zip(trained.model, resumed.model, strict=True)
        for (name, one), two in zip(chunk.named_parameters(), other.parameters(), strict=True)
    ]
    return expected, losses, [name for name, one, two in pairs if not torch.equal(one, two)]


def wide_trainer(layout: Layout, name: str, sizes: dict[str, Any]) -> Any:
    """A small model with other sizes, for layouts of more ranks."""
    from service.spec import SftSpec
    from tests.megatron_backend.training.training_runs import build_trainer

    return build_trainer(name, layout, SftSpec(), **sizes)


def whole_tensors(_rank: int, folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, by its name there."""
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load_plain_tensors(str(folder / contents.STATE))
    return {name: tensor for name, tensor in loaded.items() if isinstance(tensor, torch.Tensor)}


def load_weights_only(_rank: int, layout: Layout, name: str, checkpoint: Path, out: Path) -> float:
    """The weights of a published checkpoint in a fresh model; its loss."""
    from megatron_backend.checkpoint.model_weights import load_model_weights
    from megatron_backend.models.export import export_hf
    from service.spec.model_config import ModelConfig

    trained = trainer(layout, name)
    load_model_weights(trained.model, checkpoint)
    export_hf([trained.chunks[0].module], ModelConfig.from_hf(CONFIGS[name]), layout, out)
    return float(trained.evaluate_loss(batch(3), Normalizer.of(batch(3))).loss)


def draws(rank: int, layout: Layout, folder: Path) -> list[list[float]]:
    """D14: what each rank draws after a checkpoint, and after it is loaded again."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from megatron_backend.checkpoint.torch_dist import load_state, save_state

    def draw() -> list[float]:
        numbers = torch.rand(2).tolist()
        with get_cuda_rng_tracker().fork():
            return numbers + torch.rand(2).tolist()

    trained = trainer(layout, "qwen2")
    take_steps(trained, 0, 1)
    torch.manual_seed(100 + rank)
    draw()
    save_state(folder, {"": trained})
    torch.distributed.barrier()  # rank 0 writes what all of them read
    after = draw()
    draw()
    load_state(folder, {"": trained}, same_layout=True)
    again = draw()
    return [after, again]
