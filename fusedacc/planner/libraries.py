"""What torch's libraries keep for themselves on a CPU, past torch's allocator: measured once.

oneDNN and MKL keep generated code and buffers for packed operands, and the C library an arena of addresses
for each thread. A process of its own runs products, convolutions and attention, forward and backward, and
compares the addresses that it holds before and after.
"""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

#: Seconds for the process.
_PATIENCE = 120


@functools.cache
def scratch_bytes() -> int:
    """Bytes of address space that the libraries add to a process that trains; 0 where that cannot be read."""
    if not Path("/proc/self/status").exists():
        return 0
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import main; main({torch.get_num_threads()})"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=_PATIENCE,
    )
    return int(done.stdout) if done.returncode == 0 else 0


def virtual_bytes() -> int:
    """The addresses that this process holds."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmSize:"):
            return 1024 * int(line.split()[1])
    raise OSError("/proc/self/status has no VmSize")


def _run(dtype: torch.dtype) -> None:
    def leaf(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    query, key, value = (leaf(1, 4, 256, 64) for _ in range(3))
    outputs = [
        functional.linear(leaf(256, 512), leaf(512, 512), leaf(512)),
        functional.conv2d(leaf(2, 32, 28, 28), leaf(32, 32, 3, 3), padding=1),
        functional.scaled_dot_product_attention(query, key, value),
        functional.layer_norm(leaf(256, 512), (512,)),
    ]
    for output in outputs:
        output.sum().backward()


def main(threads: int) -> None:
    """Print the bytes."""
    torch.set_num_threads(threads)
    torch.zeros(2**20).add_(1).sum()  # starts the threads
    gc.collect()
    before = virtual_bytes()
    for dtype in (torch.float32, torch.bfloat16):
        _run(dtype)
    gc.collect()
    print(max(0, virtual_bytes() - before))
