"""Weights from the training layout to the generation layout, by `megatron.core.resharding`.

Which rank sends which slice of which parameter to which rank depends on the two layouts only. It is
worked out once, collectively, and then kept: a sync is a fixed list of copies between ranks, and of
plain copies where a rank has what it needs.

Megatron's `swap_model_weights` keeps its plans in a table of the module, by the sizes of the two
layouts. Two models in one process, as a policy and its critic will be, would get each other's plan;
and its copy service would outlive the process groups it was made for. So plan and service belong to
an object here, and Megatron's planner and executor are called directly.
"""

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.resharding import ReshardPlan, build_local_reshard_plan, execute_reshard_plan
from megatron.core.resharding.copy_services.base import CopyService
from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService
from megatron.core.resharding.copy_services.nccl_copy_service import NCCLCopyService


class WeightSync:
    """Copies the weights of one model into another of another layout, on the same ranks.

    Every rank must make one, and call `run` together with all others.

    Args:
        source: this rank's part of the trained model. It must know its process groups
            (`pg_collection`), as every model from `build_model` does.
        target: this rank's part of the generation copy, with as many rows of padded vocabulary.

    Raises:
        ValueError: the two differ in padded vocabulary, so their rows cannot be matched.
    """

    def __init__(self, source: GPTModel, target: GPTModel) -> None:
        if source.vocab_size != target.vocab_size:
            raise ValueError(
                f"the generation copy has {target.vocab_size} rows of vocabulary and the trained "
                f"model {source.vocab_size}: build the copy with the trained model's padded_vocab"
            )
        self.source = source
        self.target = target
        self._plan: ReshardPlan | None = None
        self._service: CopyService = (
            NCCLCopyService() if torch.cuda.is_available() else GlooCopyService()
        )

    @property
    def plan(self) -> ReshardPlan:
        """What this rank sends and receives; worked out at the first use, by all ranks together."""
        if self._plan is None:
            self._plan = build_local_reshard_plan(self.source, self.target)
        return self._plan

    def run(self) -> None:
        """Overwrites the target's weights with the source's."""
        with torch.no_grad():
            execute_reshard_plan(self.plan, self.source, self.target, service=self._service)
