"""Our import and export against Megatron-Bridge's, tensor by tensor, on the same modules.

Mixtral is not among the families: Megatron-Bridge does not know it.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_backend.models.tensors import SINGLE_FILE, SafetensorsFolder
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from tests.megatron_backend.small_models import read_config, save_random
from tests.transformer_engine.real_modules import cuda_seems_present, on_cuda

FAMILIES = ["llama", "qwen2", "qwen2-tied", "qwen3", "mistral", "qwen3_moe"]


def bridge_of(folder: Path) -> Any:
    """Megatron-Bridge's converter for a folder of Hugging Face files."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    AutoMapping.register_module_type("TokenWeightedRouter", "replicated")
    return AutoBridge.from_hf_pretrained(folder)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", FAMILIES)
def test_import_and_export_are_equal_to_the_bit(name: str, tmp_path: Path) -> None:
    from megatron_backend.models.weights import load_weights

    # Megatron-Bridge pads no vocabulary here; 104 needs no padding on either side.
    save_random(name, tmp_path, vocab_size=104, torch_dtype="bfloat16")
    config = ModelConfig.from_hf(read_config(tmp_path))
    ours, theirs = on_cuda(config), on_cuda(config)
    load_weights([ours], config, SafetensorsFolder(tmp_path))
    with cuda_seems_present(), torch.no_grad():
        for parameter in theirs.parameters():
            parameter.fill_(torch.nan)
        bridge = bridge_of(tmp_path)
        bridge.load_hf_weights([theirs])
        exported = dict(bridge.export_hf_weights([ours], cpu=True, show_progress=False))
    expected = dict(theirs.named_parameters())
    for name_in_model, parameter in ours.named_parameters():
        assert torch.equal(parameter, expected[name_in_model]), name_in_model
    files = load_file(tmp_path / "model.safetensors")
    for tensor_name, tensor in files.items():
        assert torch.equal(tensor.to(torch.bfloat16), exported[tensor_name]), tensor_name
    assert set(files) <= set(exported)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", [*FAMILIES, "mixtral", "gemma3_text"])
def test_our_export_of_the_same_modules_is_equal_to_the_byte(name: str, tmp_path: Path) -> None:
    """Experts lie in Transformer Engine's grouped layers there, norms in its linear ones."""
    from megatron_backend.models.export import export_hf
    from megatron_backend.models.weights import load_weights

    source, target = tmp_path / "source", tmp_path / "target"
    save_random(name, source).bfloat16().save_pretrained(source)
    config = ModelConfig.from_hf(read_config(source))
    model = on_cuda(config)
    modules = {type(module).__name__ for module in model.modules()}
    assert ("TEColumnParallelGroupedLinear" in modules) == (config.moe is not None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    load_weights([model], config, SafetensorsFolder(source))
    export_hf([model], config, Layout(), target)
    assert (target / SINGLE_FILE).read_bytes() == (source / SINGLE_FILE).read_bytes()
    assert read_config(target)["vocab_size"] == 101  # padded to 104 inside
