"""What each rank does in test_critic.py: a policy and a critic with a checkpoint of both."""

from pathlib import Path
from typing import Any

from algorithms.batch import Normalizer
from megatron_backend.checkpoint.contents import CRITIC
from service.spec import SftSpec
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from tests.megatron_backend.checkpoint.reshard_ranks import write_state
from tests.megatron_backend.small_models import CONFIGS
from tests.megatron_backend.training.training_runs import LEARNING_RATE, build_trainer
from tests.megatron_backend.training.value_runs import random_pairs, value_trainer

POLICY, VALUES = "qwen2-tied", "qwen3"
"""A tied policy, and a critic of another architecture: nothing of one may be taken for the other's.
"""


def pair(layout: Layout, **sizes: Any) -> dict[str, Any]:
    """What a checkpoint holds: both models, with random weights and optimizers."""
    return {
        "": build_trainer(POLICY, layout, SftSpec(), **sizes),
        CRITIC: value_trainer(VALUES, layout, **sizes),
    }


def take_steps(
    models: dict[str, Any], first: int, count: int, *, warmup: bool = False
) -> list[float]:
    """Losses of some steps of both models, or of the critic alone."""
    losses = []
    for step in range(first, first + count):
        batch = random_pairs(seed=step)
        for name, trainer in models.items():
            if not (warmup and name == ""):
                share = trainer.train_step(batch, Normalizer.of(batch), learning_rate=LEARNING_RATE)
                losses.append(share.loss)
    return losses


def write_both(models: dict[str, Any], layout: Layout, out: Path) -> None:
    """Weights and moments of both, without a layout."""
    for (name, trainer), config in zip(models.items(), (POLICY, VALUES), strict=True):
        write_state(trainer, layout, config, out / (name or "policy"))


def save(_rank: int, layout: Layout, folder: Path, out: Path) -> list[float]:
    """Three steps of both, a checkpoint, and two steps more; the last losses."""
    from megatron_backend.checkpoint.torch_dist import save_state

    models = pair(layout)
    take_steps(models, 0, 3)
    save_state(folder, models)
    write_both(models, layout, out)
    return take_steps(models, 3, 2)


def load(
    _rank: int, layout: Layout, folder: Path, out: Path, same_layout: bool = False
) -> list[float]:
    """The checkpoint in fresh models, and two steps more."""
    from megatron_backend.checkpoint.torch_dist import load_state

    models = pair(layout)
    load_state(folder, models, same_layout=same_layout)
    write_both(models, layout, out)
    return take_steps(models, 3, 2)


def save_in_warmup(_rank: int, layout: Layout, direct: Path, copied: Path) -> list[float]:
    """Two steps of the critic alone, a checkpoint in both ways, and two steps of both."""
    from megatron_backend.checkpoint.torch_dist import StateWriter, save_state

    models = pair(layout)
    take_steps(models, 0, 2, warmup=True)
    writer = StateWriter()
    assert writer.begin(copied, models, background=True) is None
    save_state(direct, models)
    losses = take_steps(models, 2, 2)
    written = writer.result(wait=True)
    assert written is not None
    assert written.error is None
    writer.close()
    return losses


def load_after_warmup(_rank: int, layout: Layout, folder: Path, same_layout: bool) -> list[float]:
    """The checkpoint in models that have taken a step, and two steps more."""
    from megatron_backend.checkpoint.torch_dist import load_state

    models = pair(layout)
    take_steps(models, 7, 1)
    load_state(folder, models, same_layout=same_layout)
    return take_steps(models, 2, 2)


def start_values(
    _rank: int, layout: Layout, name: str, checkpoint: Path, prefix: str, out: Path
) -> bool:
    """A value model's weights from a published checkpoint, exported; whether it had a head."""
    from megatron_backend.checkpoint.model_weights import load_model_weights
    from megatron_backend.models.export import export_hf

    model = value_trainer(name, layout).model
    found = load_model_weights(model, checkpoint, prefix=prefix)
    export_hf(model, ModelConfig.from_hf(CONFIGS[name]), layout, out)
    return found


def start_policy(_rank: int, layout: Layout, name: str, checkpoint: Path) -> None:
    """The weights of a model that predicts tokens from a published checkpoint."""
    from megatron_backend.checkpoint.model_weights import load_model_weights

    load_model_weights(build_trainer(name, layout, SftSpec()).model, checkpoint)


def save_values(_rank: int, layout: Layout, name: str, folder: Path, out: Path) -> None:
    """A reward model's checkpoint after two steps, and its weights."""
    from megatron_backend.checkpoint.torch_dist import save_state

    models = {"": value_trainer(name, layout)}
    take_steps(models, 0, 2)
    save_state(folder, models)
    write_state(models[""], layout, name, out)
