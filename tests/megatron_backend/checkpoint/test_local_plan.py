from typing import Any

from service.spec.layout import Layout
from tests.megatron_backend.ranks import Ranks


def plan_twice(_rank: int) -> None:
    """A plan is kept while names, shapes and places are the same, whatever the values are."""
    import io

    import torch
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    from megatron_backend.checkpoint.local_plan import LocalPlan

    def state(value: float, *, rows: int = 4, layer: int = 1) -> dict[str, list[Any]]:
        of_layer = ShardedTensor.from_rank_offsets(
            "layers.weight", torch.full((rows, 2), value), (0, layer, 3), prepend_axis_num=1
        )
        norm = ShardedTensor.from_rank_offsets("norm", torch.full((2,), value))
        words = ShardedObject("words", {"value": value}, (1,), (0,))
        return {"layers.weight": [of_layer], "norm": [norm], words.unique_key: [words]}

    first = LocalPlan(state(1.0))
    assert first.for_state(state(2.0)) is first
    parts = {item.index.fqn: part for item, part in first.parts(state(2.0))}
    assert torch.equal(parts["layers.weight"], torch.full((1, 4, 2), 2.0))
    assert torch.equal(parts["norm"], torch.full((2,), 2.0))
    words = io.BytesIO(parts["words/shard_0_1"].getvalue())
    assert torch.load(words, weights_only=True) == [{"value": 2.0}]
    for other in (state(1.0, rows=3), state(1.0, layer=2), {"norm": state(1.0)["norm"]}):
        changed = first.for_state(other)
        assert changed is not first
        assert len(list(changed.parts(other))) == len(other)


def test_a_plan_is_for_states_that_look_the_same(ranks: Ranks) -> None:
    ranks.run(Layout(dp=2), plan_twice)
