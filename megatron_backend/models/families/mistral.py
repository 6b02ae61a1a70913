"""Mistral: the tensors of Llama; its sliding window is in the config."""

from megatron_backend.models.families.family import ATTENTION, MLP, NORMS, FamilyTensors

MISTRAL = FamilyTensors(
    architecture="MistralForCausalLM",
    classifier="MistralForSequenceClassification",
    layer=NORMS | ATTENTION | MLP,
)
