"""The model's config as the workers use it: the service's own reading (`service.spec`)."""

from service.spec.model_config import ModelConfig, MoeConfig
from service.spec.rope_config import RopeConfig

__all__ = ["ModelConfig", "MoeConfig", "RopeConfig"]
