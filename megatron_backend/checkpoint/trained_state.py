"""The state of trained models and their optimizers, as a checkpoint names it.

A job trains one model, and perhaps a critic beside it. The names of the first one's tensors are
those of the whole model's; the other's begin with a prefix (`contents.CRITIC`). Its settings that
are no tensors are under the same prefix.
"""

import gc
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    _replace_state_dict_keys_with_sharded_keys,
)
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer

from megatron_backend.checkpoint.local_plan import State
from megatron_backend.checkpoint.optimizer_state import (
    start_moments,
    whole_state,
    without_copies,
)

_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
_EXPERTS = "is_expert_parallel"
_OF_THE_JOB = ("max_lr", "min_lr", "betas", "eps")
"""What a parameter group holds of the job's document, beside what each step sets anew."""


class Trained(Protocol):
    """A model on this rank; see `training.step.Trainer`."""

    @property
    def model(self) -> Sequence[GPTModel]:
        """This rank's chunks."""
        ...

    @property
    def optimizer(self) -> MegatronOptimizer:
        """Over their parameters."""
        ...


type Models = Mapping[str, Trained]
"""By their prefix; that of the model that a job is about is empty."""


def state_to_write(models: Models, *, compare: bool) -> State:
    """All that this rank is the one to write. Collective where `compare`, and in the optimizers."""
    state: dict[str, Any] = {"content_metadata": dict(_FORMAT)}
    for prefix, trained in models.items():
        _put(state, prefix, _written(trained))
    sharded, common = save_preprocess(state, validate_access_integrity=compare)
    sharded["common_state"] = ShardedObject(
        "common_state", common, (1,), (0,), replica_id=torch.distributed.get_rank()
    )
    named: State = _replace_state_dict_keys_with_sharded_keys(sharded, True)[0]
    return named


class StateToLoad:
    """What to ask a checkpoint for, and where it goes.

    Attributes:
        request: Megatron's sharded state dict.
    """

    def __init__(self, models: Models) -> None:
        self.request: dict[str, Any] = {}
        self._models = models
        self._parts: dict[str, list[dict[str, Any]]] = {}
        for prefix, trained in models.items():
            wanted: dict[str, Any] = _sharded_weights(trained.model)
            parts = self._parts[prefix] = _empty_parts(trained.optimizer, wanted)
            wanted["moments"] = [part["param_state"] for part in parts]
            _put(self.request, prefix, wanted)

    def put_back(self, loaded: Mapping[str, Any]) -> None:
        """Gives models and optimizers what was loaded for `request`."""
        for prefix, trained in self._models.items():
            found = loaded[prefix] if prefix else loaded
            for index, chunk in enumerate(trained.model):
                chunk.load_state_dict(found[f"model{index}"])
            settings = _for_any_part(found["optimizer"], trained.optimizer.param_groups[0])
            restored = [
                part | settings | {"param_state": moments}
                for part, moments in zip(self._parts[prefix], found["moments"], strict=True)
            ]
            whole = restored[0] if len(restored) == 1 else dict(enumerate(restored))
            trained.optimizer.load_state_dict(whole)


def _put(state: dict[str, Any], prefix: str, part: dict[str, Any]) -> None:
    """Adds a model's part. Of the names in this dict only those of settings that are no tensors
    reach the checkpoint."""
    add_prefix_for_sharding(part, prefix)
    state.update({prefix: part} if prefix else part)


def _written(trained: Trained) -> dict[str, Any]:
    state: dict[str, Any] = _sharded_weights(trained.model)
    parts = trained.optimizer.chained_optimizers
    if len(parts) > 1:
        trained.optimizer._synchronize_steps()
    for part in parts:
        start_moments(part)
    state["moments"] = [whole_state(part, dict(state), dict(_FORMAT)) for part in parts]
    state["optimizer"] = _optimizer_settings([part.state_dict() for part in parts])
    return state


def _sharded_weights(chunks: Sequence[GPTModel]) -> dict[str, Any]:
    return {f"model{index}": chunk.sharded_state_dict() for index, chunk in enumerate(chunks)}


def _empty_parts(optimizer: MegatronOptimizer, weights: dict[str, Any]) -> list[dict[str, Any]]:
    """What each of Megatron's optimizers of this rank wants to have loaded."""
    gc.freeze()  # Megatron collects garbage here; what is alive already need not be looked through
    try:
        with without_copies(optimizer.chained_optimizers):
            state = optimizer.sharded_state_dict(
                dict(weights), is_loading=True, metadata=dict(_FORMAT)
            )
    finally:
        gc.unfreeze()
    return [state] if "param_state" in state else [state[index] for index in sorted(state)]


def _optimizer_settings(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Parameter groups (each has Adam's step count) and fp16's loss scale, of all parts together.

    Whether a group is the experts' is left out: that is a matter of the layout.
    """
    groups: list[dict[str, Any]] = []
    for part in parts:
        for group in part["optimizer"]["param_groups"]:
            stored = {key: value for key, value in group.items() if key != _EXPERTS}
            if stored not in groups:
                groups.append(stored)
    settings: dict[str, Any] = {"optimizer": {"param_groups": groups}}
    if "grad_scaler" in parts[0]:
        settings["grad_scaler"] = parts[0]["grad_scaler"]
    return settings


def _for_any_part(settings: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`_optimizer_settings` with groups for experts and for all else.

    Args:
        settings: as they were stored.
        own: a parameter group of the optimizer as this job has built it. A job that goes on with
            another one may have another learning rate, by which Megatron tells groups apart, or
            other betas.
    """
    job = {key: own[key] for key in _OF_THE_JOB if key in own}
    groups = [
        group | job | {_EXPERTS: experts}
        for group in settings["optimizer"]["param_groups"]
        for experts in (False, True)
    ]
    return settings | {"optimizer": {"param_groups": groups}}
