"""GPUs by name, and what training may take of each: for plans of a GPU that is not here."""

from __future__ import annotations

from ...planner.plans import RESERVE

_MIB = 2**20
#: MiB that the vendor's `nvidia-smi` calls the total of each. What is sold as 80 GB is no round number.
TOTAL_MIB = {
    "b200": 183_359,
    "h200": 143_771,
    "h100": 81_559,
    "a100-80": 81_920,
    "a100-40": 40_960,
    "l40s": 46_068,
    "l4": 23_034,
    "a10": 23_028,
    "t4": 15_360,
    "rtx5090": 32_607,
    "rtx4090": 24_564,
    "rtx3090": 24_576,
}
#: What the driver, the context of one process and the libraries' workspaces take of it.
DRIVER_MIB = 1024


def memory_of(name: str) -> int:
    """Bytes that training may take on a GPU of this name: its total, less `DRIVER_MIB`, less the share that
    `plan` leaves alone of what a device has free."""
    return int((1 - RESERVE) * (TOTAL_MIB[name] - DRIVER_MIB) * _MIB)
