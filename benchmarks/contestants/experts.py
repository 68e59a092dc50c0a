"""A layer of a mixture of experts as in Transformers, with three ways to multiply, and its data."""

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedacc


@dataclasses.dataclass(frozen=True)
class Shape:
    """So many experts, which are gated MLPs of `width` and `inner`. Each token goes to `top` of them."""

    experts: int
    width: int
    inner: int
    tokens: int
    top: int

    def __str__(self) -> str:
        sizes = f"{self.experts} experts {self.inner} x {self.width}"
        return f"{sizes}, {self.tokens} tokens, top {self.top}"

    @property
    def weights(self) -> int:
        return self.experts * self.width * self.inner * 3

    def batch(self, dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, the experts of each and their weights, from a router without preferences."""
        generator = torch.Generator().manual_seed(1)
        scores = torch.randn(self.tokens, self.experts, generator=generator).softmax(-1)
        weights, experts = scores.topk(self.top)
        x = torch.randn(self.tokens, self.width, generator=generator)
        return x.to(device, dtype), experts.to(device), weights.to(device, dtype)


class Experts(nn.Module):
    """gate_up (experts, 2 inner, width) and down (experts, width, inner).

    way: "grouped" (torch's grouped_mm), "ours" (`grouped_linear`), "loop" (expert by expert).
    """

    def __init__(self, shape: Shape, way: str) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(shape.experts, 2 * shape.inner, shape.width) / 32)
        self.down = nn.Parameter(torch.randn(shape.experts, shape.width, shape.inner) / 32)
        self.way = way

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x (tokens, width), experts and weights (tokens, top)."""
        return (self._by_loop if self.way == "loop" else self._by_groups)(x, experts, weights)

    def _by_groups(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        owner, order = experts.flatten().sort()
        ends = torch.arange(len(self.down), device=x.device)
        offs = torch.searchsorted(owner, ends, right=True).to(torch.int32)
        multiply = fusedacc.nn.functional.grouped_linear if self.way == "ours" else _stock
        gate, up = multiply(x[order // experts.shape[1]], self.gate_up, offs).chunk(2, dim=-1)
        out = multiply(F.silu(gate) * up, self.down, offs) * weights.flatten()[order, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=x.device)
        return out[back].view(*experts.shape, -1).sum(1)

    def _by_loop(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in experts.unique().tolist():
            token, place = torch.where(experts == expert)
            gate, up = F.linear(x[token], self.gate_up[expert]).chunk(2, dim=-1)
            output = F.linear(F.silu(gate) * up, self.down[expert]) * weights[token, place, None]
            out.index_add_(0, token, output)
        return out


def _stock(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return F.grouped_mm(rows, weight.transpose(-2, -1), offs=offs)
