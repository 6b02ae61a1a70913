"""What a family's file says, and the blocks that most families share."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_backend.models.cuts import Columns, Cut, GateAndUp, Qkv, VocabularyRows, Whole

_LAYER = "model.layers.{layer}."
_ATTENTION = _LAYER + "self_attn."


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTensors:
    """The tensors of one family.

    Attributes:
        architecture: transformers' class, for config.json.
        classifier: its class for models with a value head.
        layer: of a layer: each Megatron parameter's name within it (an expert's without the
            expert's number), and its cut, with templates for names.
        embedding, final_norm, output: the rest of the model.
        score: what stands in the place of `output` where there is a value head.
    """

    architecture: str
    classifier: str
    layer: Mapping[str, Cut]
    embedding: Cut = field(default=VocabularyRows(("model.embed_tokens.weight",)))
    final_norm: Cut = field(default=Whole(("model.norm.weight",), "hidden"))
    output: Cut = field(default=VocabularyRows(("lm_head.weight",)))
    score: Cut = field(default=Whole(("score.weight",), "value"))


def input_norm(name: str) -> dict[str, Cut]:
    """The norm in front of attention: a module of its own, or fused into the next linear layer."""
    norm = Whole((_LAYER + name + ".weight",), "hidden")
    return {
        "input_layernorm.weight": norm,
        "self_attention.linear_qkv.layer_norm_weight": norm,
    }


def mlp_norm(name: str) -> dict[str, Cut]:
    """The norm in front of the MLP: a module of its own, or fused into the next linear layer."""
    norm = Whole((_LAYER + name + ".weight",), "hidden")
    return {"pre_mlp_layernorm.weight": norm, "mlp.linear_fc1.layer_norm_weight": norm}


def experts(*, router: str, gate: str, up: str, down: str) -> dict[str, Cut]:
    """A mixture of experts; names within the layer, with `{expert}`."""
    return {
        "mlp.router.weight": Whole((_LAYER + router,), "router"),
        "mlp.experts.linear_fc1.weight": GateAndUp((_LAYER + gate, _LAYER + up), "expert"),
        "mlp.experts.linear_fc2.weight": Columns((_LAYER + down,), "expert"),
    }


ATTENTION: dict[str, Cut] = {
    "self_attention.linear_qkv.weight": Qkv(
        tuple(f"{_ATTENTION}{name}_proj.weight" for name in "qkv")
    ),
    "self_attention.linear_proj.weight": Columns((_ATTENTION + "o_proj.weight",), "attention"),
}
QKV_BIAS: dict[str, Cut] = {
    "self_attention.linear_qkv.bias": Qkv(
        tuple(f"{_ATTENTION}{name}_proj.bias" for name in "qkv"), bias=True
    ),
}
QK_NORM: dict[str, Cut] = {
    f"self_attention.{name}_layernorm.weight": Whole((f"{_ATTENTION}{name}_norm.weight",), "head")
    for name in "qk"
}
MLP: dict[str, Cut] = {
    "mlp.linear_fc1.weight": GateAndUp(
        (_LAYER + "mlp.gate_proj.weight", _LAYER + "mlp.up_proj.weight"), "ffn"
    ),
    "mlp.linear_fc2.weight": Columns((_LAYER + "mlp.down_proj.weight",), "ffn"),
}
NORMS: dict[str, Cut] = input_norm("input_layernorm") | mlp_norm("post_attention_layernorm")

GEMMA_NORMS: dict[str, Cut] = (
    input_norm("input_layernorm")
    | mlp_norm("pre_feedforward_layernorm")
    | {
        # Behind a block: part of its last linear layer, before the residual.
        "self_attention.linear_proj.post_layernorm.weight": Whole(
            (_LAYER + "post_attention_layernorm.weight",), "hidden"
        ),
        "mlp.linear_fc2.post_layernorm.weight": Whole(
            (_LAYER + "post_feedforward_layernorm.weight",), "hidden"
        ),
    }
)
