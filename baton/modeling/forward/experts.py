"""Mixture of experts as the feed-forward part of a layer. The mixture has many gated MLPs (experts), and a router sends
each token through a few of them.

A family creates one mixture per layer (`baton.modeling.families.qwen3_moe`), and `layers` runs it like any other MLP.
Tokens are grouped by expert, so each expert processes all of its tokens in one product. There are two implementations:

- `LinearExperts`, for CPUs and any dtype, has two linear layers per expert. The host reads the number of tokens
  of each expert.
- `StackedExperts`, for bf16 on CUDA, runs grouped products over the weights of all experts. The host reads nothing.

Shape letters: T tokens, D hidden size, E experts, A experts of a token, M = T * A pairs of a token and an expert, I
width inside an expert.
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
    """Interface for computing the gated MLPs of all experts of a layer."""

    @property
    def num_experts(self) -> int:
        """Return the number of experts."""

    def __call__(self, x_MD: Tensor, expert_M: Tensor) -> Tensor:
        """Return the result of the MLPs, `[M, D]`. Row m of `x_MD` is computed by expert `expert_M[m]`. `expert_M` must
        ascend."""


@dataclass(frozen=True)
class LinearExperts:
    """Weights of the experts as two linear layers per expert. Only experts with at least one token are computed."""

    gate_up: tuple[Linear, ...]
    """Fused gate and up projection of each expert. The gate rows come first, then the up rows."""
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
    """Weights of all experts in two tensors, multiplied with torch's grouped products. The host does not read the
    number of tokens of each expert, so a CUDA graph can capture a call."""

    gate_up_EJD: Tensor
    """Weights of the gate and up projections. For each expert, the gate rows come first, then the up rows: J = 2 I
    rows."""
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
    """Mixture of experts (Shazeer et al., 2017). Each expert is an MLP. The result for a token is the weighted sum of
    the outputs of the experts that have the highest router weights for the token."""

    router: Linear
    """Linear layer with weight `[E, D]` that computes a score per expert. The softmax of the scores over all experts
    gives the router weights."""
    products: ExpertProducts
    num_active: int
    normalised: bool
    """True if the router weights of a token's experts are divided by their sum."""

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
        """Return the router weights (fp32) and the indices of the selected experts of each token, both `[T, A]`."""
        weight_TE = self.router(hidden_TD).float().softmax(-1)
        weight_TA, expert_TA = weight_TE.topk(self.num_active, dim=-1)
        return weight_TA / weight_TA.sum(-1, keepdim=True) if self.normalised else weight_TA, expert_TA


def can_stack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if torch's grouped products support this device and dtype. With them, the host does not have to read
    the number of tokens of each expert."""
    return device.type == "cuda" and dtype == torch.bfloat16


def mixtures(layers: Iterable[object]) -> Sequence[ExpertsMlp]:
    """Return all ExpertsMlp objects among the feed-forward parts of the layers."""
    parts = (getattr(getattr(layer, "tail", None), "mlp", None) for layer in layers)
    return [part for part in parts if isinstance(part, ExpertsMlp)]
