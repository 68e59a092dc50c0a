"""What a device's public figures and a kernel's machine code predict. Nothing here is measured."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from .devices import (
    ISSUED,
    LANES,
    REGISTER_UNIT,
    SCHEDULERS,
    SHARED_RESERVED,
    SHARED_UNIT,
    Architecture,
    Device,
)
from .kernels import Kernel, MainLoop

DRAM, ISSUE = "DRAM", "issue"
#: Of instructions: what makes their results; the first that matches counts. What is "" takes an issue slot
#: only: accesses to memory, jumps, and what the uniform datapath does once for a warp. Source: the
#: pipelines in the Nsight Compute Profiling Guide.
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
#: Instructions that make two results each.
TWO_RESULTS = re.compile(r"F(FMA|MUL|ADD)2\b|F2FP\b.*PACK_AB")


def pipe_of(instruction: str) -> str:
    """What makes an instruction's result; "" for nothing that is counted."""
    return next(pipe for pipe, pattern in PIPES if pattern.match(instruction))


def blocks_per_multiprocessor(kernel: Kernel, architecture: Architecture) -> int:
    """As `cuda_occupancy.h` finds it."""
    warps = -(-kernel.threads // LANES)
    registers = rounded_up(kernel.registers * LANES, REGISTER_UNIT)
    # Registers belong to a scheduler, and a block's warps are spread over all of them.
    warps_by_registers = architecture.registers // SCHEDULERS // registers * SCHEDULERS
    shared = rounded_up(kernel.shared + SHARED_RESERVED, SHARED_UNIT)
    limits = (architecture.warps // warps, architecture.blocks, warps_by_registers // warps)
    return min(*limits, architecture.shared // shared)


def rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def occupancy(kernel: Kernel, architecture: Architecture) -> float:
    """The share of a multiprocessor's warps that can be resident."""
    warps = -(-kernel.threads // LANES)
    return blocks_per_multiprocessor(kernel, architecture) * warps / architecture.warps


def results_by_pipe(instructions: Mapping[str, int]) -> dict[str, int]:
    """How many results of each kind a thread's round makes; and `issue`, all instructions."""
    found = {ISSUE: sum(instructions.values())}
    for name, count in instructions.items():
        pipe = pipe_of(name)
        if pipe:
            found[pipe] = found.get(pipe, 0) + count * (2 if TWO_RESULTS.match(name) else 1)
    # Integer products, and products of 16 bits, are made where those of float32 are.
    return found | {"float32": found.get("float32", 0) + found.get("products", 0)}


def rates(architecture: Architecture) -> dict[str, int]:
    """Results of each kind that a multiprocessor makes in a clock cycle."""
    return {
        ISSUE: ISSUED,
        "float32": architecture.float32,
        "float64": architecture.float64,
        "integer": architecture.integer,
        "products": architecture.integer,
        "conversions": architecture.conversions,
        "64-bit conversions": architecture.conversions64,
    }


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Of one main loop on one device, in seconds for each element.

    `dram`: at the memory's peak; `instructions`: at the rate of `pipe`, which takes the longest.
    `answer`: seconds in which memory has to answer, so that the bytes that are in flight keep it busy.
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
        """The instructions' time as a share of the memory's: below 1, memory is what takes the longest."""
        return self.instructions / self.dram

    @property
    def bandwidth(self) -> float:
        """In bytes per second: the roof."""
        return self.device.bandwidth * min(1.0, 1 / self.share)


def predict(kernel: Kernel, loop: MainLoop, device: Device) -> Prediction:
    rate, clocks = rates(device.architecture), device.multiprocessors * device.clock
    times = {
        pipe: results / loop.elements / (rate[pipe] * clocks)
        for pipe, results in results_by_pipe(loop.instructions).items()
    }
    pipe = max(times, key=lambda each: times[each])
    resident = blocks_per_multiprocessor(kernel, device.architecture) * kernel.threads
    in_flight = loop.bytes_in_flight * resident * device.multiprocessors
    # Loads share the memory with stores, which wait for nothing.
    loads = loop.loaded / (loop.loaded + loop.stored)
    return Prediction(
        device=device,
        dram=loop.bytes_per_element / device.bandwidth,
        instructions=times[pipe],
        pipe=pipe,
        answer=in_flight / (device.bandwidth * loads),
    )
