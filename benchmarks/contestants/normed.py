"""A small convolutional net on handwritten digits, with norms over micro-batches or over single samples."""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

import fusedacc

#: Norms over the samples of a micro-batch, and over groups of a sample's channels.
NORMS = {"BatchNorm": nn.BatchNorm2d, "GroupNorm": lambda channels: nn.GroupNorm(4, channels)}
UNSEEN = 297
LR = 3e-3


def net(norm: str, width: int, seed: int) -> nn.Module:
    """Images [batch, 1, 8, 8] to logits [batch, 10]."""
    torch.manual_seed(seed)
    made = NORMS[norm]
    return nn.Sequential(
        nn.Conv2d(1, width, 3, 1, 1, bias=False), made(width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False), made(2 * width), nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, 1, 1, bias=False), made(2 * width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10),
    )  # fmt: skip


def digits() -> tuple[Tensor, Tensor]:
    """Return images, float32 [1797, 1, 8, 8], and labels. The last `UNSEEN` are not trained on."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)


def gradient(model: nn.Module, images: Tensor, labels: Tensor, size: int) -> Tensor:
    """Return the mean's gradient as a vector, from micro-batches of `size`. The model does not change."""
    own = copy.deepcopy(model)
    parts = list(zip(images.split(size), labels.split(size), strict=True))
    for x, y in parts:
        (functional.cross_entropy(own(x), y) / len(parts)).backward()
    return torch.cat([p.grad.flatten() for p in own.parameters()])


def losses(norm: str, width: int, size: int, batch: int, epochs: int, seed: int) -> Iterator[float]:
    images, labels = digits()
    model = net(norm, width, seed)
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.AdamW(model.parameters(), lr=LR), batch // size)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(images) - UNSEEN, generator=generator)
        order = order[: len(order) // batch * batch]
        for chosen in order.split(size):
            functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model.eval()
            yield functional.cross_entropy(model(images[-UNSEEN:]), labels[-UNSEEN:]).item()
            model.train()
