"""Operators that torch runs otherwise on fake CPU tensors than on real ones: grouped products, and the LSTM.

torch's fake implementation of grouped products knows a GPU's alone. An LSTM of real tensors runs by oneDNN's
layers; torch asks whether tensors are a CPU's by a key that fake ones lack, and would run each time step by
itself, which takes other memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
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


#: How many weights a layer has in one direction; those with projections have one more, and no oneDNN.
_WITH_BIASES = 4
#: oneDNN's number of the LSTM among recurrent layers.
_LSTM = 2
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class RunLstmByOneDnn(TorchFunctionMode):
    """While it is entered, an LSTM of fake CPU tensors calls the operators that one of real tensors would."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch._VF.lstm and not kwargs and len(args) == 9 and _has_onednn(args):
            return _lstm(*args)
        return func(*args, **(kwargs or {}))


def _has_onednn(args: tuple) -> bool:
    input, state, weights, biases, layers, _, _, both, _ = args
    return bool(
        isinstance(state, (list, tuple))  # else the form for packed sequences
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and input.device.type == "cpu"
        and input.dtype in _DTYPES
        and input.numel() > 0
        and len(weights) == layers * (1 + both) * (_WITH_BIASES if biases else 2)
    )


def _lstm(
    input: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    both: bool,
    first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    own, directions = _WITH_BIASES if biases else 2, 1 + both
    x = input.transpose(0, 1) if first else input
    hidden, cells = (part.contiguous() for part in state)
    lasts: list[tuple[Tensor, Tensor]] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            w = list(weights[index * own : (index + 1) * own])
            if not biases:
                w += [torch.zeros(w[0].shape[0], dtype=w[0].dtype, device=w[0].device) for _ in range(2)]
            output, h, c, _ = torch.ops.aten.mkldnn_rnn_layer(
                x, *w, hidden[index], cells[index], direction == 1, [], _LSTM, hidden.shape[2], 1, biases,
                False, False, train,
            )  # fmt: skip
            outputs.append(output)
            lasts.append((h, c))
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < layers - 1:
            x = functional.dropout(x, dropout)
    last_hidden, last_cells = (torch.stack(each) for each in zip(*lasts, strict=True))
    return (x.transpose(0, 1) if first else x), last_hidden, last_cells
