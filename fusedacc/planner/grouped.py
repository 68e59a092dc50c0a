"""Products of grouped rows on fake CPU tensors: torch's own fake implementation knows a GPU's alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

#: Rows of a product begin at multiples of so many bytes.
_ALIGNMENT = 16


class GroupedProducts(TorchDispatchMode):
    """While it is entered, `grouped_mm` of CPU tensors returns what it does there, in any dtype.

    Enter it inside a `FakeTensorMode`.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].device.type == "cpu":
            return _product(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _product(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Rows are those of `left`, columns of `right`; where neither is stacked, each group has a product."""
    groups = [left.shape[0]] if left.dim() == 3 and right.dim() == 3 else []
    if left.dim() == 2 and right.dim() == 2:
        groups = [0 if offs is None else offs.shape[0]]
    step = _ALIGNMENT // left.element_size()
    width = right.shape[-1]
    shape = [*groups, left.shape[-2], -(-width // step) * step]
    return torch.empty(shape, dtype=out_dtype or left.dtype, device=left.device)[..., :width]
