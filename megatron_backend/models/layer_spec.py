"""Which modules a transformer layer is made of: Transformer Engine's on CUDA, ours on the CPU.

Both give the same names to what they store, so that a checkpoint of one loads into the other. On
the CPU experts are computed one after another, with Transformer Engine in one grouped product.
"""

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_backend.models.attention import SdpaAttention
from megatron_backend.models.gemma import adapt_layer, check_cuda
from megatron_backend.models.norm import RmsNorm
from megatron_backend.models.rotary import RotaryAttention
from megatron_backend.models.router import TokenWeightedRouter
from service.spec.model_config import ModelConfig


def block_spec(config: ModelConfig, num_layers: int) -> ModuleSpec | TransformerBlockSubmodules:
    """The layers of one chunk of a model on this machine, and its final norm.

    Args:
        config: the model.
        num_layers: how many layers the chunk has.

    Raises:
        RuntimeError: CUDA is present, and Transformer Engine is not.
        NotImplementedError: CUDA is present, and Transformer Engine cannot compute the model.
    """
    if not torch.cuda.is_available():
        spec = adapt_layer(_cpu_layer_spec(config), config, cuda=False)
        return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=RmsNorm)
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE:
        raise RuntimeError(
            "training on CUDA needs Transformer Engine: pip install transformer-engine[pytorch]"
        )
    check_cuda(config)
    spec = get_gpt_layer_with_transformer_engine_spec(
        qk_layernorm=config.qk_norm,
        num_experts=config.moe.num_experts if config.moe else None,
        moe_grouped_gemm=config.moe is not None,
    )
    if config.moe is not None:
        _with_our_router(spec)
    return adapt_layer(spec, config, cuda=True)


def _cpu_layer_spec(config: ModelConfig) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        qk_layernorm=config.qk_norm,
        normalization="RMSNorm",
        num_experts=config.moe.num_experts if config.moe else None,
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RmsNorm
    layer.self_attention.module = RotaryAttention
    attention = layer.self_attention.submodules
    attention.core_attention = SdpaAttention
    if config.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    if config.moe is not None:
        # In Transformer Engine's layer the norm in front of experts is a module of its own too.
        del layer.sharded_state_dict_keys_map["pre_mlp_layernorm."]
        _with_our_router(spec)
    return spec


def _with_our_router(spec: ModuleSpec) -> ModuleSpec:
    spec.submodules.mlp.keywords["submodules"].router = TokenWeightedRouter
    return spec
