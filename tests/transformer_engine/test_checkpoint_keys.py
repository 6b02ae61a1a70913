"""What a checkpoint calls a tensor does not depend on the machine that wrote it."""

from typing import Any

import pytest
import torch

from service.spec import Fp8Spec
from service.spec.model_config import ModelConfig
from tests.megatron_backend.small_models import CONFIGS
from tests.transformer_engine.real_modules import on_cpu, on_cuda


def keys(model: Any) -> dict[str, Any]:
    """What is stored under which key: shape of the whole tensor and this rank's place in it."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.dist_checkpointing.utils import nested_values

    found = {}
    stored = list(nested_values(model.sharded_state_dict()))
    while stored:
        one = stored.pop()
        if isinstance(one, ShardedTensorFactory):
            # SwiGLU's two matrices, and experts, are stored apart from how they lie in memory.
            stored += list(nested_values(one.build()))
        elif isinstance(one, ShardedTensor):
            place = found.setdefault(one.key, set())
            place.add((one.global_shape, one.global_offset, one.local_shape, str(one.dtype)))
        else:
            found[one.key] = one.global_shape
    return found


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "name",
    ["llama", "qwen2", "qwen2-tied", "qwen3", "mistral", "qwen3_moe", "mixtral", "gemma3_text"],
)
def test_both_specs_store_the_same_tensors_under_the_same_keys(name: str) -> None:
    config = ModelConfig.from_hf(CONFIGS[name])
    ours, theirs = keys(on_cpu(config)), keys(on_cuda(config))
    weights = {key for key, value in theirs.items() if isinstance(value, set)}
    assert {key: ours.get(key) for key in weights} == {key: theirs[key] for key in weights}
    # What is left on either side is scales of FP8, empty without it.
    assert all(key.endswith("_extra_state") for key in set(ours) ^ set(theirs))
    assert {key for key, value in ours.items() if isinstance(value, set)} == weights


@pytest.mark.usefixtures("one_rank")
def test_emulated_scales_lie_where_transformer_engines_do() -> None:
    config = ModelConfig.from_hf(CONFIGS["qwen3"])
    fp8 = Fp8Spec(recipe="delayed", amax_history=4)
    ours, theirs = keys(on_cpu(config, fp8=fp8)), keys(on_cuda(config, fp8=fp8))
    scales = {key for key in theirs if "linear" in key and key.endswith("_extra_state")}
    assert scales
    assert scales <= set(ours)


@pytest.mark.usefixtures("one_rank")
def test_the_modules_are_transformer_engines() -> None:
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    model = on_cuda(ModelConfig.from_hf(CONFIGS["qwen3"]), fp8=Fp8Spec(recipe="tensorwise"))
    found = {type(module).__name__ for module in model.modules()}
    assert {"TELayerNormColumnParallelLinear", "TERowParallelLinear"} <= found
    assert any(isinstance(module, TransformerEngineBaseModule) for module in model.modules())
    assert next(model.parameters()).dtype == torch.bfloat16
    # What keeps filler at 0 is in place there too.
    assert model.decoder._forward_pre_hooks
    for layer in model.decoder.layers:
        assert layer.self_attention.core_attention._forward_hooks
