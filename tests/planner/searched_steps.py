"""Steps that searches for a micro-batch size run in separate processes."""

from collections.abc import Callable

import torch

import fusedacc

MIB = 2**20
Run = Callable[[int], None]
#: So large that the C library gives each block back as soon as it is free.
UNIT = 40 * MIB


def blocks() -> Run:
    """Needs a block for each sample, and nothing else."""

    def run(size: int) -> None:
        torch.empty(size * UNIT, dtype=torch.uint8)

    return run


def gpu_blocks() -> Run:
    """The same on a GPU."""

    def run(size: int) -> None:
        torch.empty(size * UNIT, dtype=torch.uint8, device="cuda")

    return run


def trains_and_fails() -> Run:
    """Two updates of real training, and an exception."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.Tanh(), torch.nn.Linear(256, 16))
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.AdamW(model.parameters()))

    def run(size: int) -> None:
        if optimizer.num_updates == 2:
            print("this was printed")
            raise KeyError("no such")
        for _ in range(2):
            model(torch.randn(size, 2048, 16)).square().mean().backward()
        optimizer.step(), optimizer.zero_grad()

    return run
