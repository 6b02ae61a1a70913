"""The one place where a Megatron model is built.

A rank's model is a list of chunks, everywhere in this package: one for each virtual stage, in the
order in which tokens go through them. Without virtual stages (`vpp` = 1) the list has one element.
Chunk `c` knows its number (`vp_stage`, None without virtual stages), whether the embedding or the
output layer is in it (`pre_process`, `post_process`), and each of its layers' number in the whole
model (`decoder.layers[i].layer_number`, counted from 1), and what the model says of a token
(`head`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_backend.fp8_emulation import emulate
from megatron_backend.models.gemma import adapt_model
from megatron_backend.models.layer_spec import block_spec
from megatron_backend.models.packing import blank_filler
from megatron_backend.models.rope import inverse_frequencies
from megatron_backend.models.router import drop_probabilities
from megatron_backend.models.value_head import ValueHead
from megatron_backend.precision import transformer_fields
from megatron_backend.runtime.distributed import device
from service.spec import Fp8Spec
from service.spec.algorithm import Head
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from service.spec.padding import padded_vocab_size

type Recompute = Literal["none", "selective", "full"]


def build_model(
    config: ModelConfig,
    layout: Layout,
    *,
    dtype: torch.dtype = torch.float32,
    max_length: int | None = None,
    recompute: Recompute = "none",
    fp8: Fp8Spec | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    padded_vocab: int | None = None,
    head: Head = "vocabulary",
) -> list[GPTModel]:
    """This rank's part of a model. Its matrices hold anything at all until something loads them.

    Args:
        config: the model.
        layout: sizes of the groups that the model is split over.
        dtype: of parameters and activations: float32, bfloat16 or float16.
        max_length: longest sequence; null takes the config's.
        recompute: activations that the backward pass computes again.
        fp8: recipe of Transformer Engine's matrix products; without CUDA they are emulated.
        pg_collection: process groups of the layout; null takes Megatron's global ones.
        padded_vocab: rows of embedding and output layer; null pads for this layout. A generation
            copy takes its training model's, so that weights move between them row by row.
        head: what the model says of a token; one with a value head has that in the place of its
            output layer, and nothing at its end is tied to the embedding.

    Returns:
        This rank's chunks (see the module's text) on its device, in training mode.

    Raises:
        ValueError: the layout does not divide the model.
    """
    config.check_layout(tp=layout.tp, pp=layout.pp, ep=layout.ep)
    if pg_collection is None:
        _check_experts(config, layout)
    stage_layers = layout.stage_layers(config.num_layers)
    if padded_vocab is None:
        padded_vocab = padded_vocab_size(config.vocab_size, tp=layout.tp)
    if padded_vocab % layout.tp or padded_vocab < config.vocab_size:
        raise ValueError(f"tp = {layout.tp} does not divide the padded vocabulary {padded_vocab}")
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    stage = groups.pp.rank()
    first, last = stage == 0, stage == layout.pp - 1
    chunks = []
    for chunk in range(layout.vpp):
        # Each has a config of its own: Megatron's schedules and wrappers write into it.
        model = GPTModel(
            transformer_config(config, layout, dtype=dtype, recompute=recompute, fp8=fp8),
            block_spec(config, len(stage_layers[stage][chunk])),
            vocab_size=padded_vocab,
            max_sequence_length=max_length or config.max_positions,
            pre_process=first and chunk == 0,
            post_process=last and chunk == layout.vpp - 1,
            position_embedding_type="rope",
            rotary_base=config.rope.theta,
            share_embeddings_and_output_weights=config.tied and head == "vocabulary",
            pg_collection=groups,
            vp_stage=chunk if layout.vpp > 1 else None,
        )
        frequencies = inverse_frequencies(config.rope, config.head_dim)
        model.rotary_pos_emb.inv_freq = frequencies.to(device())
        adapt_model(model, config)
        model.head = head
        if head == "value" and model.post_process:
            # The last layer goes, and with it a cap on its logits.
            model.output_layer = ValueHead(model)
        drop_probabilities(model)
        if fp8 is not None:
            blank_filler(model)
            if not torch.cuda.is_available():
                emulate(model, fp8)
        chunks.append(model.to(device=device(), dtype=dtype))
    return chunks


def transformer_config(
    config: ModelConfig,
    layout: Layout,
    *,
    dtype: torch.dtype,
    recompute: Recompute = "none",
    fp8: Fp8Spec | None = None,
) -> TransformerConfig:
    """Megatron's own description of the model in this layout."""
    cuda = torch.cuda.is_available()
    return TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        softmax_scale=config.softmax_scale,
        layernorm_epsilon=config.norm_eps,
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=config.zero_centered_norm,
        qk_layernorm=config.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=config.qkv_bias,
        gated_linear_unit=True,
        activation_func=_ACTIVATIONS[config.activation],
        attention_dropout=0.0,
        hidden_dropout=0.0,
        # Weights are always loaded after building, so initialising them would be wasted work.
        perform_initialization=False,
        use_cpu_initialization=not cuda,
        # The training step sums its loss; nothing may divide it (see training.step).
        calculate_per_token_loss=True,
        cuda_graph_modules=[],
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=cuda,
        bias_activation_fusion=cuda and config.activation == "silu",
        bias_dropout_fusion=cuda,
        apply_rope_fusion=cuda,
        **transformer_fields(dtype, fp8 if cuda else None),
        **_parallel(config, layout),
        **_windows(config),
        **_experts(config, grouped=cuda),
        **_RECOMPUTE[recompute],
    )


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
_RECOMPUTE: dict[Recompute, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def _parallel(config: ModelConfig, layout: Layout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sequence_parallel,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "pipeline_model_parallel_layout": _stages(config, layout),
        # Micro-batches have lengths of their own; stages tell each other before they send.
        "variable_seq_lengths": layout.pp > 1,
        # In one batch, messages of two chunks between the same two stages would be mixed up.
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
        # The only way to the experts that allows for it, asked for without experts too.
        "moe_token_dispatcher_type": "alltoall",
    }


def _windows(config: ModelConfig) -> dict[str, Any]:
    """Which layers look how far back. Megatron counts the token itself apart."""
    if config.sliding_window is None:
        return {}
    windowed = [int(config.window_of(layer) is not None) for layer in range(config.num_layers)]
    return {
        "window_size": (config.sliding_window - 1, 0),
        "window_attn_skip_freq": windowed,
    }


def _experts(config: ModelConfig, *, grouped: bool) -> dict[str, Any]:
    moe = config.moe
    if moe is None:
        return {}
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.ffn_size,
        "moe_router_topk": moe.top_k,
        # A softmax over all experts first, or over the chosen ones alone: their sum is then 1.
        "moe_router_pre_softmax": not moe.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if moe.aux_loss_coef else "none",
        "moe_aux_loss_coeff": moe.aux_loss_coef,
        "moe_grouped_gemm": grouped,
    }


def _check_experts(config: ModelConfig, layout: Layout) -> None:
    """Megatron trains experts under tensor parallelism only where it splits the sequence too.

    A copy that only generates may have them so.
    """
    if config.moe is not None and layout.tp > 1 and not layout.sequence_parallel:
        raise ValueError(f"tp = {layout.tp} with experts needs sequence_parallel")


def _stages(config: ModelConfig, layout: Layout) -> list[list[str]] | None:
    """What each virtual stage holds, where Megatron's even split does not do."""
    if layout.pipeline_layers is None and config.num_layers % layout.pp == 0:
        return None
    stages = layout.stage_layers(config.num_layers)
    chunks = [stages[stage][chunk] for chunk in range(layout.vpp) for stage in range(layout.pp)]
    names = [["decoder"] * len(layers) for layers in chunks]
    names[0].insert(0, "embedding")
    names[-1].append("loss")
    return names
