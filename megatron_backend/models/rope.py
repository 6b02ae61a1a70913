"""Frequencies of rotary position embeddings (RoFormer, arXiv 2104.09864, equation 15)."""

import math

import torch
from torch import Tensor

from megatron_backend.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] float32: how far each pair of dimensions turns per position, in radians."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1's rule: waves that turn often within the original context stay as they are, those
    that turn seldom are stretched by `factor`, and between the two borders it is a blend."""
    turns = rope.original_max_positions * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / rope.factor
