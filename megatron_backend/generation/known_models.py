"""Which models the CPU's cached decoder computes rightly. Anything else is refused by name.

The decoder runs on a model's weights without its modules, so a module or a setting that it does not
know would be left out in silence. Three checks stand against that: each module's class is one of
those that it stands in for, each field of a model's config is one that it looks at, and each
parameter was read.
"""

from collections.abc import Collection
from dataclasses import fields
from typing import Any

from service.spec.model_config import ModelConfig, MoeConfig

_MODULES = {
    *("GPTModel", "LanguageModelEmbedding", "VocabParallelEmbedding", "RotaryEmbedding"),
    *("TransformerBlock", "TransformerLayer", "RmsNorm", "IdentityOp", "IdentityFuncOp"),
    *("RotaryAttention", "_LocalRotaryAttention", "SdpaAttention"),
    *("ColumnParallelLinear", "RowParallelLinear", "RowParallelWithNorm"),
    *("MLP", "MoELayer", "TokenWeightedRouter", "SequentialMLP", "Dropout", "ModuleList"),
}
_FIELDS = {
    *("family", "hf", "initializer_range", "max_positions"),  # change nothing that is computed
    *("num_layers", "hidden_size", "ffn_size", "num_heads", "num_kv_heads", "head_dim"),
    *("vocab_size", "norm_eps", "rope", "local_rope", "tied", "activation", "qkv_bias", "qk_norm"),
    *("moe", "sliding_window", "layer_types", "zero_centered_norm", "post_norms"),
    *("embedding_scale", "attention_softcap", "final_softcap", "query_scale"),
}
_MOE_FIELDS = {
    "aux_loss_coef",  # of training alone
    *("num_experts", "top_k", "ffn_size", "norm_topk_prob"),
}


def refuse_unknown(model: Any) -> None:
    """Checks a GPTModel's modules, and what a config can say.

    Raises:
        NotImplementedError: names what the decoder does not know.
    """
    if not (model.pre_process and model.post_process):
        raise _unknown("a model without all its layers on one rank")
    if model.config.expert_model_parallel_size > 1:
        raise _unknown("experts that are spread over ranks (ep above 1)")
    for name, module in model.named_modules():
        if type(module).__name__ not in _MODULES:
            raise _unknown(f"{type(module).__name__} ({name or 'the model'})")
    for description, known in ((ModelConfig, _FIELDS), (MoeConfig, _MOE_FIELDS)):
        for field in fields(description):
            if field.name not in known:
                raise _unknown(f"{description.__name__}.{field.name}")


def refuse_unread(model: Any, seen: Collection[int]) -> None:
    """Checks that no parameter was left out.

    Args:
        model: a GPTModel.
        seen: `id` of each parameter that was read.

    Raises:
        NotImplementedError: names the first that was not.
    """
    for name, parameter in model.named_parameters():
        if id(parameter) not in seen:
            raise _unknown(f"the parameter {name}")


def _unknown(what: str) -> NotImplementedError:
    return NotImplementedError(f"the CPU's generation engine does not know {what}")
