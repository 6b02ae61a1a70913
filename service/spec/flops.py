"""How much a step has to compute, and how much a GPU could.

Model FLOPs utilization (MFU; PaLM, arXiv 2204.02311, appendix B) is the operations that the model
itself asks for, over those that the GPUs could have done meanwhile. What is computed twice to save
memory, and padding, count as time, not as work.
"""

import re
from collections import Counter
from collections.abc import Iterable

from service.spec.model_config import ModelConfig

OPERATIONS = 6
"""For each weight and token: a product and a sum, forward and twice backward."""

_DENSE_BF16 = {
    "A10": 1.25e14,
    "A100": 3.12e14,
    "L4": 1.21e14,
    "L40": 1.81e14,
    "L40S": 3.62e14,
    "H100 PCIe": 7.56e14,
    "H100 NVL": 8.35e14,
    "H100": 9.89e14,
    "H200 NVL": 8.35e14,
    "H200": 9.89e14,
    "GH200": 9.89e14,
    "B200": 2.25e15,
    "GB200": 2.5e15,
}
"""Of a GPU, in operations a second without sparsity, by NVIDIA's data sheets."""


def update_flops(model: ModelConfig, lengths: Iterable[int], predicted: int) -> float:
    """Operations of one forward and backward pass.

    Attention is causal, and within its window where a layer has one. The output layer counts for
    the tokens that are trained, since no other token needs it. A head of scores is left out.

    Args:
        model: what is trained.
        lengths: tokens of each row.
        predicted: tokens of all rows that are predicted and trained.
    """
    rows = list(lengths)
    windows = Counter(model.window_of(layer) for layer in range(model.num_layers))
    products = model.num_layers * active_weights(model) * sum(rows)
    products += model.vocab_size * model.hidden_size * predicted
    # A query meets a key in two products of head_dim each: the score, and what the value adds.
    pairs = sum(layers * _pairs(n, window) for window, layers in windows.items() for n in rows)
    products += 2 * model.num_heads * model.head_dim * pairs
    return float(OPERATIONS * products)


def active_weights(model: ModelConfig) -> int:
    """Weights of a layer's matrices that one token is multiplied with."""
    if model.moe is None:
        return model.attention_weights + model.mlp_parameters
    router = model.moe.num_experts * model.hidden_size
    return model.attention_weights + model.moe.top_k * model.mlp_parameters + router


def _pairs(length: int, window: int | None) -> int:
    """How many (query, key) pairs of a row see each other."""
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def peak_flops(gpu: str) -> float | None:
    """Dense bf16 operations a second of a GPU that CUDA calls so.

    None of one that is not known, and of a part of one (MIG, vGPU), whose share is not.
    """
    if re.search(r"\bMIG\b|-\d+[A-Z]\b(?!-)", gpu):
        return None
    for name in sorted(_DENSE_BF16, key=len, reverse=True):
        words = r"[ -].*\b".join(map(re.escape, name.split()))
        if re.search(rf"\b{words}\b", gpu):
            return _DENSE_BF16[name]
    return None
