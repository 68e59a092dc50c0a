"""Stands in for a stacked weight (experts, ...) as long as a forward runs that reads it.

What is done with it is done with the parameter, but for two things: `weight[e]`, and, in modules whose
grouped products are known, `grouped_mm`. Their gradients go to the sum.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from . import grouped
from .grouped import StackedSum
from .selected import SelectedFunction

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


class StackedWeight(Tensor):
    """A parameter's stand-in, made by `stand_in`; also of its transposed matrices."""

    #: As for torch's own parameters of subclasses: isinstance(stand_in, nn.Parameter).
    _is_param = True
    plain: Tensor
    target: StackedSum
    groups: bool
    turned: bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = _OWN.get(func)
        if own is not None and torch.is_grad_enabled():
            output = own(*args, **kwargs)
            if output is not None:
                return output
        args, kwargs = tree_map_only(StackedWeight, operator.attrgetter("plain"), (args, kwargs))
        return func(*args, **kwargs)

    # nn.Parameter defines these methods, so that __torch_function__ is not asked.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.plain, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]  # repr() gives no tensor_contents
        return repr(self.plain)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["plain"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.plain, name, value)


def _on_plain(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    args, kwargs = tree_map_only(StackedWeight, operator.attrgetter("plain"), (args, kwargs or {}))
    return func(*args, **kwargs)


class _FakeStackedWeight(StackedWeight):
    """That of a fake parameter, whose aliases are fake tensors and nothing else."""

    __torch_dispatch__: Any = classmethod(_on_plain)


def _fake(plain: Tensor) -> StackedWeight:
    make = Tensor._make_wrapper_subclass
    strides, needed = plain.stride(), plain.requires_grad
    return make(
        _FakeStackedWeight, plain.shape, strides, dtype=plain.dtype, device=plain.device, requires_grad=needed
    )


def stand_in(target: StackedSum, groups: bool) -> StackedWeight:
    """One for the parameter of `target`. `groups`: its grouped products are known."""
    return _made(target.slot.param, target, groups, False)


def plain_of(weight: Tensor) -> Tensor:
    """The parameter itself, where a stand-in may be at hand."""
    return weight.plain if isinstance(weight, StackedWeight) else weight


def _made(plain: Tensor, target: StackedSum, groups: bool, turned: bool) -> StackedWeight:
    if isinstance(plain, FakeTensor):
        made = _fake(plain)
    else:
        # An alias with a graph: what sees no subclass differentiates by the parameter all the same.
        made = torch._C.TensorBase.as_subclass(plain, StackedWeight)  # fastai replaces Tensor.as_subclass
    made.__dict__.update(plain=plain, target=target, groups=groups, turned=turned)
    return made


def _select(weight: Any, index: Any) -> Tensor | None:
    """weight[index], of one expert; None for what else may stand in brackets."""
    if not isinstance(weight, StackedWeight) or weight.plain is not weight.target.slot.param:
        return None
    if isinstance(index, Tensor):
        if type(index) is not Tensor or index.dim() != 0 or index.dtype not in _INTEGERS:
            return None
    elif isinstance(index, bool) or not hasattr(index, "__index__"):
        return None
    own, experts = operator.index(index), len(weight.plain)
    if not -experts <= own < experts:
        return None
    weight.target.declare("grouped")
    return SelectedFunction.apply(weight.plain, own % experts, weight.target)


def _transpose(weight: Any, first: Any, second: Any) -> Tensor | None:
    """The transposed matrices, for a grouped product."""
    if not isinstance(weight, StackedWeight) or not weight.groups or {first % 3, second % 3} != {1, 2}:
        return None
    return _made(weight.plain.transpose(1, 2), weight.target, True, not weight.turned)


def _multiply(rows: Any, weight: Any, *, offs: Any = None, **others: Any) -> Tensor | None:
    """rows (S, in) times the experts' matrices (experts, in, out)."""
    if not isinstance(weight, StackedWeight) or not weight.groups:
        return None
    if any(value is not None for value in others.values()):  # a bias, another dtype
        return None
    return grouped.apply(rows, weight.target, offs, inward=not weight.turned)


#: What is not done with the parameter; None where it is after all.
_OWN: dict[Any, Callable[..., Tensor | None]] = {
    Tensor.__getitem__: _select,
    Tensor.transpose: _transpose,
    torch.transpose: _transpose,
    F.grouped_mm: _multiply,
    torch._grouped_mm: _multiply,
}
