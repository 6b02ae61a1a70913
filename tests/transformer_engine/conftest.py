"""Without Transformer Engine there is nothing to collect here; `make test-te` runs these tests."""

from importlib.util import find_spec

collect_ignore_glob = ["test_*.py"] if find_spec("transformer_engine") is None else []

if not collect_ignore_glob:
    import os
    from collections.abc import Iterator

    import pytest

    # Its update of scales, in plain torch instead of its CUDA kernel; nothing is compiled.
    os.environ.update(NVTE_TORCH_COMPILE="0", NVTE_UNFUSED_FP8_UPDATE="1", OMP_NUM_THREADS="1")

    from megatron_backend.runtime.distributed import prepare

    prepare()

    from service.spec.layout import Layout
    from tests.megatron_backend.ranks import Ranks
    from tests.ports import free_port
    from tests.transformer_engine.bridge_runs import import_bridge

    @pytest.fixture(scope="session")
    def one_rank() -> Iterator[None]:
        """This process as the only rank of a layout."""
        from megatron_backend.runtime import distributed

        distributed.initialize(Layout(), 0, address="127.0.0.1", port=free_port(), seed=1)
        yield
        distributed.shutdown()

    @pytest.fixture(scope="module")
    def ranks() -> Iterator[Ranks]:
        """Processes that play ranks, with the settings above."""
        pool = Ranks()
        # It takes long: not out of the time that a test's own run has.
        pool.run(Layout(), import_bridge)
        yield pool
        pool.close()
