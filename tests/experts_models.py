"""Mixtures of experts for tests, with stacked weights that the models use in several ways."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedacc

EXPERTS, WIDTH, INNER = 6, 16, 24


class Experts(nn.Module):
    """Experts with two stacked weights, (experts, out, in) or, with `inward`, (experts, in, out).

    Args:
        how: "loop" (expert by expert), "grouped" (`fusedacc.nn.functional.grouped_linear`), "stock"
            (PyTorch's `grouped_mm`) or "dense" (products with all experts).
    """

    def __init__(self, how: str, inward: bool = False) -> None:
        super().__init__()
        shapes = ((WIDTH, INNER), (INNER, WIDTH)) if inward else ((INNER, WIDTH), (WIDTH, INNER))
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, *shape) / 4) for shape in shapes)
        self.bias = nn.Parameter(torch.randn(EXPERTS, INNER) / 4)
        self.how, self.inward = how, inward

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        """Apply to each row of `x` (rows, width) the expert that `experts` (rows) names."""
        order = experts.argsort(stable=True)
        rows, offs = x[order], torch.bincount(experts, minlength=EXPERTS).cumsum(0).to(torch.int32)
        run = {"loop": self._by_loop, "dense": self._dense}.get(self.how, self._by_groups)
        return torch.zeros_like(x).index_copy(0, order, run(rows, offs))

    def _by_loop(self, rows: Tensor, offs: Tensor) -> Tensor:
        parts, start = [], 0
        for expert, end in enumerate(offs.tolist()):
            if end > start:
                up, down = self.up[torch.tensor(expert)], self.down[expert]
                if not self.inward:
                    up, down = up.t(), down.t()
                parts.append(torch.tanh(rows[start:end] @ up + self.bias[expert]) @ down)
            start = end
        return torch.cat(parts)

    def _by_groups(self, rows: Tensor, offs: Tensor) -> Tensor:
        own = fusedacc.nn.functional.grouped_linear
        multiply = own if self.how == "grouped" else _stock
        weights = [w.transpose(-2, -1) if self.inward else w for w in (self.up, self.down)]
        owner = torch.repeat_interleave(offs.diff(prepend=offs.new_zeros(1)))
        return multiply(torch.tanh(multiply(rows, weights[0], offs) + self.bias[owner]), weights[1], offs)

    def _dense(self, rows: Tensor, offs: Tensor) -> Tensor:
        hidden = torch.tanh(torch.einsum("si,eoi->eso", rows, self.up))
        return torch.einsum("eso,eio->si", hidden, self.down) + self.bias.sum()


def _stock(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return F.grouped_mm(rows, weight.transpose(-2, -1), offs=offs)


class Mixture(nn.Module):
    """A Linear layer, experts that each row is routed to, and a Linear layer."""

    def __init__(self, how: str, inward: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 2)
        self.experts = Experts(how, inward)
        self.to(dtype)

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        hidden = self.enter(x.to(self.enter.weight.dtype))
        return self.leave(hidden + self.experts(hidden, experts))


def batch(index: int, rows: int = 12, unused: int = 2) -> tuple[Tensor, Tensor]:
    """Return rows and the expert of each row. In each batch, different experts have no rows."""
    generator = torch.Generator().manual_seed(index)
    order = torch.randperm(EXPERTS, generator=generator)[: EXPERTS - unused]
    chosen = torch.randint(0, len(order), (rows,), generator=generator)
    return torch.randn(rows, 8, generator=generator), order[chosen]


def loss_of(model: nn.Module, index: int, **sizes: int) -> Tensor:
    return model(*batch(index, **sizes)).float().pow(2).mean()


K = 4
#: How a model uses its experts, and how the plain PyTorch model that it is compared with does.
TWINS = {"loop": "loop", "grouped": "stock"}


def wrapped(model, steps=K, inner=None, **options):
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if inner is None else inner
    return fusedacc.AccumulatingOptimizer(inner, steps, model=model, **options)


def pair(how, steps=None, inward=False, **options):
    """Return a model that accumulates in its backward, its wrapper, and the same model for plain PyTorch."""
    model, twin = Mixture(how, inward), Mixture(TWINS[how], inward)
    return model, wrapped(model, steps, **options), twin
