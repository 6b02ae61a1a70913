"""What the ranks of test_algorithm_invariance.py do: one step of every algorithm in one start."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from algorithms.algorithm import load_algorithm
from algorithms.batch import Batch, LossOutput, Normalizer, Outputs
from megatron_backend.training.shares import StepShare
from service.spec import AlgorithmSpec, OptimizerSpec
from service.spec.algorithm import Head
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from tests.megatron_backend.small_models import CONFIGS
from tests.megatron_backend.training.layout_runs import write_gradient
from tests.megatron_backend.training.training_runs import build_trainer

MODEL = "qwen3"
SIZES = {"num_hidden_layers": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One loss of one algorithm on one batch.

    Attributes:
        name: of its folder.
        spec: the algorithm's.
        of_critic: the loss of its critic, and not its own.
        batch: prepared.
    """

    name: str
    spec: AlgorithmSpec
    of_critic: bool = False
    batch: Batch

    @property
    def head(self) -> Head:
        """What its model says of a token."""
        return "value" if self.of_critic else self.spec.head


class _Chosen:
    """The loss of whichever step is taken, so that one trainer takes all of them."""

    function: Callable[[Outputs, Batch, Normalizer], LossOutput]

    def loss(self, outputs: Outputs, batch: Batch, normalizer: Normalizer) -> LossOutput:
        """See `algorithms.protocols.Loss`."""
        return self.function(outputs, batch, normalizer)


def take(
    _rank: int, layout: Layout, options: Mapping[str, Any], steps: Sequence[Step], folder: Path
) -> list[StepShare]:
    """The loss of each step, and its whole gradient in `folder`/NAME; no weight changes."""
    chosen = _Chosen()
    trainers = {
        head: build_trainer(
            MODEL,
            layout,
            chosen,
            head=head,
            optimizer_spec=OptimizerSpec(clip_grad=0.0),
            **options,
            **SIZES,
        )
        for head in {step.head for step in steps}
    }
    shares = []
    for step in steps:
        algorithm, trainer = load_algorithm(step.spec), trainers[step.head]
        chosen.function = algorithm.value_loss if step.of_critic else algorithm.loss
        normalizer = Normalizer.of(step.batch)
        # No gradient is within this limit, so that all steps start from the same weights.
        shares.append(trainer.train_step(step.batch, normalizer, learning_rate=0, norm_limit=-1.0))
        config = ModelConfig.from_hf(CONFIGS[MODEL] | SIZES)
        write_gradient(trainer, layout, config, folder / step.name)
    return shares
