"""Gemma 2: norms in front of and behind each block."""

from megatron_backend.models.families.family import ATTENTION, GEMMA_NORMS, MLP, FamilyTensors

GEMMA2 = FamilyTensors(
    architecture="Gemma2ForCausalLM",
    classifier="Gemma2ForSequenceClassification",
    layer=GEMMA_NORMS | ATTENTION | MLP,
)
