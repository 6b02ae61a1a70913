"""The layout does not change the maths: every layout against one process, on whole gradients.

The cases of a layout run in one start of its ranks; those of the single process that they are
compared with run once.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from algorithms.protocols import StepResult
from megatron_backend.models.tensors import SINGLE_FILE
from megatron_backend.training.shares import merge_step
from service.spec import GrpoSpec, SftSpec
from service.spec.layout import Layout
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.training.layout_runs import STEPS, Case, play
from tests.megatron_backend.training.value_runs import PairsAndReturns

GRPO = GrpoSpec(kl_coef=0.1, updates_per_rollout=2)
PACKED = {"micro_batch_tokens": 24}
PADDED = {"packing": False, "micro_batch_size": 2}
# Two stages cut seven layers unevenly. To the other layouts each layer is the same work again.
UNEVEN = {"num_hidden_layers": 7}
CHUNKS = {"num_hidden_layers": 4}
WIDE = {"vocab_size": 50_257, "num_hidden_layers": 2}
FEW_KV_HEADS = {"num_key_value_heads": 1}
# With one row a micro-batch, balance is asked for in the same micro-batches in every layout. With
# all rows packed in one, it is where there is no data parallelism.
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
ROW_BY_ROW = {"packing": False, "micro_batch_size": 1}
ALL_ROWS = {"micro_batch_size": 6}


def cases(*names: str) -> list[Case]:
    return [CASES[name] for name in names]


CASES = {
    case.name: case
    for case in (
        *(
            Case(name=name, model="qwen2-tied", algorithm=algorithm, sizes=sizes, options=options)
            for name, algorithm, sizes, options in (
                ("packed", SftSpec(), {}, PACKED),
                ("padded", GRPO, {}, PADDED),
                ("uneven", SftSpec(), UNEVEN, PACKED),
                ("uneven-padded", GRPO, UNEVEN, PADDED),
            )
        ),
        Case(name="untied", model="qwen3", algorithm=GRPO, options=PACKED),
        Case(name="wide", model="llama", algorithm=SftSpec(), sizes=WIDE, options=PACKED),
        Case(name="wide-tied", model="qwen2-tied", algorithm=SftSpec(), sizes=WIDE, options=PACKED),
        Case(name="few-kv", model="qwen3", algorithm=SftSpec(), sizes=FEW_KV_HEADS, options=PACKED),
        Case(name="kv-4", model="qwen2", algorithm=SftSpec(), options=PACKED),
        Case(name="chunks", model="qwen2-tied", algorithm=GRPO, sizes=CHUNKS, options=PACKED),
        Case(
            name="chunks-padded",
            model="llama3-tied",
            algorithm=SftSpec(),
            sizes=CHUNKS,
            options=PADDED,
        ),
        Case(name="experts", model="qwen3_moe-normed", algorithm=SftSpec(), options=PACKED),
        Case(name="experts-padded", model="qwen3_moe", algorithm=GRPO, options=PADDED),
        Case(
            name="balanced",
            model="mixtral",
            algorithm=SftSpec(),
            sizes=BALANCED,
            options=ROW_BY_ROW,
        ),
        Case(
            name="balanced-packed",
            model="mixtral",
            algorithm=SftSpec(),
            sizes=BALANCED,
            options=ALL_ROWS,
        ),
        Case(name="unbalanced", model="mixtral", algorithm=SftSpec(), options=ROW_BY_ROW),
        *(
            Case(
                name=f"{name}-{recompute}",
                model=model,
                algorithm=algorithm,
                sizes=sizes,
                options=PACKED | {"recompute": recompute},
            )
            for name, model, algorithm, sizes in (
                ("untied", "qwen3", GRPO, {}),
                ("chunks", "qwen2-tied", GRPO, CHUNKS),
                ("experts", "qwen3_moe-normed", SftSpec(), {}),
            )
            for recompute in ("full", "selective")
        ),
        *(
            Case(name=name, model=model, algorithm=PairsAndReturns(), head="value", **rest)
            for name, model, rest in (
                ("values", "qwen2-tied", {"options": PACKED}),
                ("values-padded", "qwen2-tied", {"options": PADDED}),
                ("values-uneven", "qwen2-tied", {"sizes": UNEVEN, "options": PACKED}),
                ("values-uneven-padded", "qwen2-tied", {"sizes": UNEVEN, "options": PADDED}),
                ("values-untied", "qwen3", {"options": PACKED}),
                ("values-chunks", "llama3-tied", {"sizes": CHUNKS, "options": PACKED}),
                ("values-experts", "qwen3_moe-normed", {"options": PACKED}),
            )
        ),
    )
}

VALUES = ["values", "values-padded", "values-untied"]
UNEVEN_VALUES = ["values-uneven", "values-uneven-padded", "values-untied"]

TWO_RANKS = [
    (Layout(tp=2), ["packed", "padded", "untied", "wide", "few-kv", *VALUES]),
    (
        Layout(pp=2),
        [
            "uneven",
            "uneven-padded",
            "untied",
            "wide-tied",
            "experts",
            "balanced",
            "balanced-packed",
            *UNEVEN_VALUES,
            "values-experts",
        ],
    ),
    (Layout(pp=2, pipeline_layers=(2, 5)), ["uneven", "values-uneven"]),
    (Layout(dp=2), ["packed", "padded", "experts", *VALUES]),
    (
        Layout(tp=2, sequence_parallel=True),
        ["packed", "padded", "untied", "few-kv", "experts", "balanced", *VALUES, "values-experts"],
    ),
    (
        Layout(cp=2),
        ["packed", "padded", "untied", "experts-padded", "balanced", "balanced-packed", *VALUES],
    ),
    (Layout(pp=2, vpp=2), ["chunks", "chunks-padded", "values-chunks"]),
    (Layout(dp=2, ep=2), ["experts", "experts-padded", "balanced", "values-experts"]),
    (Layout(cp=2, ep=2), ["experts", "balanced"]),
]
FOUR_RANKS = [
    (Layout(tp=2, pp=2), ["uneven", "uneven-padded", "values-uneven-padded"]),
    (Layout(tp=2, dp=2), ["packed", "padded"]),
    (Layout(pp=2, dp=2), ["uneven", "uneven-padded"]),
    (Layout(tp=4), ["kv-4"]),
    (Layout(tp=2, dp=2, ep=2, sequence_parallel=True), ["experts", "balanced"]),
    (Layout(pp=2, vpp=2, dp=2), ["chunks"]),
    (Layout(tp=2, cp=2, sequence_parallel=True), ["packed", "padded", "values"]),
]

type Train = Callable[[Layout, Sequence[Case]], dict[str, list[StepResult]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gradients lie in LAYOUT/CASE/STEP."""
    return tmp_path_factory.mktemp("gradients")


@pytest.fixture(scope="module")
def train(ranks: Ranks, folder: Path) -> Train:
    """Runs the cases that did not run in this layout yet; the merged result of each step."""
    done: dict[tuple[Layout, str], list[StepResult]] = {}

    def run(layout: Layout, wanted: Sequence[Case]) -> dict[str, list[StepResult]]:
        missing = [case for case in wanted if (layout, case.name) not in done]
        if missing:
            answers = ranks.run(layout, play, layout, missing, folder / str(layout))
            for index, case in enumerate(missing):
                shares = zip(*(answer[index] for answer in answers), strict=True)
                done[layout, case.name] = [merge_step(layout, step) for step in shares]
        return {case.name: done[layout, case.name] for case in wanted}

    return run


def assert_same(actual: list[StepResult], expected: list[StepResult]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.finite
        assert one.loss == pytest.approx(other.loss, rel=1e-5, abs=1e-7)
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-4)
        assert dict(one.metrics) == pytest.approx(dict(other.metrics), rel=1e-3, abs=1e-6)


def assert_same_gradients(actual: Path, expected: Path, norm: float) -> None:
    """Each tensor to 1e-4 of its largest value; what is 0 but for rounding, to 1e-7 of the norm."""
    ours, theirs = load_file(actual / SINGLE_FILE), load_file(expected / SINGLE_FILE)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        difference = (ours[name] - tensor).abs().max()
        assert difference <= 1e-4 * tensor.abs().max() + 1e-7 * norm, name


@pytest.mark.parametrize(
    ("layout", "names"), TWO_RANKS, ids=[str(layout) for layout, _ in TWO_RANKS]
)
def test_two_ranks_equal_one_process_e01_e05_e06_d10(
    train: Train, folder: Path, layout: Layout, names: list[str]
) -> None:
    """Among them: 7 layers on 2 stages (E01), fewer KV heads than tensor ranks (E05), 50257 tokens
    on 2 ranks (E06), fused QKV cut through its groups (D10)."""
    check(train, folder, layout, names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "names"), FOUR_RANKS, ids=[str(layout) for layout, _ in FOUR_RANKS]
)
def test_four_ranks_equal_one_process(
    train: Train, folder: Path, layout: Layout, names: list[str]
) -> None:
    check(train, folder, layout, names)


def check(train: Train, folder: Path, layout: Layout, names: list[str]) -> None:
    expected = train(Layout(), cases(*names))
    actual = train(layout, cases(*names))
    for name in names:
        assert expected[name][0].loss != expected[name][-1].loss
        assert_same(actual[name], expected[name])
        for step in range(STEPS):
            assert_same_gradients(
                folder / str(layout) / name / str(step),
                folder / str(Layout()) / name / str(step),
                expected[name][step].gradient_norm,
            )


@pytest.mark.parametrize(
    ("layout", "kept"),
    [
        (Layout(), "untied"),
        (Layout(tp=2, sequence_parallel=True), "untied"),
        (Layout(pp=2), "untied"),
        (Layout(pp=2, vpp=2), "chunks"),
        (Layout(cp=2), "untied"),
        (Layout(dp=2, ep=2), "experts"),
    ],
    ids=str,
)
def test_recomputed_activations_are_the_same(
    train: Train, folder: Path, layout: Layout, kept: str
) -> None:
    """To the bit: losses, metrics and whole gradients."""
    repeated = [f"{kept}-full", f"{kept}-selective"]
    results = train(layout, cases(kept, *repeated))
    for name in repeated:
        assert results[name] == results[kept]
        for step in range(STEPS):
            ours, plain = (
                load_file(folder / str(layout) / case / str(step) / SINGLE_FILE)
                for case in (name, kept)
            )
            assert ours.keys() == plain.keys()
            assert all(torch.equal(ours[key], plain[key]) for key in plain)


def test_balance_of_experts_is_part_of_the_gradient(train: Train, folder: Path) -> None:
    """Without it the same model has another gradient in its routers."""
    names = ("balanced", "unbalanced")
    train(Layout(), cases(*names))
    with_balance, without = (
        load_file(folder / str(Layout()) / name / "0" / SINGLE_FILE) for name in names
    )
    router = next(name for name in without if "gate.weight" in name)
    assert (with_balance[router] - without[router]).norm() > 0.01 * without[router].norm()
