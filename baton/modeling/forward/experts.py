"""A mixture of experts as the feed-forward part of a layer: a router sends each token through a few of many gated MLPs.

A family makes one for each layer (`baton.modeling.families.qwen3_moe`), and `layers` runs it like any other MLP. Tokens
are gathered by expert, so that each expert multiplies all of its tokens at once. `LinearExperts`, for CPUs and any
dtype, has two linear layers for each expert, and the host reads the numbers of tokens. `StackedExperts`, for bf16 on
CUDA, has grouped products over all experts' weights, and the host reads nothing.

T tokens, D hidden, E experts, A experts of a token, M = T * A tokens by expert, I width inside an expert.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.modeling.forward.linear import Linear
from baton.modeling.forward.norms import Transform, unchanged


class ExpertProducts(Protocol):
    """Gated MLPs of all experts of a layer."""

    @property
    def num_experts(self) -> int:
        """Return the number of experts."""

    def __call__(self, x_MD: Tensor, expert_M: Tensor) -> Tensor:
        """Return the result of the MLPs, `[M, D]`. Row m of `x_MD` is computed by expert `expert_M[m]`. `expert_M` must
        ascend."""


@dataclass(frozen=True)
class LinearExperts:
    """Experts as two linear layers each. Only experts to which tokens are routed are computed."""

    gate_up: tuple[Linear, ...]
    """Gated projection of each expert: gate rows, then up rows."""
    down: tuple[Linear, ...]

    @property
    def num_experts(self) -> int:
        return len(self.down)

    def __call__(self, x_MD: Tensor, expert_M: Tensor) -> Tensor:
        counts = torch.bincount(expert_M, minlength=self.num_experts).tolist()
        groups = zip(self.gate_up, self.down, x_MD.split_with_sizes(counts), strict=True)
        return torch.cat([down(gate_up(rows_MD)) for gate_up, down, rows_MD in groups if len(rows_MD)])


@dataclass(frozen=True)
class StackedExperts:
    """Experts as two tensors, multiplied with torch's grouped products. The host does not read the numbers of tokens,
    so that a CUDA graph can capture a call."""

    gate_up_EJD: Tensor
    """Gate rows, then up rows of each expert: J = 2 I rows."""
    down_EDI: Tensor

    @property
    def num_experts(self) -> int:
        return len(self.down_EDI)

    def __call__(self, x_MD: Tensor, expert_M: Tensor) -> Tensor:
        experts_E = torch.arange(self.num_experts, device=expert_M.device)
        ends_E = torch.searchsorted(expert_M, experts_E, right=True).int()
        gate_MI, up_MI = F.grouped_mm(x_MD, self.gate_up_EJD.mT, offs=ends_E).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate_MI).mul_(up_MI), self.down_EDI.mT, offs=ends_E)


@dataclass(frozen=True)
class ExpertsMlp:
    """Mixture of experts (Shazeer et al., 2017): for each token, the weighted sum of the MLPs with the highest router
    weights."""

    router: Linear
    """Linear layer `[E, D]` of scores. Their softmax over all experts gives the weights."""
    products: ExpertProducts
    num_active: int
    normalised: bool
    """True if the weights of a token's experts are divided by their sum."""

    def __call__(self, x_TD: Tensor, norm: Transform = unchanged, residual_TD: Tensor | None = None) -> Tensor:
        hidden_TD = norm(x_TD)
        weight_TA, expert_TA = self.route(hidden_TD)
        expert_M, order_M = expert_TA.flatten().sort(stable=True)
        by_expert_MD = self.products(hidden_TD[order_M // self.num_active], expert_M)
        by_token_MD = torch.empty_like(by_expert_MD)
        by_token_MD[order_M] = by_expert_MD
        parts_TAD = by_token_MD.view(-1, self.num_active, x_TD.shape[-1])
        out_TD = (parts_TAD.float() * weight_TA.unsqueeze(-1)).sum(1).to(x_TD.dtype)
        return out_TD if residual_TD is None else residual_TD + out_TD

    def route(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights (fp32) and the numbers of the experts of each token, `[T, A]`."""
        weight_TE = self.router(hidden_TD).float().softmax(-1)
        weight_TA, expert_TA = weight_TE.topk(self.num_active, dim=-1)
        return weight_TA / weight_TA.sum(-1, keepdim=True) if self.normalised else weight_TA, expert_TA


def can_stack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch's grouped products run on the device without the host reading the numbers of tokens."""
    return device.type == "cuda" and dtype == torch.bfloat16


def mixtures(layers: Iterable[object]) -> Sequence[ExpertsMlp]:
    """Return all mixtures of experts among the feed-forward parts of the layers."""
    parts = (getattr(getattr(layer, "tail", None), "mlp", None) for layer in layers)
    return [part for part in parts if isinstance(part, ExpertsMlp)]
