"""Reward models in and out, as transformers' classifiers of one label, and heads that are new."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from megatron_backend.models.mapping import tensor_shapes
from megatron_backend.models.tensors import SINGLE_FILE, RandomTensors
from megatron_backend.training.shares import gather_rows
from service.spec import ResolvedModel
from service.spec.algorithm import Head
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.small_models import CONFIGS, read_config, save_random
from tests.megatron_backend.training.value_runs import random_pairs

LAYOUTS = [
    Layout(tp=2),
    Layout(pp=2),
    Layout(dp=2),
    Layout(cp=2),
    Layout(tp=2, sequence_parallel=True),
]
SEED = 7


def save_classifier(name: str, folder: Path, **changes: object) -> object:
    """A random reward model of transformers' own, and its files."""
    return save_random(
        name, folder, kind=AutoModelForSequenceClassification, **{"num_labels": 1} | changes
    )


def copy_through(
    _rank: int,
    root: Path,
    names: Sequence[str],
    layout: Layout,
    head: Head,
    new_head: bool,
) -> list[object]:
    """Imports models under `root`, exports them to NAME-LAYOUT; their scores of `random_pairs`."""
    from megatron_backend.models.build import build_model
    from megatron_backend.models.export import export_hf
    from megatron_backend.models.tensors import SafetensorsFolder
    from megatron_backend.training.step import Trainer
    from megatron_backend.workers.weights import load_resolved
    from service.spec import OptimizerSpec
    from tests.megatron_backend.training.value_runs import PairsAndReturns

    scores: list[object] = []
    for name in names:
        folder = root / name
        start = ResolvedModel(
            kind="huggingface", config=read_config(folder), tokenizer="", weights=str(folder)
        )
        config = ModelConfig.from_hf(start.config)
        model = build_model(config, layout, head=head)
        load_resolved(model, config, start, seed=SEED, new_head=new_head)
        like = SafetensorsFolder(folder).file_of
        export_hf(model, config, layout, root / f"{name}-{layout}", like=like)
        trainer = Trainer(
            model,
            config,
            layout,
            loss=PairsAndReturns(),
            optimizer_spec=OptimizerSpec(),
            dtype=torch.float32,
        )
        scores.append(trainer.scores(random_pairs()))
    return scores


def fits(name: str, layout: Layout) -> bool:
    """Experts under tensor parallelism need the sequence cut too."""
    experts = "num_experts_per_tok" in CONFIGS[name]
    return not (experts and layout.tp > 1 and not layout.sequence_parallel)


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model of every family."""
    root = tmp_path_factory.mktemp("classifiers")
    for name in CONFIGS:
        save_classifier(name, root / name)
    return root


@pytest.mark.parametrize("layout", [Layout(), *LAYOUTS], ids=str)
def test_every_family_comes_out_as_it_went_in_with_equal_scores(
    ranks: Ranks, classifiers: Path, layout: Layout
) -> None:
    """The files of transformers' classifier, its config, and its scores, in every layout."""
    names = [name for name in CONFIGS if fits(name, layout)]
    answers = ranks.run(layout, copy_through, classifiers, names, layout, "value", False)
    batch = random_pairs()
    for index, name in enumerate(names):
        source, target = classifiers / name, classifiers / f"{name}-{layout}"
        assert (target / SINGLE_FILE).read_bytes() == (source / SINGLE_FILE).read_bytes()
        for field in ("architectures", "id2label", "label2id"):
            assert read_config(target)[field] == read_config(source)[field]
        assert not (target / "generation_config.json").exists()
        scores = gather_rows(layout, [answer[index] for answer in answers])
        assert scores.std() > 0.1
        model = AutoModelForSequenceClassification.from_pretrained(target)
        for tokens, length, score in zip(batch.tokens, batch.lengths.tolist(), scores, strict=True):
            with torch.no_grad():
                theirs = model(tokens[None, :length]).logits
            assert theirs.shape == (1, 1)
            assert abs(float(theirs) - float(score)) < 1e-4, name


@pytest.mark.parametrize("layout", [Layout(), *LAYOUTS], ids=str)
@pytest.mark.parametrize("name", ["qwen2-tied", "llama"])
def test_a_model_that_predicts_tokens_gets_a_new_head_from_the_jobs_seed(
    ranks: Ranks, tmp_path: Path, layout: Layout, name: str
) -> None:
    """The same one in every layout, and all else as it was; the output layer is gone."""
    save_random(name, tmp_path / name, max_shard_size=30_000)
    ranks.run(layout, copy_through, tmp_path, [name], layout, "value", True)
    target = tmp_path / f"{name}-{layout}"
    found = {k: v for file in target.glob("*.safetensors") for k, v in load_file(file).items()}
    source = tmp_path / name
    start = {k: v for file in source.glob("*.safetensors") for k, v in load_file(file).items()}
    config = ModelConfig.from_hf(CONFIGS[name])
    assert found.keys() == tensor_shapes(config, "value").keys()
    head = found.pop("score.weight")
    assert torch.equal(head, RandomTensors(config, SEED, "value").read("score.weight"))
    start.pop("lm_head.weight", None)
    assert found.keys() == start.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in start.items())
    model = AutoModelForSequenceClassification.from_pretrained(target)
    assert torch.equal(model.score.weight.detach(), head)
    assert model.config.num_labels == 1


def test_a_new_heads_scores_have_the_same_size_in_a_model_of_any_width() -> None:
    """Of a hidden state whose numbers are about 1; with `initializer_range` they would be 0.45 and
    1.81."""
    generator = torch.Generator().manual_seed(1)
    for width in (512, 8192):
        config = ModelConfig.from_hf(CONFIGS["llama"] | {"hidden_size": width})
        heads = [RandomTensors(config, seed, "value").read("score.weight") for seed in range(200)]
        states = torch.randn(width, generator=generator)
        scores = torch.cat(heads) @ states
        assert 0.8 < scores.std() < 1.2
    assert not torch.equal(heads[0], heads[1])


def test_weights_of_another_kind_of_model_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    layout = Layout()
    for name in ("llama", "qwen2-tied"):
        save_classifier(name, tmp_path / "reward" / name)
        save_random(name, tmp_path / "causal" / name)
        with pytest.raises(RuntimeError, match=r"holds a reward model: it has 'score\.weight'"):
            ranks.run(layout, copy_through, tmp_path / "reward", [name], layout, "vocabulary", True)
        with pytest.raises(RuntimeError, match="predicts tokens, where a reward model is needed"):
            ranks.run(layout, copy_through, tmp_path / "causal", [name], layout, "value", False)
    save_classifier("llama", tmp_path / "two", num_labels=2)
    with pytest.raises(RuntimeError, match=r"shape \[2, 32\]"):
        ranks.run(layout, copy_through, tmp_path, ["two"], layout, "value", True)


def test_a_part_of_another_kind_of_reward_model_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    save_classifier("llama", tmp_path / "llama")
    tensors = load_file(tmp_path / "llama" / SINGLE_FILE)
    save_file(tensors | {"score.bias": torch.zeros(1)}, tmp_path / "llama" / SINGLE_FILE)
    with pytest.raises(RuntimeError, match=r"no llama model has: 'score\.bias'"):
        ranks.run(Layout(), copy_through, tmp_path, ["llama"], Layout(), "value", False)


def step_tied(_rank: int, layout: Layout) -> tuple[float | None, list[str]]:
    """What a value model of a tied family says of its copies after a step, and its parameters."""
    from algorithms.batch import Normalizer
    from megatron_backend.training.tied import tied_difference
    from tests.megatron_backend.training.value_runs import value_trainer

    trainer = value_trainer("qwen2-tied", layout)
    batch = random_pairs()
    trainer.train_step(batch, Normalizer.of(batch), learning_rate=1e-2)
    names = [name for chunk in trainer.model for name, _ in chunk.named_parameters()]
    return tied_difference(trainer.model), [name for name in names if "layers" not in name]


def test_a_value_head_is_never_tied_to_the_embedding(ranks: Ranks) -> None:
    layout = Layout(pp=2)
    assert ranks.run(layout, step_tied, layout) == [
        (None, ["embedding.word_embeddings.weight"]),
        (None, ["decoder.final_layernorm.weight", "output_layer.weight"]),
    ]
