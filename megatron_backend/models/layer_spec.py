"""Which modules a transformer layer is made of: Transformer Engine's on CUDA, ours on the CPU."""

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_backend.models.attention import SdpaAttention
from megatron_backend.models.config import ModelConfig


def layer_spec(config: ModelConfig) -> ModuleSpec:
    """The layers of a model on this machine.

    Raises:
        RuntimeError: CUDA is present, and Transformer Engine is not.
    """
    if not torch.cuda.is_available():
        return _cpu_layer_spec(config)
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE:
        raise RuntimeError(
            "training on CUDA needs Transformer Engine: pip install transformer-engine[pytorch]"
        )
    return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_norm)


def _cpu_layer_spec(config: ModelConfig) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_norm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = SdpaAttention
    return spec
