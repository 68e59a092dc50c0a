"""Published figures of GPU architectures and devices, with their sources."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

LANES = 32
#: Each multiprocessor has four schedulers. Each scheduler issues one instruction for a warp per clock cycle.
#: Source: the tuning guides for Ampere, Ada, Hopper and Blackwell, docs.nvidia.com/cuda.
SCHEDULERS = 4
ISSUED = SCHEDULERS * LANES


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The limits of a multiprocessor, and the results per clock cycle of its instructions.

    Sources:
        Blocks and allocation units: `cuda_occupancy.h` of the CUDA toolkit.
        Warps, registers and shared memory: the CUDA programming guide, Compute Capabilities.
        Results: the CUDA C++ Best Practices Guide, Throughput of Native Arithmetic Instructions.

    Attributes:
        warps, blocks: the maximum number of resident ones.
        shared: bytes of shared memory. Each block takes 1 KiB more than it asks for.
        float32, float64: results of additions, products and fused multiply-adds.
        conversions64: results of conversions from and to 64-bit types.
    """

    name: str
    warps: int
    blocks: int
    shared: int
    float32: int
    float64: int
    conversions64: int
    registers: int = 65536
    #: 32-bit integer additions, shifts, comparisons, logic, selects and multiply-adds. We ignore that sm_120
    #: makes 128 additions.
    integer: int = 64
    #: Roundings of float32 to 16 bits and other conversions: the lowest of the documented rates.
    conversions: int = 16


#: Registers are allocated to a warp, and shared memory to a block, in multiples of these units. Each block
#: also takes the reserved bytes.
REGISTER_UNIT, SHARED_UNIT, SHARED_RESERVED = 256, 128, 1024

_LISTED = (
    Architecture("sm_80", 64, 32, 164 << 10, 64, 32, 16),
    Architecture("sm_89", 48, 24, 100 << 10, 128, 2, 2),
    Architecture("sm_90", 64, 32, 228 << 10, 128, 64, 16),
    Architecture("sm_100", 64, 32, 228 << 10, 128, 64, 16),
    Architecture("sm_120", 48, 24, 100 << 10, 128, 2, 2),
)
ARCHITECTURES = {architecture.name: architecture for architecture in _LISTED}


@dataclasses.dataclass(frozen=True)
class Device:
    """One GPU: its boost clock in Hz, and its peak memory bandwidth in bytes per second.

    `code`: for each backend, the architecture of the machine code that the device runs. `source`: where the
    figures are published.
    """

    name: str
    architecture: Architecture
    multiprocessors: int
    clock: float
    bandwidth: float
    code: Mapping[str, str]
    source: str


def device(
    name: str, architecture: str, sms: int, mhz: int, gigabytes: int, source: str, cuda: str = ""
) -> Device:
    """Return a `Device` with `sms` multiprocessors, from its clock in MHz and its bandwidth in GB per second.

    `cuda` is the architecture of the native library's code that the device runs, if it is another one.
    """
    code = {"cuda": cuda or architecture, "triton": architecture}
    return Device(name, ARCHITECTURES[architecture], sms, mhz * 1e6, gigabytes * 1e9, code, source)


DEVICES = (
    device("A100 80 GB SXM", "sm_80", 108, 1410, 2039, "A100 data sheet; A100 architecture white paper"),
    device("H100 SXM", "sm_90", 132, 1980, 3350, "H100 data sheet; H100 architecture white paper"),
    device(
        "B200",
        "sm_100",
        148,
        1965,
        8000,
        "Blackwell architecture brief (bandwidth); techpowerup.com/gpu-specs",
    ),
    device("RTX 4090", "sm_89", 128, 2520, 1008, "Ada architecture white paper", cuda="sm_80"),
    device("RTX 5090", "sm_120", 170, 2407, 1792, "RTX Blackwell architecture white paper"),
)
#: The architectures to compile for, by backend. The native library has no code for sm_89, which runs the code
#: for sm_80. For sm_120 the driver compiles the library's PTX.
COMPILED = {
    "cuda": ("sm_80", "sm_90", "sm_100", "sm_120"),
    "triton": ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120"),
}
