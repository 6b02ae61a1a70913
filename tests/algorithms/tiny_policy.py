"""Real models that train and sample in this process, behind the loop's Protocols.

One process, one micro-batch, plain PyTorch: the loop is tested on it without a cluster, and it is
small enough to read.
"""

import copy
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from algorithms.algorithm import Algorithm
from algorithms.batch import (
    Batch,
    LossOutput,
    MetricSums,
    Normalizer,
    Outputs,
    PolicyOutputs,
    ValueOutputs,
)
from algorithms.protocols import Completion, Sampling, StepResult, Trial
from algorithms.seeds import derive_seed


def tiny_model(vocabulary: int, seed: int = 0, *, layers: int = 1) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


class TinyEngine(ABC):
    """A model that is trained by a loss of its outputs."""

    def __init__(
        self, model: nn.Module, loss: Callable[[Outputs, Batch, Normalizer], LossOutput]
    ) -> None:
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
        self.log: list[str] = []
        self.rates: list[float] = []
        self._loss = loss

    @abstractmethod
    def outputs(self, batch: Batch) -> Outputs:
        """What the model says of a batch's tokens, with gradient."""

    def train_step(
        self,
        batch: Batch,
        normalizer: Normalizer,
        *,
        learning_rate: float,
        norm_limit: float = math.inf,
        loss_limit: float = math.inf,
    ) -> StepResult:
        self.log.append("train")
        self.rates.append(learning_rate)
        self.optimizer.zero_grad()
        output = self._loss(self.outputs(batch), batch, normalizer)
        output.loss.backward()
        parameters = self.optimizer.param_groups[0]["params"]
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
        loss = float(output.loss.detach())
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite and norm <= norm_limit and loss <= loss_limit:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        return self._result(output.sums, loss, norm, finite)

    def trials(self, _batch: Batch, _normalizer: Normalizer) -> list[Trial]:
        return []  # there is one copy

    def evaluate_loss(self, batch: Batch, normalizer: Normalizer) -> StepResult:
        with torch.no_grad():
            output = self._loss(self.outputs(batch), batch, normalizer)
        return self._result(output.sums, float(output.loss), 0.0, True)

    @staticmethod
    def _result(
        sums: Mapping[str, tuple[float, float]], loss: float, norm: float, finite: bool
    ) -> StepResult:
        metrics = MetricSums()
        metrics.add(sums)
        return StepResult(
            loss=loss,
            gradient_norm=norm,
            metrics=metrics.means(),
            finite=finite,
            sums=metrics.sums(),
        )


class TinyPolicy(TinyEngine):
    """`TrainEngine` and `Generator` in one: what is trained is what samples after a sync."""

    def __init__(
        self,
        model: Qwen2ForCausalLM,
        algorithm: Algorithm,
        *,
        stop_id: int,
        temperature: float = 1.0,
        max_length: int = 64,
    ) -> None:
        super().__init__(model, algorithm.loss)
        self.model = model
        self.max_length = max_length
        self._stop_id = stop_id
        self._temperature = temperature
        self._reference = {name: t.detach().clone() for name, t in model.named_parameters()}
        self._generation: dict[str, Tensor] = {}
        self._version = -1

    def tied_difference(self) -> float | None:
        return None  # one process holds both ends

    def log_probs(
        self, batch: Batch, *, model: Literal["policy", "reference"] = "policy"
    ) -> Tensor:
        self.log.append(f"log_probs {model}")
        weights = self._reference if model == "reference" else None
        with torch.no_grad():
            return self.outputs(batch, weights).log_probs

    def sync_weights(self, version: int) -> None:
        self.log.append(f"sync {version}")
        self._generation = {name: t.detach().clone() for name, t in self.model.named_parameters()}
        self._version = version

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """No cache: each token is read off a whole forward pass of all rows, right-padded."""
        self.log.append("generate")
        rows = [list(prompt) for prompt in prompts]
        draws = [
            torch.Generator().manual_seed(derive_seed(sampling.seed, i)) for i in range(len(rows))
        ]
        log_probs: list[list[float]] = [[] for _ in rows]
        still_open = set(range(len(rows)))
        while still_open:
            length = max(map(len, rows))
            ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
            logits = torch.func.functional_call(
                self.model, self._generation, kwargs={"input_ids": ids}
            ).logits
            for i in sorted(still_open):
                token, log_prob = _draw(logits[i, len(rows[i]) - 1], sampling.temperature, draws[i])
                rows[i].append(token)
                log_probs[i].append(log_prob)
                written = len(log_probs[i])
                full = written == sampling.max_new_tokens or len(rows[i]) == self.max_length
                if token == self._stop_id or full:
                    still_open.remove(i)
        return [
            Completion(
                token_ids=row[len(prompt) :],
                log_probs=row_log_probs,
                stop_reason="stop" if row[-1] == self._stop_id else "length",
                weight_version=self._version,
            )
            for row, row_log_probs, prompt in zip(rows, log_probs, prompts, strict=True)
        ]

    def outputs(self, batch: Batch, weights: dict[str, Tensor] | None = None) -> PolicyOutputs:
        inputs = {"input_ids": batch.tokens, "attention_mask": _attention(batch)}
        chosen = dict(self.model.named_parameters()) if weights is None else weights
        logits = torch.func.functional_call(self.model, chosen, kwargs=inputs).logits
        distribution = (logits[:, :-1] / self._temperature).log_softmax(-1)
        log_probs = distribution.gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
        entropy = -(distribution.exp() * distribution).sum(-1)
        pad = torch.nn.functional.pad
        return PolicyOutputs(log_probs=pad(log_probs, (1, 0)), entropy=pad(entropy, (1, 0)))


class TinyValueModel(TinyEngine):
    """One number a token, on a copy of a policy's layers: what a reward-model job trains, a
    `Critic` (with the algorithm's `value_loss`), or a `Scorer`."""

    def __init__(
        self,
        model: Qwen2ForCausalLM,
        loss: Callable[[Outputs, Batch, Normalizer], LossOutput],
    ) -> None:
        self.model = nn.ModuleDict(
            {
                "layers": copy.deepcopy(model.model),
                "head": nn.Linear(model.config.hidden_size, 1, bias=False),
            }
        )
        super().__init__(self.model, loss)

    @torch.no_grad()
    def values(self, batch: Batch) -> Tensor:
        self.log.append("values")
        return self.outputs(batch).values

    @torch.no_grad()
    def scores(self, batch: Batch) -> Tensor:
        self.log.append("scores")
        return self.outputs(batch).scores

    def outputs(self, batch: Batch) -> ValueOutputs:
        hidden = self.model["layers"](input_ids=batch.tokens, attention_mask=_attention(batch))
        numbers = self.model["head"](hidden.last_hidden_state).squeeze(-1)
        before = torch.nn.functional.pad(numbers[:, :-1], (1, 0))
        return ValueOutputs(
            values=before.masked_fill(batch.loss_mask == 0, 0.0),
            scores=numbers[torch.arange(len(batch)), batch.lengths - 1],
        )


def _attention(batch: Batch) -> Tensor:
    places = torch.arange(batch.tokens.shape[1])
    return (places[None] < batch.lengths[:, None]).long()


def _draw(logits: Tensor, temperature: float, draws: torch.Generator) -> tuple[int, float]:
    distribution = (logits / (temperature or 1.0)).log_softmax(-1)
    if temperature == 0:
        token = int(distribution.argmax())
    else:
        token = int(torch.multinomial(distribution.exp(), 1, generator=draws))
    return token, float(distribution[token])


class FolderCheckpoints:
    """Weights, optimizer and loop state of a `TinyPolicy`, one folder a step."""

    def __init__(self, folder: Path, policy: TinyPolicy) -> None:
        self._folder = folder
        self._policy = policy
        self.saves: list[tuple[int, list[Mapping[str, Any]], bool]] = []
        """Step, evaluations and `required` of each save."""

    def poll(self) -> None:
        """Nothing is ever on its way."""

    def drain(self) -> None:
        """Nothing is ever on its way."""

    def save(
        self,
        step: int,
        loop_state: Mapping[str, Any],
        *,
        evaluations: Sequence[Mapping[str, Any]] = (),
        required: bool = False,
    ) -> None:
        self.saves.append((step, list(evaluations), required))
        state = {
            "model": self._policy.model.state_dict(),
            "optimizer": self._policy.optimizer.state_dict(),
        }
        torch.save(state, self._folder / f"{step:08d}.pt")
        (self._folder / f"{step:08d}.json").write_text(json.dumps(loop_state))

    def load_latest(self) -> Mapping[str, Any] | None:
        newest = max(self._folder.glob("*.json"), default=None)
        if newest is None:
            return None
        state = torch.load(newest.with_suffix(".pt"))
        self._policy.model.load_state_dict(state["model"])
        self._policy.optimizer.load_state_dict(state["optimizer"])
        loop_state: Mapping[str, Any] = json.loads(newest.read_text())
        return loop_state


class EventList:
    """A `Recorder` that keeps what it was given."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int | None, dict[str, Any]]] = []

    def record(self, kind: str, data: Mapping[str, Any], *, step: int | None = None) -> None:
        json.dumps(data, allow_nan=False)  # what the spool would refuse is refused here
        self.events.append((kind, step, dict(data)))

    def replay(self) -> None:
        """Events of steps that are taken again are kept twice here, to be looked at."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [data for name, _, data in self.events if name == kind]
