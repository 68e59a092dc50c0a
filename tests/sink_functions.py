"""Autograd functions that add the gradients of their weights to sinks, and a model that uses them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedacc


def write_product(sink: fusedacc.Sink, left: Tensor, right: Tensor) -> None:
    """Add left^T right to a sum by a kernel in `write`."""
    with sink.write() as (accumulator, scale, beta):
        gradient = scale * (left.t() @ right).to(accumulator.dtype)
        if beta == 0.0:
            accumulator.copy_(gradient)
        else:
            accumulator.mul_(beta).add_(gradient)


class Product(torch.autograd.Function):
    """x @ weight.T, by `add_product`."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        sink = fusedacc.sink(weight)
        if sink is None:
            return grad @ weight, grad.t() @ x
        sink.add_product(grad, x)
        return grad @ weight, None


class Written(Product):
    """x @ weight.T, by a kernel in `write`."""

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        sink = fusedacc.sink(weight)
        if sink is None:
            return grad @ weight, grad.t() @ x
        write_product(sink, grad, x)
        return grad @ weight, None


class Rows(torch.autograd.Function):
    """weight[indices], by `add_rows`."""

    @staticmethod
    def forward(ctx, indices: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(indices, weight)
        return weight[indices]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor | None]:
        indices, weight = ctx.saved_tensors
        sink = fusedacc.sink(weight)
        if sink is None:
            flat = grad.reshape(-1, grad.shape[-1])
            return None, torch.zeros_like(weight).index_add_(0, indices.reshape(-1), flat)
        sink.add_rows(indices, grad)
        return None, None


class Grouped(torch.autograd.Function):
    """A product for each group of rows, by `add_grouped`."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offs)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=offs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, offs = ctx.saved_tensors
        of_x = F.grouped_mm(grad, weight, offs=offs)
        sink = fusedacc.sink(weight)
        if sink is None:
            return of_x, F.grouped_mm(grad.t(), x, offs=offs), None
        sink.add_grouped(grad, x, offs)
        return of_x, None, None


class Scaled(torch.autograd.Function):
    """x * weight for a weight of one dimension, by `add`."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        sink = fusedacc.sink(weight)
        gradient = (grad * x).sum(0)
        if sink is None:
            return grad * weight, gradient
        sink.add(gradient)
        return grad * weight, None


class Model(nn.Module):
    """Tokens to scores with every kind of sink. The head has the embedding's weight, and `up` runs twice.

    of_torch: compute the same with PyTorch's functions.
    """

    def __init__(self, of_torch: bool = False, grouped: bool = True, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.of_torch = of_torch
        self.grouped = grouped
        self.embedding = nn.Parameter(torch.randn(11, 8))
        self.gain = nn.Parameter(torch.rand(8) + 0.5)
        self.up = nn.Parameter(torch.randn(16, 8) / 3)
        self.down = nn.Parameter(torch.randn(8, 16) / 4)
        self.experts = nn.Parameter(torch.randn(3, 8, 8) / 3) if grouped else None

    def block(self, x: Tensor) -> Tensor:
        if self.of_torch:
            return x + F.linear(torch.tanh(F.linear(x, self.up)), self.down)
        return x + Written.apply(torch.tanh(Product.apply(x, self.up)), self.down)

    def mixed(self, x: Tensor) -> Tensor:
        offs = torch.tensor([2, 2, len(x)], dtype=torch.int32, device=x.device)
        if not self.of_torch:
            return Grouped.apply(x, self.experts, offs)
        parts = zip([x[:2], x[2:2], x[2:]], self.experts, strict=True)
        return torch.cat([F.linear(part, expert) for part, expert in parts])

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.embedding) if self.of_torch else Rows.apply(tokens, self.embedding)
        x = self.block(self.block(x))
        if self.grouped:
            x = x + self.mixed(x)
        x = x * self.gain if self.of_torch else Scaled.apply(x, self.gain)
        return F.linear(x, self.embedding) if self.of_torch else Product.apply(x, self.embedding)


def tokens_of(seed: int, count: int = 6) -> Tensor:
    return torch.randint(0, 11, (count,), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, seed: int = 0, count: int = 6, reduction: str = "mean") -> Tensor:
    device = next(model.parameters()).device
    tokens = tokens_of(seed, count).to(device)
    targets = tokens_of(seed + 1000, count).to(device)
    return F.cross_entropy(model(tokens).float().double(), targets, reduction=reduction)


def twin_of(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return the same model of PyTorch's functions, with the same weights in another dtype."""
    twin = Model(of_torch=True, grouped=model.grouped).to(dtype)
    twin.load_state_dict(model.state_dict())
    return twin


def count_sinks(monkeypatch) -> list[bool]:
    """Record for each call of `fusedacc.sink` whether it returned a sink."""
    found: list[bool] = []
    original = fusedacc.sink

    def counted(param: Tensor):
        sink = original(param)
        found.append(sink is not None)
        return sink

    monkeypatch.setattr(fusedacc, "sink", counted)
    return found
