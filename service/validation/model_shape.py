"""A model's config as a submit checks it: `service.spec.ModelConfig`, with faults as fields."""

from collections.abc import Mapping
from typing import Any

from service.spec.config_reader import UnsupportedModel
from service.spec.model_config import ModelConfig
from service.validation.problems import FieldProblem


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
