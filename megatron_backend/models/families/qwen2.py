"""Qwen2 and Qwen2.5: biases on query, key and value."""

from megatron_backend.models.families.family import (
    ATTENTION,
    MLP,
    NORMS,
    QKV_BIAS,
    FamilyTensors,
)

QWEN2 = FamilyTensors(
    architecture="Qwen2ForCausalLM",
    classifier="Qwen2ForSequenceClassification",
    layer=NORMS | ATTENTION | QKV_BIAS | MLP,
)
