"""Convolutions: a residual net that classifies, a U-Net that denoises."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        same = stride == 1 and channels == out
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Images [batch, 3, height, width] to logits [batch, classes]; each stage has twice the channels."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
        )
        sizes = [channels, channels, 2 * channels, 4 * channels]
        self.stages = nn.Sequential(
            *(
                nn.Sequential(
                    Residual(sizes[i], sizes[i + 1], 1 + (i > 0)), Residual(sizes[i + 1], sizes[i + 1], 1)
                )
                for i in range(3)
            )
        )
        self.head = nn.Linear(4 * channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(images)).mean((2, 3)))


def _twice(channels: int, out: int) -> nn.Sequential:
    """Two convolutions, with a norm over groups of channels."""
    layers: list[nn.Module] = []
    for size in (channels, out):
        layers += [nn.Conv2d(size, out, 3, 1, 1), nn.GroupNorm(8, out), nn.SiLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Images [batch, 3, height, width] to the same shape; height and width are multiples of 4."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        one, two, four = channels, 2 * channels, 4 * channels
        self.down = nn.ModuleList([_twice(3, one), _twice(one, two), _twice(two, four)])
        self.widen = nn.ModuleList([nn.ConvTranspose2d(four, two, 2, 2), nn.ConvTranspose2d(two, one, 2, 2)])
        self.up = nn.ModuleList([_twice(four, two), _twice(two, one)])
        self.out = nn.Conv2d(one, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level in self.down:
            x = level(functional.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        for widen, level, skipped in zip(self.widen, self.up, kept[1::-1], strict=True):
            x = level(torch.cat([widen(x), skipped], 1))
        return self.out(x)
