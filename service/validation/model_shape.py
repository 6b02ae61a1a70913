"""A model's config as a submit checks it: `service.spec.ModelConfig`, with faults as fields."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from service.spec.config_reader import UnsupportedModel
from service.spec.model_config import ModelConfig
from service.validation.problems import FieldProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder, from its config."""

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    tied: bool
    """The output layer is the embedding."""
    layer_parameters: int = 0
    parameters: int = 0
    """Of the whole model, without any padding of the vocabulary."""


def read_model(
    config: Mapping[str, Any], field: str
) -> tuple[ModelConfig | None, list[FieldProblem]]:
    """Reads a config.

    Args:
        config: as in config.json.
        field: what to call it in problems.

    Returns:
        The model, or None and what is wrong.
    """
    try:
        return ModelConfig.from_hf(config), []
    except UnsupportedModel as error:
        return None, [
            FieldProblem(field=f"{field}.{problem.name}", message=problem.message, fix=problem.fix)
            for problem in error.problems
        ]


def read_shape(
    config: Mapping[str, Any], field: str
) -> tuple[ModelShape | None, list[FieldProblem]]:
    """The sizes alone."""
    model, problems = read_model(config, field)
    if model is None:
        return None, problems
    shape = ModelShape(
        family=model.family,
        layers=model.num_layers,
        hidden=model.hidden_size,
        intermediate=model.ffn_size,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocabulary=model.vocab_size,
        positions=model.max_positions,
        tied=model.tied,
        layer_parameters=model.layer_parameters,
        parameters=model.parameters,
    )
    return shape, []
