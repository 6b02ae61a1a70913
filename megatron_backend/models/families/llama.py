"""Llama 2 and 3."""

from megatron_backend.models.families.family import ATTENTION, MLP, NORMS, FamilyTensors

LLAMA = FamilyTensors(
    architecture="LlamaForCausalLM",
    classifier="LlamaForSequenceClassification",
    layer=NORMS | ATTENTION | MLP,
)
