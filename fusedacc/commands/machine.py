"""The machine that is measured: names, memory, caches, and everything that a figure depends on."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path
from typing import Any

import torch

from ..kernels.machine_names import processor, version
from ..planner.budget import available


def cpu_name() -> str:
    """Return the CPU's model and its number of cores."""
    return f"{processor().rpartition(' (')[0]}, {os.cpu_count()} cores"


def available_memory(device: torch.device) -> int:
    """Return 90 % of the bytes that can still be allocated; 2 GiB if the system does not report them."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        return available(device) * 9 // 10
    except RuntimeError:
        return 2**31


def cache_bytes(device: torch.device) -> int:
    """Return the size of the last-level cache; 32 MiB if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text.removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 32 * 2**20


def collect(device: torch.device) -> dict[str, Any]:
    """Return what the figures depend on, as plain values."""
    prefixes = ("OMP_", "GOMP_", "KMP_", "MKL_", "ONEDNN_", "ATEN_", "MALLOC_", "LD_PRELOAD", "FUSEDACC_")
    return {
        "device": str(device),
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "environment": {key: value for key, value in sorted(os.environ.items()) if key.startswith(prefixes)},
        "fusedacc": version("fusedacc"),
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
