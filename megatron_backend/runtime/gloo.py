"""Collectives that NCCL has and gloo lacks: parts of different sizes, and sizes that are tensors.

Experts get as many tokens as are sent to them. Megatron gathers and scatters such parts along their
first dimension, which torch makes broadcasts and reductions of for NCCL; gloo refuses them. Here
gathered parts are padded to the longest, and scattered ones are summed whole. It also hands over
the sizes of an all-to-all as tensors where it did not have to bring them from CUDA.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def replacements() -> dict[str, Callable[..., Any]]:
    """Functions of `torch.distributed` by name; equal sizes still go to torch's own."""
    return {
        "all_gather": _all_gather(dist.all_gather),
        "all_to_all_single": _all_to_all_single(dist.all_to_all_single),
        "reduce_scatter": _reduce_scatter(dist.reduce_scatter),
    }


def _all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        longest = max(tensor_list, key=len)
        if all(part.shape == longest.shape for part in tensor_list):
            return original(tensor_list, tensor, group=group, async_op=async_op)
        padded = torch.zeros_like(longest)
        padded[: len(tensor)] = tensor
        gathered = [torch.empty_like(longest) for _ in tensor_list]
        original(gathered, padded, group=group)
        for part, whole in zip(tensor_list, gathered, strict=True):
            part.copy_(whole[: len(part)])
        return None

    return all_gather


def _reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_scatter(
        output: Tensor,
        input_list: list[Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if all(part.shape == output.shape for part in input_list):
            return original(output, input_list, op=op, group=group, async_op=async_op)
        rank = dist.get_rank(group)
        start = sum(len(part) for part in input_list[:rank])
        whole = torch.cat(input_list)
        dist.all_reduce(whole, op=op, group=group)
        output.copy_(whole[start : start + len(output)])
        return None

    return reduce_scatter


def _all_to_all_single(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_to_all_single(
        output: Tensor,
        input: Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **kwargs: Any,
    ) -> Any:
        sizes = [
            size.tolist() if isinstance(size, Tensor) else size
            for size in (output_split_sizes, input_split_sizes)
        ]
        return original(output, input, *sizes, **kwargs)

    return all_to_all_single
