"""Values of stored weights, computed in float64."""

from torch import Tensor

from baton.modeling.kernels.calls.codes import StoredWeight


def values(weight: StoredWeight) -> Tensor:
    """Return the values of the weight, `[N, K]`, rounded once to fp32."""
    scales_NGF, num_inputs = weight.scales_NGF.double(), weight.shape[1]
    if weight.factors_NSF is not None:
        num_groups = weight.factors_NSF.shape[1]
        scales_NGF = scales_NGF.repeat_interleave(num_groups // scales_NGF.shape[1], 1) * weight.factors_NSF
    scales_NKF = scales_NGF.repeat_interleave(num_inputs // scales_NGF.shape[1], 1)
    scale_NK = scales_NKF[..., 0]
    offset_NK = scales_NKF[..., 1] if scales_NKF.shape[2] == 2 else -weight.zero * scale_NK
    return (scale_NK * weight.codes_NK + offset_NK).float()
