"""What Megatron's dynamic engine cannot do without CUDA, done by torch: paged flash attention.

`installed()` puts it in the kernel's place, so that tests run the engine itself, its scheduler,
blocks and bookkeeping, on a CPU.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


def _paged_attention(
    _attention: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _max_query: Any,
    _max_key: Any,
    cu_seqlens_q: Tensor,
    _cu_seqlens_k: Tensor,
    seqlens_k: Tensor,
    block_table: Tensor,
    is_decode_only: bool,
    softmax_offset: Tensor | None = None,
) -> Tensor:
    """q [tokens, 1, heads, d]; k, v [blocks, block, KV heads, d]; one request at a time."""
    assert softmax_offset is None
    output = torch.zeros_like(q)
    for request, keys in enumerate(seqlens_k.tolist()):
        first, last = (
            (request, request + 1)
            if is_decode_only
            else cu_seqlens_q[request : request + 2].tolist()
        )
        if keys == 0 or first == last:
            continue  # padding of the batch
        blocks = block_table[request].clamp(min=0)
        queries = last - first
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        attended = F.scaled_dot_product_attention(
            q[first:last, 0].transpose(0, 1),
            k[blocks].flatten(0, 1)[:keys].transpose(0, 1),
            v[blocks].flatten(0, 1)[:keys].transpose(0, 1),
            attn_mask=mask,
            enable_gqa=True,
        )
        output[first:last, 0] = attended.transpose(0, 1)
    return output


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Replaces the kernel while the context is open."""
    from megatron.core.inference.contexts import dynamic_context
    from megatron.core.transformer import attention

    with pytest.MonkeyPatch.context() as patch:
        # Without the Triton kernel Megatron fills its blocks with torch operations of its own.
        patch.setattr(dynamic_context, "triton_append_key_value_cache", None)
        # einops comes with Transformer Engine; its one use here is 's b h d -> s b (h d)'.
        patch.setattr(attention, "rearrange", lambda tensor, _pattern: tensor.flatten(-2))
        patch.setattr(attention, "is_fa_min_version", lambda _version: True)
        patch.setattr(attention.Attention, "flash_decode_and_prefill", _paged_attention)
        yield
