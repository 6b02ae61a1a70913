"""The config of a Llama of given sizes, and the shapes of its tensors."""

from typing import Any

_FIXED = {
    "model_type": "llama",
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
}


def hf_config(sizes: dict[str, int]) -> dict[str, Any]:
    """As in config.json."""
    return {**_FIXED, **sizes}


def shapes(sizes: dict[str, int]) -> list[tuple[tuple[int, ...], int | None]]:
    """Each tensor's shape, and the dimension that tensor parallelism cuts (None: not at all)."""
    hidden, ffn = sizes["hidden_size"], sizes["intermediate_size"]
    head = hidden // sizes["num_attention_heads"]
    qkv = hidden + 2 * head * sizes["num_key_value_heads"]
    layer: list[tuple[tuple[int, ...], int | None]] = [
        ((hidden,), None),
        ((qkv, hidden), 0),
        ((hidden, hidden), 1),
        ((hidden,), None),
        ((2 * ffn, hidden), 0),
        ((hidden, ffn), 1),
    ]
    ends: list[tuple[tuple[int, ...], int | None]] = [((sizes["vocab_size"], hidden), 0)] * 2
    return [*ends, ((hidden,), None), *layer * sizes["num_hidden_layers"]]
