"""The one place where a Megatron model is built.

A rank's model is a list of chunks, everywhere in this package: one for each virtual stage, in the
order in which tokens go through them. Without virtual stages (`vpp` = 1) the list has one element.
Chunk `c` knows its number (`vp_stage`, None without virtual stages), whether the embedding or the
output layer is in it (`pre_process`, `post_process`), and each of its layers' number in the whole
model (`decoder.layers[i].layer_number`, counted from 1).
"""

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_backend.models.config import ModelConfig
from megatron_backend.models.layer_spec import layer_spec
from megatron_backend.models.rope import inverse_frequencies
from megatron_backend.models.vocabulary import padded_vocab_size
from megatron_backend.runtime.distributed import device
from service.spec.layout import Layout


def build_model(
    config: ModelConfig,
    layout: Layout,
    *,
    dtype: torch.dtype = torch.float32,
    max_length: int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    padded_vocab: int | None = None,
) -> list[GPTModel]:
    """This rank's part of a model. Its matrices hold anything at all until something loads them.

    Args:
        config: the model.
        layout: sizes of the groups that the model is split over.
        dtype: of parameters and activations, float32 or bfloat16.
        max_length: longest sequence; null takes the config's.
        pg_collection: process groups of the layout; null takes Megatron's global ones.
        padded_vocab: rows of embedding and output layer; null pads for this layout. A generation
            copy takes its training model's, so that weights move between them row by row.

    Returns:
        This rank's chunks (see the module's text) on its device, in training mode.

    Raises:
        ValueError: the layout does not divide the model.
    """
    config.check_layout(tp=layout.tp, pp=layout.pp)
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
            transformer_config(config, layout, dtype=dtype),
            layer_spec(config),
            vocab_size=padded_vocab,
            max_sequence_length=max_length or config.max_positions,
            pre_process=first and chunk == 0,
            post_process=last and chunk == layout.vpp - 1,
            position_embedding_type="rope",
            rotary_base=config.rope.theta,
            share_embeddings_and_output_weights=config.tied,
            pg_collection=groups,
            vp_stage=chunk if layout.vpp > 1 else None,
        )
        frequencies = inverse_frequencies(config.rope, config.head_dim)
        model.rotary_pos_emb.inv_freq = frequencies.to(device())
        chunks.append(model.to(device=device(), dtype=dtype))
    return chunks


def transformer_config(
    config: ModelConfig, layout: Layout, *, dtype: torch.dtype
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
        layernorm_epsilon=config.norm_eps,
        normalization="RMSNorm",
        qk_layernorm=config.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=config.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        pipeline_model_parallel_layout=_stages(config, layout),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Weights are always loaded after building, so initialising them would be wasted work.
        perform_initialization=False,
        use_cpu_initialization=not cuda,
        # The training step sums its loss; nothing may divide it (see training.step).
        calculate_per_token_loss=True,
        cuda_graph_modules=[],
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=cuda,
        bias_activation_fusion=cuda,
        bias_dropout_fusion=cuda,
        apply_rope_fusion=cuda,
    )


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
