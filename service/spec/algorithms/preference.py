"""Algorithms that learn which of two answers is better, or whether one answer is good."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from service.spec.algorithm import AlgorithmSpec, Head, RowKind

Weight = Annotated[float, Field(ge=0, le=1000)]
Beta = Annotated[float, Field(gt=0, le=1000)]
Smoothing = Annotated[float, Field(ge=0, lt=0.5)]


class RewardModelSpec(AlgorithmSpec):
    """A reward model by Bradley and Terry: one number at an answer's last token.

    Ouyang et al., arXiv 2203.02155, eq. 1; margins as in Llama 2, arXiv 2307.09288, eq. 2.
    """

    type: Literal["reward_model"] = "reward_model"
    implementation: ClassVar[str] = "algorithms.reward_model:RewardModel"
    online: ClassVar[bool] = False
    rows: ClassVar[RowKind] = "preference"
    head: ClassVar[Head] = "value"
    summary: ClassVar[str] = "A reward model from preferences (Bradley-Terry)"

    margins: bool = True
    """Take a row's `margin` off the difference, where it has one."""
    center_coef: Weight = 0.0
    """Weight of (chosen + rejected)^2, which keeps rewards around 0 (arXiv 2312.09244)."""

    @property
    def comparable_loss(self) -> bool:
        return True


class DpoSpec(AlgorithmSpec):
    """Direct Preference Optimization (arXiv 2305.18290) and its relatives."""

    type: Literal["dpo"] = "dpo"
    implementation: ClassVar[str] = "algorithms.dpo:Dpo"
    online: ClassVar[bool] = False
    rows: ClassVar[RowKind] = "preference"
    summary: ClassVar[str] = "Direct preference optimization: sigmoid, IPO, hinge, robust"

    beta: Beta = 0.1
    """How closely the policy is held to the reference."""
    loss: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    """DPO's own; IPO (arXiv 2310.12036); SLiC's hinge (arXiv 2305.10425); robust DPO (arXiv
    2403.00409), which corrects for labels that are wrong at the rate of `label_smoothing`."""
    label_smoothing: Smoothing = 0.0
    """Share of labels that are taken to be wrong; with `sigmoid` this is conservative DPO."""
    length_normalized: bool = False
    """Means over an answer's tokens in place of sums."""
    nll_coef: Weight = 0.0
    """Weight of the chosen answer's negative log-likelihood, a mean over its tokens (arXiv
    2404.19733)."""

    @model_validator(mode="after")
    def _smoothing_has_a_use(self) -> "DpoSpec":
        if self.label_smoothing and self.loss not in ("sigmoid", "robust"):
            raise ValueError(f"`label_smoothing` has no use: loss {self.loss} does not take it")
        if self.loss == "robust" and not self.label_smoothing:
            raise ValueError("`label_smoothing` is needed: robust DPO corrects for that rate")
        return self

    @property
    def comparable_loss(self) -> bool:
        return self.loss != "robust"  # what it takes off for wrong labels has no bound

    @property
    def keeps_reference(self) -> bool:
        return True


class SimpoSpec(AlgorithmSpec):
    """Simple Preference Optimization (arXiv 2405.14734): mean log-probs, a margin, no reference."""

    type: Literal["simpo"] = "simpo"
    implementation: ClassVar[str] = "algorithms.simpo:Simpo"
    online: ClassVar[bool] = False
    rows: ClassVar[RowKind] = "preference"
    summary: ClassVar[str] = "Preference optimization by mean log-probs, without a reference"

    beta: Beta = 2.0
    """Scale of the difference of mean log-probs."""
    gamma: Annotated[float, Field(ge=0, le=1000)] = 0.5
    """The margin that is taken off the scaled difference (eq. 6)."""
    nll_coef: Weight = 0.0
    """Weight of the chosen answer's negative log-likelihood, a mean over its tokens."""

    @property
    def comparable_loss(self) -> bool:
        return True


class KtoSpec(AlgorithmSpec):
    """Kahneman-Tversky Optimization (arXiv 2402.01306): answers that are good or bad, unpaired."""

    type: Literal["kto"] = "kto"
    implementation: ClassVar[str] = "algorithms.kto:Kto"
    online: ClassVar[bool] = False
    rows: ClassVar[RowKind] = "label"
    least_batch: ClassVar[int] = 2  # each answer is also set beside another row's question
    summary: ClassVar[str] = "Learns from single answers that are good or bad"

    beta: Beta = 0.1
    """How closely the policy is held to the reference."""
    desirable_weight: Weight = 1.0
    """Weight of good answers (lambda_D)."""
    undesirable_weight: Weight = 1.0
    """Weight of bad answers (lambda_U)."""

    @property
    def comparable_loss(self) -> bool:
        return True

    @property
    def keeps_reference(self) -> bool:
        return True


class OrpoSpec(AlgorithmSpec):
    """Odds Ratio Preference Optimization (arXiv 2403.07691): SFT and preference in one."""

    type: Literal["orpo"] = "orpo"
    implementation: ClassVar[str] = "algorithms.orpo:Orpo"
    online: ClassVar[bool] = False
    rows: ClassVar[RowKind] = "preference"
    summary: ClassVar[str] = "Likelihood of the chosen answer plus a log odds ratio"

    beta: Beta = 0.1
    """Weight of the odds ratio (lambda in the paper)."""

    @property
    def comparable_loss(self) -> bool:
        return True
