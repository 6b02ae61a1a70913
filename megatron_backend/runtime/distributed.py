"""From a bare process to a rank of a Megatron-Core layout, and back."""

import gc
import logging
import os
import warnings
from datetime import timedelta

import torch

from megatron_backend.runtime import cpu
from service.spec.layout import Layout


def prepare() -> None:
    """Makes this process ready for the first import of `megatron.core`.

    On a CPU it installs the CPU runtime. Megatron-Core's notes about packages that only CUDA
    builds have, and about the age of its GPT model class, are known and left out of the logs.
    """
    cpu.install()
    # On GPUs it lets exchanges between ranks start in the order in which they were asked for.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)
    if "OMP_NUM_THREADS" not in os.environ and cpu.active():
        torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.optimizer  # noqa: F401


def device() -> torch.device:
    """Where this rank's tensors live."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def initialize(
    layout: Layout,
    rank: int,
    *,
    address: str,
    port: int,
    seed: int,
    timeout: timedelta = timedelta(minutes=30),
) -> None:
    """Joins the ranks of `layout`: process groups, Megatron's parallel state, seeds.

    Every rank of the layout must call it; it returns when all have. The backend is NCCL where CUDA
    is present and gloo elsewhere.

    Args:
        layout: how many ranks there are, and what each is for.
        rank: this process's number.
        address: host name of rank 0.
        port: a free port on it.
        seed: the job's seed. Megatron derives each rank's own from it.
        timeout: how long a collective waits for the other ranks.

    Raises:
        ValueError: the layout has no such rank.
    """
    layout.coordinates(rank)
    prepare()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.distributed.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"tcp://{address}:{port}",
        rank=rank,
        world_size=layout.world_size,
        timeout=timeout,
        device_id=device() if cuda else None,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.tp,
        distributed_timeout_minutes=max(1, int(timeout.total_seconds() // 60)),
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def shutdown() -> None:
    """Leaves the process groups; the process may join others afterwards.

    Call it when nothing refers to the models any more. They hold process groups in reference
    cycles, and gloo's groups have threads that spin once the other side is gone, until they are
    collected.
    """
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    # Megatron keeps angles in a cache of the class, by the module that made them: so it keeps the
    # modules of models that are gone, and their process groups.
    RotaryEmbedding.forward.cache_clear()
    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gc.collect()
