"""Entropies and log-probs of other tokens, with gradient, in every layout: against transformers.

The reference is transformers' own model in double precision, with torch's log_softmax and autograd.
"""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from algorithms.batch import Normalizer
from megatron_backend.models.tensors import SINGLE_FILE, RandomTensors
from service.spec import GrpoSpec, SftSpec
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.small_models import CONFIGS
from tests.megatron_backend.training.candidate_runs import (
    TEMPERATURE,
    batch_with_candidates,
    train,
    train_without_entropy,
    weighed,
)

MODELS = ["qwen3", "qwen2-tied"]
CUTS = [{"micro_batch_tokens": 24}, {"packing": False, "micro_batch_size": 2}]
LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(pp=2),
    Layout(cp=2),
    Layout(dp=2),
]


def reference(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of one step, by transformers."""
    source = RandomTensors(ModelConfig.from_hf(CONFIGS[name]), seed=1)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**CONFIGS[name])
    ).double()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(source.read(key))
    batch = batch_with_candidates()
    logits = model(batch.tokens).logits / TEMPERATURE
    everything = torch.log_softmax(logits, dim=-1)[:, :-1]
    everything = torch.cat([torch.zeros_like(everything[:, :1]), everything], dim=1)
    log_probs = everything.gather(-1, batch.tokens.unsqueeze(-1)).squeeze(-1)
    entropy = -(everything.exp() * everything).sum(-1)
    said = everything.gather(-1, batch.candidates["candidate_ids"])
    loss = weighed(log_probs, entropy, said, batch) / Normalizer.of(batch).tokens
    loss.backward()
    gradient = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradient


@pytest.fixture(scope="module")
def references() -> dict[str, tuple[float, dict[str, torch.Tensor]]]:
    return {name: reference(name) for name in MODELS}


@pytest.mark.parametrize(
    "layout",
    [
        *LAYOUTS,
        pytest.param(Layout(tp=2, cp=2, sequence_parallel=True), marks=pytest.mark.slow),
        pytest.param(Layout(tp=2, pp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_all_that_a_policy_says_equals_transformers(
    ranks: Ranks,
    references: dict[str, tuple[float, dict[str, torch.Tensor]]],
    tmp_path: Path,
    layout: Layout,
) -> None:
    answers = ranks.run(layout, train, layout, MODELS, CUTS, tmp_path)
    for place, name in enumerate(MODELS):
        loss, gradient = references[name]
        norm = torch.cat([tensor.flatten() for tensor in gradient.values()]).norm()
        for cut in range(len(CUTS)):
            for answer in answers:
                assert answer[place][cut].loss == pytest.approx(loss, rel=1e-5)
            found = load_file(tmp_path / f"{name}-{cut}" / SINGLE_FILE)
            assert found.keys() == gradient.keys()
            for key, tensor in gradient.items():
                assert (found[key] - tensor).abs().max() <= 3e-6 * norm, key


@pytest.mark.parametrize("algorithm", [SftSpec(), GrpoSpec(kl_coef=0.1)], ids=["sft", "grpo"])
def test_without_a_loss_on_entropies_their_gradient_costs_nothing(
    ranks: Ranks, algorithm: SftSpec | GrpoSpec
) -> None:
    (share,) = ranks.run(Layout(), train_without_entropy, algorithm)
    assert share.gradient_norm > 0


def test_a_loss_on_entropies_computes_their_gradient(ranks: Ranks) -> None:
    """So that the test above can fail."""
    with pytest.raises(RuntimeError, match="the gradient of an entropy was computed"):
        ranks.run(Layout(), train_without_entropy, GrpoSpec(entropy_coef=0.1))
