"""Process groups of the generation copy, beside Megatron's global ones, which stay training's."""

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.process_groups_config import ProcessGroupCollection

from service.spec.layout import Layout


def generation_groups(layout: Layout) -> ProcessGroupCollection:
    """Groups of a layout on all ranks of the training run, for `build_model`.

    Every rank must call it. Ranks are numbered as in `Layout`: tensor parallelism varies fastest.

    Raises:
        ValueError: the layout has pipeline stages; generation has none.
    """
    if layout.pp != 1:
        raise ValueError(f"generation has no pipeline stages, but its layout is {layout}")
    grid = HyperCommGrid([layout.tp, 1, layout.dp], ["tp", "pp", "dp"])
    tp, dp, alone = (grid.create_pg(dimension) for dimension in ("tp", "dp", "pp"))
    return ProcessGroupCollection(
        tp=tp,
        mp=tp,
        tp_cp=tp,
        expt_tp=tp,
        tp_ep=tp,
        tp_ep_pp=tp,
        dp=dp,
        dp_cp=dp,
        expt_dp=dp,
        pp=alone,
        cp=alone,
        ep=alone,
        embd=alone,
        pos_embd=alone,
    )
