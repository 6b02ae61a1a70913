"""The CPU's attention against attention written plainly, and against Megatron's own rotations.

Checks run in a rank's process, which has Megatron in memory.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from megatron_backend.training.sequence import Cut, local_slots
from service.spec.layout import Layout
from tests.megatron_backend.ranks import Ranks

if TYPE_CHECKING:
    from megatron_backend.models.attention import SdpaAttention
    from megatron_backend.models.packing import PackedSequences

HEADS, GROUPS, WIDTH = 6, 2, 8


def core_attention(
    *, window: int | None = None, softcap: float | None = None, cp: Any = None, **settings: Any
) -> "SdpaAttention":
    """Attention of one layer as Megatron makes it."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_backend.models.attention import SdpaAttention

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        window_size=None if window is None else (window, 0),
        **{"attention_dropout": 0.0} | settings,
    )
    return SdpaAttention(
        config=config,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        cp_comm_type=None,
        softmax_scale=None,
        pg_collection=None if cp is None else SimpleNamespace(cp=cp),
        softcap=softcap,
    )


def packed(lengths: list[int]) -> "PackedSequences":
    from megatron_backend.models.packing import packed_sequences

    return packed_sequences(lengths, torch.cat([torch.arange(length) for length in lengths]))


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, *, window: int | None, softcap: float | None
) -> Tensor:
    """[T, heads, d] of one sequence, score by score in float64."""
    shared = HEADS // GROUPS
    query, key, value = query.double(), key.double(), value.double()
    rows = []
    for place in range(len(query)):
        first = 0 if window is None else max(place - window, 0)
        heads = []
        for head in range(HEADS):
            keys, values = (part[first : place + 1, head // shared] for part in (key, value))
            scores = keys @ query[place, head] / WIDTH**0.5
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            heads.append(scores.softmax(0) @ values)
        rows.append(torch.stack(heads))
    return torch.stack(rows).float()


def random_heads(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [*shape, heads, d], as slices of one projection."""
    joint = torch.randn(*shape, HEADS + 2 * GROUPS, WIDTH, requires_grad=True)
    query, key, value = joint.split([HEADS, GROUPS, GROUPS], dim=-2)
    return query, key, value


KINDS = [(None, None), (3, None), (None, 1.5), (2, 0.7)]
"""Windows and caps of scores."""


def check_packed_sequences(_rank: int) -> None:
    """Values and gradients equal those of plain attention over each sequence alone."""
    for lengths in ([1, 7, 12, 4], [9]):
        for window, softcap in KINDS:
            query, key, value = random_heads(sum(lengths), 1)
            attention = core_attention(window=window, softcap=softcap)
            actual = attention(query, key, value, None, packed_seq_params=packed(lengths))
            alone = zip(*(part[:, 0].split(lengths) for part in (query, key, value)), strict=True)
            expected = torch.cat(
                [plain_attention(*parts, window=window, softcap=softcap) for parts in alone]
            ).view_as(actual)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
            weights = torch.randn_like(actual)
            inputs = (query, key, value)
            found = torch.autograd.grad((actual * weights).sum(), inputs, retain_graph=True)
            wanted = torch.autograd.grad((expected * weights).sum(), inputs)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def check_padded_rows(_rank: int) -> None:
    for window, softcap in KINDS:
        query, key, value = random_heads(10, 3)
        actual = core_attention(window=window, softcap=softcap)(query, key, value, None)
        for column in range(3):
            parts = (part[:, column] for part in (query, key, value))
            alone = plain_attention(*parts, window=window, softcap=softcap)
            torch.testing.assert_close(actual[:, column], alone.flatten(1), rtol=1e-5, atol=1e-5)


def check_neighbours(_rank: int) -> None:
    inputs = [torch.randn(18, 1, count, WIDTH) for count in (HEADS, GROUPS, GROUPS)]
    for window, softcap in KINDS:
        attention, sequences = core_attention(window=window, softcap=softcap), packed([5, 6, 7])
        before = attention(*inputs, None, packed_seq_params=sequences)
        for tensor in inputs:
            tensor[:5] = torch.randn_like(tensor[:5])
            tensor[11:] = torch.randn_like(tensor[11:])
        after = attention(*inputs, None, packed_seq_params=sequences)
        assert torch.equal(after[5:11], before[5:11])
        assert not torch.equal(after[:5], before[:5])


def check_refusals(_rank: int) -> None:
    from megatron_backend.models.attention import SdpaAttention

    for settings, message in (
        ({"attention_dropout": 0.1}, "no attention dropout"),
        ({"softmax_type": "learnable"}, "no softmax offsets"),
        ({"apply_query_key_layer_scaling": True}, "no scores scaled by the layer's number"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            core_attention(**settings)
    make: Callable[..., Any] = SdpaAttention
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        make(softmax_offset=1.0)
    with pytest.raises(NotImplementedError, match="without mask or bias"):
        core_attention()(*random_heads(3, 1), torch.ones(1))


def check_rotations(_rank: int) -> None:
    """Against the function that Megatron applies to packed sequences."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd

    from megatron_backend.models.rotary import _Rotation, rotation_table

    sequences = packed([4, 1, 9])
    heads = torch.randn(14, 1, HEADS, WIDTH, requires_grad=True)
    angles = torch.outer(torch.arange(9.0), torch.rand(WIDTH // 2)).repeat(1, 2)[:, None, None]
    one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    expected = _apply_rotary_pos_emb_thd(
        heads[:, 0], sequences.cu_seqlens_q, angles, mscale=1.3, cp_group=one
    )
    table = rotation_table(angles, sequences, torch.float32, scale=1.3)
    actual = _Rotation.apply(heads, *table)
    torch.testing.assert_close(actual[:, 0], expected, rtol=1e-6, atol=1e-6)
    weights = torch.randn(14, HEADS, WIDTH)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), heads, retain_graph=True)
    (found,) = torch.autograd.grad((actual[:, 0] * weights).sum(), heads)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert rotation_table(angles, sequences, torch.float32, scale=1.3)[0] is table[0]
    other = rotation_table(2 * angles, sequences, torch.float32, scale=1.3)
    assert not torch.equal(other[0], table[0])


@pytest.mark.parametrize(
    "check",
    [
        check_packed_sequences,
        check_padded_rows,
        check_neighbours,
        check_refusals,
        check_rotations,
    ],
)
def test_attention(ranks: Ranks, check: Callable[[int], None]) -> None:
    ranks.run(Layout(), check)


def shared_attention(
    rank: int, lengths: list[int], heads: list[Tensor], weights: Tensor
) -> list[list[Tensor]]:
    """This rank's slots, its part of the result, and of the gradients, for each kind."""
    from megatron.core import parallel_state

    cut = Cut(cp=2, cp_rank=rank)
    mine = torch.cat([local_slots(part, cut) for part in torch.arange(24).split(lengths)])
    cp = parallel_state.get_context_parallel_group()
    results = []
    for window, softcap in KINDS:
        local = [tensor[mine].requires_grad_() for tensor in heads]
        attention = core_attention(window=window, softcap=softcap, cp=cp)
        result = attention(*local, None, packed_seq_params=packed(lengths))
        found = torch.autograd.grad((result * weights[mine]).sum(), local)
        results.append([mine, result.detach(), *found])
    return results


def one_process(
    _rank: int, lengths: list[int], heads: list[Tensor], weights: Tensor
) -> list[list[Tensor]]:
    """The whole result and gradients, for each kind."""
    results = []
    for window, softcap in KINDS:
        whole = [tensor.clone().requires_grad_() for tensor in heads]
        attention = core_attention(window=window, softcap=softcap)
        result = attention(*whole, None, packed_seq_params=packed(lengths))
        found = torch.autograd.grad((result * weights).sum(), whole)
        results.append([result.detach(), *found])
    return results


def test_context_parallel_ranks_see_all_that_comes_before(ranks: Ranks) -> None:
    lengths = [8, 4, 12]
    heads = [torch.randn(24, 1, count, WIDTH) for count in (HEADS, GROUPS, GROUPS)]
    weights = torch.randn(24, 1, HEADS * WIDTH)
    (expected,) = ranks.run(Layout(), one_process, lengths, heads, weights)
    parts = ranks.run(Layout(cp=2), shared_attention, lengths, heads, weights)
    assert sorted(torch.cat([part[0][0] for part in parts]).tolist()) == list(range(24))
    for part in parts:
        for (mine, *found), wanted in zip(part, expected, strict=True):
            for actual, reference in zip(found, wanted, strict=True):
                torch.testing.assert_close(actual, reference[mine], rtol=1e-5, atol=1e-5)
