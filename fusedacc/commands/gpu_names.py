"""The memory of GPUs that `python -m fusedacc plan --device NAME` knows by name."""

#: Total MiB as `nvidia-smi` reports it. A GPU sold with 80 GB does not have a round number.
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
#: MiB that the driver, one process's context and the libraries' workspaces use.
DRIVER_MIB = 1024
