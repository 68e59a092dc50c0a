"""Steps that searches for a micro-batch try, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

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


def layers() -> Run:
    """Real training, whose activations take 20 MiB for each sample, and more than one of them lives."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.Tanh(), torch.nn.Linear(256, 16))
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.AdamW(model.parameters()))

    def run(size: int) -> None:
        for _ in range(2):
            model(torch.randn(size, 20480, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


class WeirdError(Exception):
    """Cannot be made again from what pickle has of it."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one + other)


def wrong_from(least: int) -> Run:
    def run(size: int) -> None:
        if size >= least:
            print("this was printed")
            raise KeyError("no such")

    return run


def dies_from(least: int, number: int) -> Run:
    def run(size: int) -> None:
        if size >= least:
            os.kill(os.getpid(), number)

    return run


def hangs(where: str) -> Run:
    """With a process of its own, whose number is written down."""

    def run(size: int) -> None:
        other = subprocess.Popen(["sleep", "600"])
        Path(where).write_text(f"{os.getpid()} {other.pid}")
        time.sleep(600)

    return run
