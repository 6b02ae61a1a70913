"""Gemma 3, the text models: Gemma 2 with a norm on each query and key."""

from megatron_backend.models.families.family import (
    ATTENTION,
    GEMMA_NORMS,
    MLP,
    QK_NORM,
    FamilyTensors,
)

GEMMA3_TEXT = FamilyTensors(
    architecture="Gemma3ForCausalLM",
    classifier="Gemma3TextForSequenceClassification",
    layer=GEMMA_NORMS | ATTENTION | QK_NORM | MLP,
)
