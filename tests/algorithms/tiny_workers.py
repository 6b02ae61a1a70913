"""All the models of an online job, in this process."""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from algorithms.algorithm import load_algorithm
from algorithms.data.chat import ChatFormat
from algorithms.protocols import Workers
from service.spec import JobContext
from tests.algorithms.tiny_policy import FolderCheckpoints, TinyPolicy, TinyValueModel


def tiny_workers(
    context: JobContext,
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
) -> Workers:
    """A policy that trains and samples, and a critic where the algorithm has one.

    Args:
        context: the job's.
        model: the policy's; a critic begins with a copy of its layers.
        tokenizer: has a chat template.
        folder: for checkpoints.
    """
    spec = context.spec
    policy = TinyPolicy(
        model,
        load_algorithm(spec.algorithm),
        stop_id=ChatFormat(tokenizer).end_of_turn_id,
        temperature=spec.rollout.temperature,
        max_length=spec.training.max_length,
    )
    critic = None
    if spec.algorithm.critic is not None:
        torch.manual_seed(spec.training.seed)  # of its head
        critic = TinyValueModel(model, load_algorithm(spec.algorithm).value_loss)
    return Workers(
        train=policy,
        generator=policy,
        checkpoints=FolderCheckpoints(folder, policy),
        critic=critic,
    )
