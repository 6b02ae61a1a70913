"""What a load needs no second memory for."""

import pytest
import torch

from service.spec.layout import Layout
from tests.megatron_backend.checkpoint import optimizer_ranks
from tests.megatron_backend.ranks import Ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_state_of_one_copy_is_loaded_to_where_it_is(ranks: Ranks, dtype: torch.dtype) -> None:
    (found,) = ranks.run(Layout(), optimizer_ranks.tensors_to_load, dtype)
    asked, there = found
    assert asked
    assert asked <= there
