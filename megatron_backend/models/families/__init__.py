"""The tensors of each family; what their configs mean is in `service.spec.model_families`."""

from megatron_backend.models.families.family import FamilyTensors
from megatron_backend.models.families.gemma2 import GEMMA2
from megatron_backend.models.families.gemma3_text import GEMMA3_TEXT
from megatron_backend.models.families.llama import LLAMA
from megatron_backend.models.families.mistral import MISTRAL
from megatron_backend.models.families.mixtral import MIXTRAL
from megatron_backend.models.families.qwen2 import QWEN2
from megatron_backend.models.families.qwen3 import QWEN3
from megatron_backend.models.families.qwen3_moe import QWEN3_MOE
from service.spec.model_families import Family

FAMILIES: dict[Family, FamilyTensors] = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3_TEXT,
}
