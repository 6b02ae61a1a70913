"""Mixtral: its experts have names of their own, w1 the gate, w3 the other, w2 the way back."""

from megatron_backend.models.families.family import ATTENTION, NORMS, FamilyTensors, experts

MIXTRAL = FamilyTensors(
    architecture="MixtralForCausalLM",
    classifier="MixtralForSequenceClassification",
    layer=NORMS
    | ATTENTION
    | experts(
        router="block_sparse_moe.gate.weight",
        gate="block_sparse_moe.experts.{expert}.w1.weight",
        up="block_sparse_moe.experts.{expert}.w3.weight",
        down="block_sparse_moe.experts.{expert}.w2.weight",
    ),
)
