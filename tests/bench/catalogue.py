"""The benchmarks, with their floors and aims."""

from functools import partial
from pathlib import Path
from typing import Any

from tests.bench import cases
from tests.bench.benchmark import (
    Benchmark,
    Result,
    Row,
    Side,
    Unequal,
    require_close,
    require_same,
)

_SIDES = "tests.bench.sides"
_BATCH = 16
_RATE = 1e-4
_PACKED_LINE = 2048


def _rows(size: cases.Size, steps: int, case: Path) -> None:
    cases.save_llama(size, case)
    cases.save_rows(size, case, rows=_BATCH * (steps + 1))


def _same_losses(ours: Result, peer: Result) -> None:
    require_close("losses", ours["losses"], peer["losses"], relative=1e-5)


def _our_sft(**options: Any) -> Side:
    options = {"batch": _BATCH, "rate": _RATE, **options}
    return Side(module=f"{_SIDES}.ours_sft", python="planish", options=options)


def _trl_sft(**options: Any) -> Side:
    options = {"batch": _BATCH, "rate": _RATE, **options}
    return Side(module=f"{_SIDES}.trl_sft", python="peers", options=options)


def sft_step(size: cases.Size, *, steps: int) -> Benchmark:
    """B1: our packed training step against TRL's padded one."""
    return Benchmark(
        id="B1",
        case=f"B1-{size}",
        about=f"{steps} SFT steps of 16 rows after one, log-normal lengths (median 100), fp32",
        prepare=partial(_rows, size, steps),
        ours=_our_sft(steps=steps, packing=True),
        peer=_trl_sft(steps=steps, packing=0),
        check=_same_losses,
        rows=(
            Row(
                name=f"SFT step, {size}",
                peer="TRL SFTTrainer, padded",
                floor=1.5,
                target=2.5,
                ours="steps",
                theirs="steps",
                limit="limit",
            ),
        ),
    )


def packing(size: cases.Size, *, steps: int) -> Benchmark:
    """B3: our padding-free step against the same step with every row padded to the longest."""
    return Benchmark(
        id="B3",
        case=f"B3-{size}",
        about=f"B1's rows, {steps} steps; the limit is padded tokens / real tokens",
        prepare=partial(_rows, size, steps),
        ours=_our_sft(steps=steps, packing=True),
        peer=_our_sft(steps=steps, packing=False),
        check=_same_losses,
        rows=(
            Row(
                name=f"packing, {size}",
                peer="our own step, padded",
                floor=0.8,
                target=0.9,
                ours="steps",
                theirs="steps",
                limit_ratio="padding_ratio",
                floor_is_share=True,
            ),
        ),
    )


def packing_of_trl(size: cases.Size, *, steps: int) -> Benchmark:
    """B3: our padding-free steps against TRL's packed lines over the same rows.

    The two cut the rows into steps differently, so nothing is learned while it is timed (the
    learning rate is 0), and the loss of all rows together must be equal.
    """
    return Benchmark(
        id="B3",
        case=f"B3-{size}-TRL",
        about=f"B1's rows, all {steps + 1} steps; TRL packs lines of {_PACKED_LINE} tokens",
        prepare=partial(_rows, size, steps),
        ours=_our_sft(steps=steps, packing=True, rate=0.0, time_all=True),
        peer=_trl_sft(steps=steps, packing=_PACKED_LINE, rate=0.0),
        check=_same_total,
        rows=(
            Row(
                name=f"packed SFT, {size}",
                peer="TRL SFTTrainer, packing bfd",
                floor=1.0,
                target=1.3,
                ours="steps",
                theirs="steps",
                limit="limit",
            ),
        ),
    )


def _same_total(ours: Result, peer: Result) -> None:
    require_same("trained tokens", sum(ours["trained"]), sum(peer["trained"]))

    def total(result: Result) -> float:
        pairs = zip(result["losses"], result["trained"], strict=True)
        return sum(loss * count for loss, count in pairs)

    require_close("loss of all rows", [total(ours)], [total(peer)], relative=1e-5)


def _prompts(size: cases.Size, count: int, length: int, case: Path) -> None:
    cases.save_llama(size, case)
    cases.save_prompts(size, case, count=count, length=length)


def _same_completions(ours: Result, peer: Result) -> None:
    require_same("greedy tokens", ours["tokens"], peer["tokens"])
    for row, (own, theirs) in enumerate(zip(ours["log_probs"], peer["log_probs"], strict=True)):
        if max(abs(a - b) for a, b in zip(own, theirs, strict=True)) > 1e-4:
            raise Unequal(f"log-probs of row {row} differ by more than 1e-4")
    for name in ("draws", "draw_log_probs"):
        lengths = [[len(row) for row in result[name]] for result in (ours, peer)]
        require_same(f"lengths of {name}", *lengths)


def decode(
    size: cases.Size,
    *,
    target: float,
    floor: float = 2.0,
    count: int = 16,
    length: int = 64,
    new: int = 128,
) -> Benchmark:
    """B4: completions with log-probs against transformers' `generate` with its cache."""
    return Benchmark(
        id="B4",
        case=f"B4-{size}",
        about=f"{count} prompts of {length} tokens, {new} new ones each, with log-probs, fp32",
        prepare=partial(_prompts, size, count, length),
        ours=Side(module=f"{_SIDES}.ours_decode", python="planish", options={"new": new}),
        peer=Side(
            module=f"{_SIDES}.hf_decode", python="peers", options={"new": new, "cache": None}
        ),
        check=_same_completions,
        rows=tuple(
            Row(
                name=f"{way} decode, {size}",
                peer="transformers generate, KV cache",
                floor=floor,
                target=target,
                ours=way,
                theirs=way,
                limit="limit",
            )
            for way in ("greedy", "sampled")
        ),
    )


_CHECKPOINT_SIZES = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1664,
}
_SYNC_SIZES = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "num_hidden_layers": 7,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 2816,
}


def _nothing(_case: Path) -> None:
    """Both sides make their own weights from a seed."""


def _same_bytes(ours: Result, peer: Result) -> None:
    headers = 2**18 / peer["bytes"]  # what is not tensors is as large in a small checkpoint
    require_close("bytes", [ours["bytes"]], [peer["bytes"]], relative=0.02 + headers)
    for loaded in ours["sums"][1:]:
        require_close("sums of the weights loaded", loaded, ours["sums"][0], relative=1e-12)


def checkpoint(sizes: dict[str, int] = _CHECKPOINT_SIZES) -> Benchmark:
    """B6: saves and loads against torch's distributed checkpoints."""
    rows = (
        ("save", "DCP save", "save", "save", 1.0, 1.2, "write limit"),
        ("async save's stall", "DCP save", "stall", "save", 2.0, 10.0, "copy limit"),
        ("async save's stall", "DCP async_save's stall", "stall", "stall", 2.0, 4.0, "copy limit"),
        ("load TP2 as PP2", "DCP load", "load pp2", "load pp2", 1.0, 1.0, None),
        ("load TP2 as TP1", "DCP load", "load tp1", "load tp1", 1.0, 1.0, None),
    )
    return Benchmark(
        id="B6",
        case="B6",
        about="weights, fp32 copies and Adam's moments, about 400 MB, two gloo ranks, with fsync",
        prepare=_nothing,
        ours=Side(
            module=f"{_SIDES}.ours_checkpoint",
            python="planish",
            options={"sizes": sizes},
            threads=1,
        ),
        peer=Side(
            module=f"{_SIDES}.dcp_checkpoint",
            python="peers",
            options={"sizes": sizes, "copies": 4},
            threads=1,
        ),
        check=_same_bytes,
        rows=tuple(
            Row(
                name=name,
                peer=peer,
                floor=floor,
                target=target,
                ours=ours,
                theirs=theirs,
                limit=limit,
            )
            for name, peer, ours, theirs, floor, target, limit in rows
        ),
    )


def _right_weights(ours: Result, peer: Result) -> None:
    require_close("bytes", [ours["bytes"]], [peer["bytes"]], relative=0.02)
    require_same("weights that arrived", (True, True), (ours["right"], peer["right"]))


def weight_sync(sizes: dict[str, int] = _SYNC_SIZES) -> Benchmark:
    """B7: two tensor-parallel trainers to a generator's process, against whole tensors in turn."""
    return Benchmark(
        id="B7",
        case="B7",
        about="400 MB of fp32 weights from TP2 ranks to a process of its own, plan made before",
        prepare=_nothing,
        ours=Side(
            module=f"{_SIDES}.ours_sync", python="planish", options={"sizes": sizes}, threads=1
        ),
        peer=Side(
            module=f"{_SIDES}.naive_sync", python="peers", options={"sizes": sizes}, threads=1
        ),
        check=_right_weights,
        rows=(
            Row(
                name="weight sync",
                peer="gloo broadcast, tensor by tensor",
                floor=1.5,
                target=3.0,
                ours="sync",
                theirs="broadcast",
                limit="limit",
            ),
            Row(
                name="weight sync",
                peer="torch.save through a pipe",
                floor=1.5,
                target=3.0,
                ours="sync",
                theirs="pipe",
                limit="limit",
            ),
        ),
    )


BENCHMARKS = (
    decode("7M", target=4.0),
    decode("50M", target=2.0),
    sft_step("7M", steps=8),
    packing("7M", steps=8),
    packing_of_trl("7M", steps=8),
    sft_step("50M", steps=3),
    weight_sync(),
    checkpoint(),
)
