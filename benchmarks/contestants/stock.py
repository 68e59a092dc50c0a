"""What several of stock's ways have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor


def share_moments(optimizer: torch.optim.Optimizer, moments: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Gives an AdamW its state, at step 0: the moments of each parameter, which other ways have too."""
    (group,) = optimizer.param_groups
    for parameter, (mean, square) in zip(group["params"], moments, strict=True):
        step = torch.zeros((), device=parameter.device if group["fused"] else "cpu")
        optimizer.state[parameter] = {"step": step, "exp_avg": mean, "exp_avg_sq": square}


def sum_in(parameters: Iterable[Tensor], dtype: torch.dtype) -> None:
    """From here on autograd sums in p.grad of that dtype; what is there is cast."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            parameter.grad_dtype = dtype
        else:
            parameter.grad = None
            parameter.grad_dtype = dtype
            parameter.grad = gradient.to(dtype)


def adder(total: Tensor) -> Callable[[Tensor], None]:
    """A hook that adds a parameter's gradient by a mixed `add_` as soon as autograd has stored it."""

    def add(parameter: Tensor) -> None:
        total.add_(parameter.grad)
        parameter.grad = None

    return add
