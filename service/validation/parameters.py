"""How many parameters one rank of each pipeline stage holds.

Matrices are split over tensor-parallel ranks, experts over expert-parallel ones too; norms and the
router are on every rank of them. The optimizer's state of what experts are made of is divided over
fewer ranks than that of all else, so the two are counted apart.
"""

from dataclasses import dataclass

from service.spec.algorithm import Head
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from service.spec.padding import padded_vocab_size


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParameters:
    """Parameters of one rank.

    Attributes:
        dense: of all but experts.
        experts: of its experts.
        linear: of `dense` and `experts`, those in a layer's matrices, which FP8 can hold.
    """

    dense: int
    experts: int
    linear: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts


def model_parameters(model: ModelConfig, head: Head) -> int:
    """Parameters of a whole model; one with a value head has a vector for its output layer."""
    if head == "vocabulary":
        return model.parameters
    output = 0 if model.tied else model.vocab_size * model.hidden_size
    return model.parameters - output + model.hidden_size


def rank_parameters(
    model: ModelConfig, layout: Layout, *, stage: int, head: Head = "vocabulary"
) -> RankParameters:
    """What each rank of a pipeline stage holds.

    Args:
        stage: from 0; with virtual stages all chunks of the rank.
        head: a value head is a vector, whole on each rank of the last stage.

    Raises:
        ValueError: the layout does not fit the model.
    """
    layers = sum(len(chunk) for chunk in layout.stage_layers(model.num_layers)[stage])
    embedding = padded_vocab_size(model.vocab_size, tp=layout.tp) // layout.tp * model.hidden_size
    attention = model.attention_parameters // layout.tp
    other = model.norm_parameters
    mlp, experts = model.mlp_parameters // layout.tp, 0
    if model.moe is not None:
        other += model.moe.num_experts * model.hidden_size
        mlp, experts = 0, model.moe.num_experts // layout.ep * mlp
    dense = layers * (attention + mlp + other)
    if stage == 0:
        dense += embedding
    if stage == layout.pp - 1:
        dense += model.hidden_size
        # A tied output layer is the embedding itself, unless that lives on another rank.
        if head == "value":
            dense += model.hidden_size
        elif not model.tied or layout.pp > 1:
            dense += embedding
    return RankParameters(
        dense=dense, experts=layers * experts, linear=layers * (attention + mlp + experts)
    )
