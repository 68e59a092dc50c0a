"""Rows of a table: features to classes, and lookups to clicks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers from each width to the next, with ReLU between."""
    layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class MLP(nn.Module):
    """Features [rows, widths[0]] to logits [rows, widths[-1]].

    No bare Sequential: `compile()` of one does nothing, as torch leaves frames of its own modules alone.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = mlp(widths)

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features)


class DLRM(nn.Module):
    """Features [samples, 13] and a row of each table, int64 [samples, tables], to a logit, [samples]."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = mlp((13, 512, 256, width))
        self.top = mlp((width + tables * (tables + 1) // 2, 512, 256, 1))

    def forward(self, features: Tensor, looked_up: Tensor) -> Tensor:
        dense = self.bottom(features)
        rows = [table(column) for table, column in zip(self.tables, looked_up.unbind(1), strict=True)]
        stacked = torch.stack([dense, *(row.to(dense.dtype) for row in rows)], 1)
        first, second = torch.tril_indices(stacked.shape[1], stacked.shape[1], -1)
        products = (stacked @ stacked.transpose(1, 2))[:, first, second]
        return self.top(torch.cat([dense, products], 1))[:, 0]


class Linears(nn.Module):
    """Those of a transformer's block: attention's two and the MLP's two, each on columns of the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        shapes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
        self.layers = nn.ModuleList(nn.Linear(*shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, 4 width) -> (tokens, 9 width)."""
        return torch.cat([layer(x[:, : layer.in_features]) for layer in self.layers], 1)
