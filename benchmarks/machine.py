"""The machine that is measured, and what a figure on it depends on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

# Threads stay on their cores. Read by OpenMP when torch loads it, so before the import.
os.environ.setdefault("OMP_PROC_BIND", "true")
os.environ.setdefault("OMP_PLACES", "cores")

import torch

ROOT = Path(__file__).resolve().parent.parent


def environment(device: torch.device | str = "cpu") -> dict[str, str]:
    """What a figure depends on, as columns; `date` is that of the run."""
    device = torch.device(device)
    set_here = [f"{name}={value}" for name, value in sorted(os.environ.items())]
    malloc = [text for text in set_here if text.startswith(("MALLOC_", "LD_PRELOAD="))]
    threads = [text for text in set_here if text.startswith(("OMP_", "GOMP_", "KMP_"))]
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "threads": " ".join([str(torch.get_num_threads()), *threads]),
        "allocator": " ".join(malloc) or "libc, defaults",
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": str(torch.version.cuda or ""),
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


CONDITIONS = ("device", "threads", "allocator", "torch", "triton", "cuda", "python", "commit", "date")


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(names) or os.cpu_count()} cores"


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


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated, a tenth being left alone."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
    else:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
        group = Path("/sys/fs/cgroup")
        if (group / "memory.max").exists() and (most := (group / "memory.max").read_text().strip()) != "max":
            free = min(free, int(most) - int((group / "memory.current").read_text()))
    return free * 9 // 10
