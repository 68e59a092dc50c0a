"""Predicts a kernel's time from its machine code and a device's published figures. Nothing is measured."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from . import devices
from .devices import LANES, SCHEDULERS, Architecture, Device
from .kernels import Kernel, MainLoop

DRAM, ISSUE = "DRAM", "issue"
#: The pipe that executes each instruction; the first matching pattern counts. Instructions with the pipe ""
#: take only an issue slot: memory accesses, jumps, and instructions that the uniform datapath executes once
#: per warp. Source: the pipelines in the Nsight Compute Profiling Guide.
PIPES = (
    (
        "",
        re.compile(r"LD|ST|RED|ATOM|MEMBAR|BAR|BRA|BSSY|BSYNC|BREAK|EXIT|RET|CALL|WARPSYNC|CCTL|DEPBAR|NOP"),
    ),
    ("", re.compile(r"U[A-Z]|S2|CS2|R2U|VOTE|SHFL|ELECT")),
    ("float64", re.compile(r"D(ADD|MUL|FMA|SETP|MNMX)")),
    ("64-bit conversions", re.compile(r"(F2F|F2I|I2F).*64")),
    ("conversions", re.compile(r"F2F|F2I|I2F|I2I|MUFU|FRND")),
    ("float32", re.compile(r"F(ADD|MUL|FMA)")),
    ("products", re.compile(r"IMAD|IDP|HFMA2|HADD2|HMUL2")),
    ("integer", re.compile(r"")),
)
#: Instructions that produce two results each.
TWO_RESULTS = re.compile(r"F(FMA|MUL|ADD)2\b|F2FP\b.*PACK_AB")


def pipe_of(instruction: str) -> str:
    """Return the pipe that executes an instruction, or "" if the instruction takes only an issue slot."""
    return next(pipe for pipe, pattern in PIPES if pattern.match(instruction))


def blocks_per_multiprocessor(kernel: Kernel, architecture: Architecture) -> int:
    """Return the maximum number of resident blocks per multiprocessor, computed as in `cuda_occupancy.h`."""
    warps = -(-kernel.threads // LANES)
    registers = rounded_up(kernel.registers * LANES, devices.REGISTER_UNIT)
    # Registers belong to a scheduler, and a block's warps are spread over all of them.
    warps_by_registers = architecture.registers // SCHEDULERS // registers * SCHEDULERS
    shared = rounded_up(kernel.shared + devices.SHARED_RESERVED, devices.SHARED_UNIT)
    limits = (architecture.warps // warps, architecture.blocks, warps_by_registers // warps)
    return min(*limits, architecture.shared // shared)


def rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def occupancy(kernel: Kernel, architecture: Architecture) -> float:
    """Return the fraction of a multiprocessor's maximum warps that can be resident."""
    warps = -(-kernel.threads // LANES)
    return blocks_per_multiprocessor(kernel, architecture) * warps / architecture.warps


def results_by_pipe(instructions: Mapping[str, int]) -> dict[str, int]:
    """Return the results per pipe of one iteration of a thread. `issue` is the number of all instructions."""
    found = {ISSUE: sum(instructions.values())}
    for name, count in instructions.items():
        pipe = pipe_of(name)
        if pipe:
            found[pipe] = found.get(pipe, 0) + count * (2 if TWO_RESULTS.match(name) else 1)
    # Integer products and 16-bit products also use the float32 pipe.
    return found | {"float32": found.get("float32", 0) + found.get("products", 0)}


def rates(architecture: Architecture) -> dict[str, int]:
    """Return the results of each pipe per clock cycle of a multiprocessor."""
    return {
        ISSUE: devices.ISSUED,
        "float32": architecture.float32,
        "float64": architecture.float64,
        "integer": architecture.integer,
        "products": architecture.integer,
        "conversions": architecture.conversions,
        "64-bit conversions": architecture.conversions64,
    }


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted times of one main loop on one device, in seconds per element.

    Attributes:
        dram: at the peak memory bandwidth.
        instructions: for the slowest pipe, which is `pipe`.
        answer: the highest memory latency, in seconds, at which the bytes in flight keep the memory busy.
    """

    device: Device
    dram: float
    instructions: float
    pipe: str
    answer: float

    @property
    def bound(self) -> str:
        return DRAM if self.dram >= self.instructions else self.pipe

    @property
    def share(self) -> float:
        """The instructions' time divided by the memory's time. Below 1 the loop is memory-bound."""
        return self.instructions / self.dram

    @property
    def bandwidth(self) -> float:
        """The roofline: the attainable memory bandwidth in bytes per second."""
        return self.device.bandwidth * min(1.0, 1 / self.share)


def predict(kernel: Kernel, loop: MainLoop, device: Device) -> Prediction:
    rate = rates(device.architecture)
    clocks = device.multiprocessors * device.clock
    times = {
        pipe: results / loop.elements / (rate[pipe] * clocks)
        for pipe, results in results_by_pipe(loop.instructions).items()
    }
    pipe = max(times, key=lambda each: times[each])
    resident = blocks_per_multiprocessor(kernel, device.architecture) * kernel.threads
    in_flight = loop.bytes_in_flight * resident * device.multiprocessors
    # Loads share the bandwidth with stores. No instruction waits for a store.
    loads = loop.loaded / (loop.loaded + loop.stored)
    dram = loop.bytes_per_element / device.bandwidth
    answer = in_flight / (device.bandwidth * loads)
    return Prediction(device, dram, times[pipe], pipe, answer)
