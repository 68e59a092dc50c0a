"""Trains with the installed fusedacc and with plain PyTorch. The weights must be bitwise equal."""

import torch
from torch import nn

import fusedacc


def train(steps: int | None) -> list[torch.Tensor]:
    """Make two updates of four micro-batches each and return the weights.

    Args:
        steps: the wrapper's `gradient_accumulation_steps`. None: train with plain PyTorch.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if steps is not None:
        optimizer = fusedacc.AccumulatingOptimizer(optimizer, gradient_accumulation_steps=steps)
    for index in range(8):
        loss = model(torch.randn(16, 64)).square().mean()
        (loss if steps is not None else loss / 4).backward()
        if steps is not None or index % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    if steps is not None:
        print(optimizer.explain())
    return [parameter.detach() for parameter in model.parameters()]


def main() -> None:
    if "site-packages" not in fusedacc.__file__:
        raise SystemExit(f"the imported package is not the installed one: {fusedacc.__file__}")
    if not all(map(torch.equal, train(4), train(None))):
        raise SystemExit("the wrapper's weights differ from the weights of the plain PyTorch loop")
    print(f"fusedacc {fusedacc.__version__} and plain PyTorch train bitwise equal weights")


if __name__ == "__main__":
    main()
