"""Which of our specs mean what the cases of the references mean.

A case of `golden/` is held to every spec that stands behind its name here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from service.spec import (
    AlgorithmSpec,
    CispoSpec,
    DapoSpec,
    DistillationSpec,
    DpoSpec,
    DrGrpoSpec,
    GrpoSpec,
    GspoSpec,
    KtoSpec,
    OrpoSpec,
    OverlongPenalty,
    PpoSpec,
    ReinforcePlusPlusSpec,
    RemaxSpec,
    RewardModelSpec,
    RlooSpec,
    RolloutCorrection,
    SftSpec,
    SimpoSpec,
)
from tests.parity.batches import GAE, VOCABULARY

type Cases = Mapping[str, Sequence[AlgorithmSpec]]
"""Case to specs."""

BY_ROW = "seq-mean-token-mean"
BY_SUM = "seq-mean-token-sum"
WIDE = {"clip_low": 0.2, "clip_high": 0.2}
BOTH = RolloutCorrection(low=0.5, high=2.0)
MASKED = RolloutCorrection(low=0.5, high=2.0, mode="mask")


# Offline: likelihoods, reward models, pairs, labels.

LIKELIHOODS: Cases = {
    "sft/token-mean": [SftSpec()],
    "sft/seq-mean-token-mean": [SftSpec(loss_aggregation="seq-mean-token-mean")],
    "sft/seq-mean-token-sum": [SftSpec(loss_aggregation="seq-mean-token-sum")],
}
OF_40_TOKENS: Cases = {"sft/token-mean-of-40": [SftSpec()]}
REWARD_MODELS: Cases = {
    "reward-model/plain": [RewardModelSpec(margins=False)],
    "reward-model/log-exp": [RewardModelSpec(margins=False)],
    "reward-model/margin": [RewardModelSpec()],
    "reward-model/centered": [RewardModelSpec(margins=False, center_coef=0.01)],
}
PAIRS: Cases = {
    "dpo/sigmoid": [DpoSpec()],
    "dpo/sigmoid-length-normalized": [DpoSpec(length_normalized=True)],
    "dpo/sigmoid-and-likelihood": [DpoSpec(nll_coef=0.3)],
    "dpo/conservative": [DpoSpec(label_smoothing=0.1)],
    "dpo/robust": [DpoSpec(loss="robust", label_smoothing=0.1)],
    "dpo/hinge": [DpoSpec(loss="hinge")],
    "dpo/ipo": [DpoSpec(loss="ipo")],
    "dpo/ipo-length-normalized": [DpoSpec(loss="ipo", length_normalized=True)],
    "simpo": [SimpoSpec()],
}
LABELS: Cases = {
    "kto/equal-weights": [KtoSpec()],
    "kto/weights": [KtoSpec(undesirable_weight=1.33)],
    "kto/strong": [KtoSpec(beta=0.5, desirable_weight=2.0, undesirable_weight=0.5)],
}
CHOSEN_LIKELIHOODS = ("chosen-likelihood/token-mean", "chosen-likelihood/seq-mean-token-mean")
WITH_LIKELIHOOD: Cases = {
    "orpo/odds-ratio": [OrpoSpec()],
    "simpo": [SimpoSpec(nll_coef=1.0)],
    "dpo/sigmoid": [DpoSpec(nll_coef=1.0)],
    "dpo/hinge": [DpoSpec(loss="hinge", nll_coef=1.0)],
}

# Online: losses of the policy and of the critic.

LOSSES: Cases = {
    "clip/token-mean": [
        GrpoSpec(),
        PpoSpec(kl_coef=0.0),
        ReinforcePlusPlusSpec(),
        DapoSpec(clip_high=0.2),
        DrGrpoSpec(loss_aggregation="token-mean", length_constant=None),
        RlooSpec(ratio="token", loss_aggregation="token-mean"),
    ],
    "clip/seq-mean-token-mean": [
        GrpoSpec(loss_aggregation=BY_ROW),
        PpoSpec(kl_coef=0.0, loss_aggregation=BY_ROW),
    ],
    "clip/seq-mean-token-sum": [RlooSpec(ratio="token"), GrpoSpec(loss_aggregation=BY_SUM)],
    "clip/seq-mean-token-sum-norm": [DrGrpoSpec(length_constant=8)],
    "clip-higher/token-mean": [DapoSpec(), GrpoSpec(clip_high=0.28)],
    "dual-clip/token-mean": [GrpoSpec(dual_clip=3.0), PpoSpec(kl_coef=0.0, dual_clip=3.0)],
    "clip-k1/token-mean": [GrpoSpec(kl_coef=0.04, kl_estimator="k1")],
    "clip-k2/token-mean": [GrpoSpec(kl_coef=0.04, kl_estimator="k2")],
    "clip-k3/token-mean": [
        GrpoSpec(kl_coef=0.04),
        PpoSpec(kl_coef=0.04, kl_estimator="k3", kl_in="loss"),
    ],
    "clip-k3/seq-mean-token-mean": [GrpoSpec(kl_coef=0.04, loss_aggregation=BY_ROW)],
    # With one advantage a row, GSPO and GSPO-token have the same gradient.
    "gspo/wide": [GspoSpec(**WIDE), GspoSpec(**WIDE, token_level=True)],
    "gspo/narrow": [GspoSpec(), GspoSpec(token_level=True)],
    "gspo/wide-token-mean": [GspoSpec(**WIDE, loss_aggregation="token-mean")],
    "cispo/cap-5": [CispoSpec()],
    "cispo/cap-1.2": [CispoSpec(clip_high=0.2)],
    "cispo/floor-0.8-cap-1.2": [CispoSpec(clip_low=0.2, clip_high=0.2)],
    "rloo/sequence-ratio": [RlooSpec()],
    "corrected-clip/token-mean": [GrpoSpec(rollout_correction=RolloutCorrection())],
    "corrected-clip-both/token-mean": [GrpoSpec(rollout_correction=BOTH)],
    "corrected-clip-mask/token-mean": [GrpoSpec(rollout_correction=MASKED)],
}
TOKEN_ADVANTAGES: Cases = {
    "gspo-token/wide": [GspoSpec(**WIDE, token_level=True)],
    "gspo-token/narrow": [GspoSpec(token_level=True)],
    "log-prob/seq-mean-token-sum": [RemaxSpec()],
}
ENTROPY: Cases = {
    "entropy-bonus/token-mean": [
        GrpoSpec(entropy_coef=0.01),
        PpoSpec(kl_coef=0, entropy_coef=0.01),
    ],
    "entropy-bonus/seq-mean-token-mean": [GrpoSpec(entropy_coef=0.01, loss_aggregation=BY_ROW)],
}
VALUES: Cases = {
    "value/clip-0.2": [PpoSpec()],
    "value/clip-0.5": [PpoSpec(value_clip=0.5)],
    "value/no-clip": [PpoSpec(value_clip=None)],
}

# Online: advantages.

BY_STD: Cases = {
    "group-advantages/by-std": [GrpoSpec(), GspoSpec(), DapoSpec(), CispoSpec()],
}
ONE_A_ROW: Cases = {
    "group-advantages/centered": [
        DrGrpoSpec(),
        GrpoSpec(normalize_by_std=False),
        GspoSpec(normalize_by_std=False),
        CispoSpec(normalize_by_std=False),
    ],
    "leave-one-out": [RlooSpec(), RlooSpec(ratio="token")],
    "leave-one-out/kl-in-reward": [RlooSpec(kl_coef=0.05)],
}
PLUS_PLUS: Cases = {
    "reinforce-plus-plus/1": [ReinforcePlusPlusSpec()],
    "reinforce-plus-plus/0.9": [ReinforcePlusPlusSpec(discount=0.9)],
}
PLUS_PLUS_AT_LAST: Cases = {
    "reinforce-plus-plus-baseline": [ReinforcePlusPlusSpec(baseline="group", group_size=2)],
    "reinforce-plus-plus/last-reward/1-kl-0.05": [ReinforcePlusPlusSpec(kl_coef=0.05)],
    "reinforce-plus-plus/last-reward/0.9-kl-0": [ReinforcePlusPlusSpec(discount=0.9)],
}
REMAX: Cases = {"remax": [RemaxSpec()]}
GENERALIZED: Cases = {
    case: [
        PpoSpec(kl_coef=0.0, discount=discount, gae_lambda=gae_lambda, whiten_advantages=whiten)
        for whiten in (True, False)
    ]
    for case, (discount, gae_lambda) in GAE.items()
}

# Distillation.


def _distillation(**fields: Any) -> DistillationSpec:
    return DistillationSpec.model_validate({"teacher_model": {"source": {"path": "t"}}, **fields})


def _divergences(suffix: str, **fields: Any) -> Cases:
    return {
        f"distillation/forward-kl{suffix}": [_distillation(divergence="forward-kl", **fields)],
        f"distillation/reverse-kl{suffix}": [_distillation(**fields)],
        f"distillation/js-0.5{suffix}": [_distillation(divergence="js", **fields)],
        f"distillation/js-0.3{suffix}": [_distillation(divergence="js", js_beta=0.3, **fields)],
    }


DIVERGENCES: Cases = {
    **_divergences("", top_k=VOCABULARY),
    **_divergences("/top-3", top_k=3),
}

# What is no algorithm's own.

CORRECTIONS = {
    "correction/token-truncate": [RolloutCorrection()],
    "correction/token-truncate-both": [RolloutCorrection(low=0.5)],
    "correction/token-mask": [RolloutCorrection(mode="mask", low=0.5)],
    "correction/sequence-truncate": [RolloutCorrection(level="sequence")],
    "correction/sequence-mask": [
        RolloutCorrection(level="sequence", mode="mask", low=0.5, high=3.0)
    ],
}
OVERLONG = {
    "overlong/10-4": [OverlongPenalty(max_tokens=10, buffer_tokens=4)],
    "overlong/6-6": [OverlongPenalty(max_tokens=6, buffer_tokens=6)],
}
KL = {f"kl/{estimator}": [estimator] for estimator in ("k1", "k2", "k3")}
ONE_BY_ONE = ("kl-in-reward", "kl-controller", "distributions")
"""Cases of which a test of their own is made."""

WITH_SPECS: Sequence[Cases] = (
    LIKELIHOODS,
    OF_40_TOKENS,
    REWARD_MODELS,
    PAIRS,
    LABELS,
    WITH_LIKELIHOOD,
    LOSSES,
    TOKEN_ADVANTAGES,
    ENTROPY,
    VALUES,
    BY_STD,
    ONE_A_ROW,
    PLUS_PLUS,
    PLUS_PLUS_AT_LAST,
    REMAX,
    GENERALIZED,
    DIVERGENCES,
)
ADVANTAGES: Sequence[Cases] = (
    BY_STD,
    ONE_A_ROW,
    PLUS_PLUS,
    PLUS_PLUS_AT_LAST,
    REMAX,
    GENERALIZED,
)
