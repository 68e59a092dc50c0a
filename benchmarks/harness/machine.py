"""The machine that is measured, and what a figure on it depends on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch

from fusedacc.commands.bench import conditions

ROOT = Path(__file__).resolve().parents[2]


def environment(device: torch.device | str = "cpu") -> dict[str, str]:
    """What a figure depends on, as columns; `date` is that of the run."""
    found = conditions.collect(torch.device(device))
    set_here = [f"{name}={value}" for name, value in sorted(os.environ.items())]
    malloc = [text for text in set_here if text.startswith(("MALLOC_", "LD_PRELOAD="))]
    threads = [text for text in set_here if text.startswith(("OMP_", "GOMP_", "KMP_"))]
    return {
        "device": found["name"],
        "threads": " ".join([str(torch.get_num_threads()), *threads]),
        "allocator": " ".join(malloc) or "libc, defaults",
        **{name: found[name] or "" for name in ("torch", "triton", "cuda", "python")},
        "commit": commit(),
        "date": found["date"],
    }


CONDITIONS = ("device", "threads", "allocator", "torch", "triton", "cuda", "python", "commit", "date")


def commit() -> str:
    """The commit measured, with "+" if files differ from it; "unknown" outside a git checkout.

    A copy that is no checkout can be told by the environment variable FUSEDACC_COMMIT.
    """
    told = os.environ.get("FUSEDACC_COMMIT")
    if told:
        return told
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:  # no git
        return "unknown"
    return found.stdout.strip() or "unknown"
