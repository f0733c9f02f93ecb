"""Calibration from measurements of whole prompts on a single rank and of single messages."""

from baton.planning.calibration import Calibration, Points
from baton.planning.cost_model import CostModel, Kernel
from baton.planning.fit import fit_link
from baton.planning.model_shape import ModelShape
from baton_lab.study.one_rank_fit import fit_prefill


def calibrate(
    model: str, hardware: str, shape: ModelShape, *, kernel: Kernel, prefill_points: Points, link_points: Points
) -> Calibration:
    """Fit a cost model to measurements of a single rank and of single messages. Raises InvalidArgumentError if there
    are too few points."""
    prefill, link = fit_prefill(prefill_points, shape.num_layers, kernel), fit_link(link_points)
    cost = CostModel(
        num_layers=shape.num_layers,
        linear_s=prefill.linear_s,
        pair_s=prefill.pair_s,
        kv_bytes=shape.kv_bytes,
        project_share=shape.project_share,
        fixed_s=prefill.fixed_s,
        head_s=prefill.linear_s * shape.head_flops / shape.linear_flops,
        link=link,
    )
    return Calibration(model, hardware, kernel, shape, prefill_points, link_points, cost)
