"""Frequencies of rotary position embeddings (RoFormer, arXiv 2104.09864, equation 15)."""

import math

import torch
from torch import Tensor

from service.spec.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] float32: how far each pair of dimensions turns per position, in radians."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    match rope.kind:
        case "default":
            return frequencies
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            kept = _kept_by_llama3(frequencies, rope)
        case "yarn":
            kept = _kept_by_yarn(rope, head_dim)
    return kept * frequencies + (1 - kept) * frequencies / rope.factor


def _kept_by_llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1's rule: waves that turn often within the original context stay as they are, those
    that turn seldom are stretched by `factor`, and between the two borders it is a blend."""
    turns = rope.original_max_positions * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return kept.clamp(0.0, 1.0)


def _kept_by_yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    """YaRN's ramp (arXiv 2309.00071, section 3.2), whose borders are dimensions, not rotations."""

    def dimension(rotations: float) -> float:
        """Which dimension turns so often within the original context."""
        wavelength = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # as transformers does, against a division by zero
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)
    return 1 - ramp.clamp(0.0, 1.0)
