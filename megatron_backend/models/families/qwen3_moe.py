"""Qwen3 with experts."""

from megatron_backend.models.families.family import (
    ATTENTION,
    NORMS,
    QK_NORM,
    FamilyTensors,
    experts,
)

QWEN3_MOE = FamilyTensors(
    architecture="Qwen3MoeForCausalLM",
    classifier="Qwen3MoeForSequenceClassification",
    layer=NORMS
    | ATTENTION
    | QK_NORM
    | experts(
        router="mlp.gate.weight",
        gate="mlp.experts.{expert}.gate_proj.weight",
        up="mlp.experts.{expert}.up_proj.weight",
        down="mlp.experts.{expert}.down_proj.weight",
    ),
)
