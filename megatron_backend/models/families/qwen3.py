"""Qwen3: a norm on each query and key."""

from megatron_backend.models.families.family import (
    ATTENTION,
    MLP,
    NORMS,
    QK_NORM,
    FamilyTensors,
)

QWEN3 = FamilyTensors(
    architecture="Qwen3ForCausalLM",
    classifier="Qwen3ForSequenceClassification",
    layer=NORMS | ATTENTION | QK_NORM | MLP,
)
