"""Changes of `p.grad` by hand, and ways to make them. Some do not change the tensor's version."""

import torch
from torch import Tensor
from torch.utils import dlpack

#: `swap` gives the same tensor other memory.
ROADS = ("in_place", "data", "numpy", "dlpack", "swap")
CHANGES = ("halve", "shift", "fill", "clamp", "nan", "replace", "remove")


def changed(tensor: Tensor, change: str, value: float) -> Tensor:
    """Return the changed tensor, in new memory."""
    if change == "halve":
        return tensor * 0.5
    if change == "shift":
        return tensor + value
    if change == "clamp":
        return tensor.clamp(-value, value)
    return torch.full_like(tensor, float("nan") if change == "nan" else value)


def aliased(gradient: Tensor, road: str) -> Tensor:
    """Return a tensor that shares the gradient's memory."""
    if road == "data":
        return gradient.data
    if road == "numpy" and gradient.dtype != torch.bfloat16:  # which NumPy does not have
        return torch.from_numpy(gradient.detach().numpy())
    if road in ("numpy", "dlpack"):
        return dlpack.from_dlpack(dlpack.to_dlpack(gradient.detach()))
    return gradient


def edit(p: Tensor, change: str, road: str, value: float) -> None:
    """Change `p.grad` unless it is None. A sparse gradient can only be halved or removed."""
    gradient = p.grad
    if gradient is None:
        return
    if change == "remove":
        p.grad = None
    elif gradient.is_sparse:
        if change == "halve":
            gradient.mul_(0.5)  # .data has other values once it is coalesced
    elif change == "replace":
        p.grad = replacement(gradient, road, value)
    elif road == "swap":
        gradient.data = changed(gradient.data, change, value)
    else:
        with torch.no_grad():
            target = aliased(gradient, road)
            target.copy_(changed(target, change, value))


def replacement(gradient: Tensor, road: str, value: float) -> Tensor:
    """Return a tensor filled with `value`. With NumPy it is a view of an array that is written later."""
    new = torch.full_like(gradient, value * 2, requires_grad=False)
    if road == "numpy" and gradient.dtype != torch.bfloat16:
        array = new.numpy()
        new = torch.from_numpy(array)
        array *= 0.5
    else:
        new.mul_(0.5)
    return new
