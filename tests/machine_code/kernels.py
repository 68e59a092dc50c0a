"""Reads every GPU kernel's machine code: registers, spills, shared memory, and the main loops of the kernels
that stream through memory."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import compile as compilers
from .disassembly import Instruction, Loop, functions, loops

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
#: In the order of csrc/common/dtypes.h.
DTYPES = ("float32", "bfloat16", "float16", "float64")
COMMON = compilers.ROOT / "csrc" / "common"
#: Units of compilation: the files of csrc/cuda/ and the kinds of Triton kernels.
SOURCES = {
    "cuda": ("accumulate", "norm"),
    "triton": ("accumulation", "norm", "rows", "grouped", "softmax"),
}
#: Patterns for the mangled names of the CUDA kernels, by source.
NAMES = {
    "accumulate": re.compile(
        r"(?P<kernel>flat_kernel|strided_kernel)ILi(?P<pair>\d+)E\w*?BatchILi(?P<room>\d+)E"
    ),
    "norm": re.compile(
        r"(?P<kernel>(?:flat|strided|finish)_norm_kernel)I(?:LNS_5DtypeE(?P<dtype>\d)E)?"
        r"\w*?NormKindE(?P<norm>\d)E(?:\w*?BatchILi(?P<room>\d+)E)?"
    ),
}
#: The Triton kernel for each method of `Compiler` in `machine_code/triton_kernels.py`.
TRITON_NAMES = {
    "accumulation": "scale_accumulate",
    "norm": "norm_partials",
    "end": "finish_norm",
    "join": "join_partials",
    "grouped": "grouped_accumulate",
}
#: The modules that read machine code. A change to them invalidates the cache.
READERS = ("compile.py", "disassembly.py", "kernels.py")
ADDS, OVERWRITES, READS = "adds", "overwrites", "reads"
#: The fewest bytes of a vector access. Main loops use only vector accesses.
VECTOR_BYTES = 8


@dataclasses.dataclass(frozen=True)
class MainLoop:
    """A main loop. All numbers are per thread and iteration.

    Attributes:
        role: `ADDS`, `OVERWRITES` or `READS`: how the loop uses accumulators.
        loaded, stored: bytes loaded from and stored to global memory.
        load_bytes, store_bytes: the widths of the accesses.
        loads_in_flight, bytes_in_flight: of loads that are issued before the first loaded value is used.
        instructions: the number of occurrences of each instruction.
    """

    role: str
    elements: int
    loaded: int
    stored: int
    load_bytes: list[int]
    store_bytes: list[int]
    loads_in_flight: int
    bytes_in_flight: int
    instructions: dict[str, int]

    @property
    def bytes_per_element(self) -> float:
        return (self.loaded + self.stored) / self.elements

    @property
    def instructions_per_element(self) -> float:
        return sum(self.instructions.values()) / self.elements


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel compiled for one architecture.

    Attributes:
        gradient: the gradient's dtype, or "" for a kernel that reads no gradient.
        stochastic: whether the kernel rounds stochastically.
        variant: distinguishes kernels with the same name and dtypes.
        threads, registers: per block, and per thread.
        shared, stack: bytes of shared memory per block, and of local memory per thread.
        local_accesses: the number of instructions that access local memory.
        loops: the main loops. Empty for kernels that do not stream through memory.
    """

    backend: str
    name: str
    gradient: str
    accumulator: str
    stochastic: bool
    variant: str
    architecture: str
    threads: int
    registers: int
    shared: int
    stack: int
    local_accesses: int
    loops: list[MainLoop]

    @property
    def pair(self) -> str:
        into = f"{self.gradient} into {self.accumulator}" if self.gradient else self.accumulator
        return into + (", stochastic" if self.stochastic else "")


@functools.cache
def pairs() -> list[tuple[str, str, bool]]:
    """Return the native library's dtype pairs, in order, and whether rounding is stochastic."""
    table = re.search(r"kPairs\[\] = \{(.*?)\n\};", (COMMON / "dtypes.h").read_text(), re.DOTALL)
    assert table is not None
    found = re.findall(r"\{Dtype::k(\w+), Dtype::k(\w+)\}", table[1])
    return [
        (gradient.lower(), sums.lower().removeprefix("stochastic"), sums.startswith("Stochastic"))
        for gradient, sums in found
    ]


@functools.cache
def constant(header: str, name: str) -> int:
    """Return a constant from a header of `csrc/cuda/device/`."""
    text = (compilers.ROOT / "csrc" / "cuda" / "device" / header).read_text()
    match = re.search(rf"\b{name} = (\d+);", text)
    assert match is not None
    return int(match[1])


def main_loops(code: Sequence[Instruction], gradient: str, accumulator: str) -> list[MainLoop]:
    """Return the main loop of each role: the loops that process most of a large tensor.

    Only innermost loops count whose accesses to global memory are all vector accesses. A loop that stores has
    the role `ADDS` if it loads accumulators, else `OVERWRITES`. A loop that stores nothing has the role
    `READS`. Triton's loops load accumulators under a condition, so one loop adds and overwrites.

    The main loop of a role moves the most bytes per iteration. Among equals it is the one with the lowest
    address. Of a norm's passes, that is the first.

    The number of elements per iteration is the number of bytes stored (or loaded, if the loop stores nothing)
    divided by the size of an accumulator.
    """
    best: dict[str, Loop] = {}
    for loop in loops(code):
        accesses = loop.accesses("LDG", "STG")
        if not accesses or any(access.bytes < VECTOR_BYTES for access in accesses):
            continue
        elements = (loop.stored or loop.loaded) // BYTES[accumulator]
        moved = loop.loaded - (elements * BYTES[gradient] if gradient else 0)
        role_of_writer = ADDS if moved else OVERWRITES
        role = role_of_writer if loop.stored else READS
        if role not in best or loop.loaded + loop.stored > best[role].loaded + best[role].stored:
            best[role] = loop
    if ADDS in best and any(access.predicate for access in best[ADDS].accesses("LDG")):
        # A condition guards the loads of accumulators, so this loop overwrites too.
        best.pop(OVERWRITES, None)
    return [described(role, loop, BYTES[accumulator]) for role, loop in sorted(best.items())]


def described(role: str, loop: Loop, size: int) -> MainLoop:
    return MainLoop(
        role=role,
        elements=(loop.stored or loop.loaded) // size,
        loaded=loop.loaded,
        stored=loop.stored,
        load_bytes=sorted({access.bytes for access in loop.accesses("LDG")}),
        store_bytes=sorted({access.bytes for access in loop.accesses("STG")}),
        loads_in_flight=len(loop.loads_in_flight),
        bytes_in_flight=sum(access.bytes for access in loop.loads_in_flight),
        instructions=dict(sorted(loop.instructions.items())),
    )


def local_accesses(code: Sequence[Instruction]) -> int:
    return sum(instruction.kind in ("LDL", "STL") for instruction in code)


def cuda_kernels(source: str, architecture: str) -> Iterator[Kernel]:
    """Yield the kernels of `csrc/cuda/SOURCE.cu`."""
    cubin = compilers.nvcc_compiled(source, architecture) / f"{source}.cubin"
    usage = compilers.resources(cubin)
    for mangled, code in functions(compilers.dumped(cubin, "sass")):
        match = NAMES[source].search(mangled)
        assert match is not None, mangled
        parts = match.groupdict()
        none = "", "float64", False
        gradient, accumulator, stochastic = pairs()[int(parts["pair"])] if parts.get("pair") else none
        if parts.get("dtype"):
            accumulator = DTYPES[int(parts["dtype"])]
        variant = []
        streams = False
        if parts.get("norm"):
            variant.append("norm 2" if parts["norm"] == "0" else "norm inf")
        if parts.get("room"):
            variant.append(f"{parts['room']} tensors")
            streams = parts["kernel"].startswith("flat")
        finish = parts["kernel"].startswith("finish")
        threads = ("norm_block.h", "kFinishThreads") if finish else ("accumulate_block.h", "kThreads")
        yield Kernel(
            backend="cuda",
            name=parts["kernel"],
            gradient=gradient,
            accumulator=accumulator,
            stochastic=stochastic,
            variant=", ".join(variant),
            architecture=architecture,
            threads=constant(*threads),
            registers=usage[mangled]["REG"],
            shared=usage[mangled]["SHARED"],
            stack=usage[mangled]["STACK"] + usage[mangled]["LOCAL"],
            local_accesses=local_accesses(code),
            loops=main_loops(code, gradient, accumulator) if streams else [],
        )


Wanted = Sequence[tuple[object, ...]]


def triton_wanted(source: str) -> Wanted:
    """Return the kernels to compile for one kind of Triton kernels, each without its target."""
    if source == "norm":
        kinds = ("2", "inf")
        wanted = [("norm", dtype, kind) for dtype in BYTES for kind in kinds]
        wanted += [("end", dtype, kind) for dtype in ("float32", "float64") for kind in kinds]
        return [*wanted, *(("join", kind) for kind in kinds)]
    if source == "softmax":
        return [(source, dtype, name) for dtype in DTYPES[:3] for name in ("statistics", "gradient")]
    if source == "accumulation":
        return [(source, *pair) for pair in pairs()]
    more: dict[str, list[tuple[object, ...]]] = {
        "rows": [("add_runs",), ("add_long_rows",)],
        "grouped": [(False, "ieee")],
    }
    return [
        (source, gradient, accumulator, *arguments)
        for gradient, accumulator, stochastic in pairs()
        if not stochastic
        for arguments in more[source]
    ]


def triton_kernels(source: str, architecture: str, wanted: Wanted) -> Iterator[Kernel]:
    """Yield the wanted kernels of one kind of Triton kernels."""
    folder = compiled("triton", source, architecture, wanted)
    for what, result in zip(wanted, json.loads((folder / "compiled.json").read_text()), strict=True):
        cubin = folder / result["cubin"]
        ((_, usage),) = compilers.resources(cubin).items()
        ((_, code),) = functions(compilers.dumped(cubin, "sass"))
        kind, *arguments = what
        names = TRITON_NAMES | {"softmax": f"softmax_{arguments[-1]}"}
        gradient = ""
        accumulator = "float64"
        stochastic = False
        variant = ""
        if kind in ("accumulation", "rows", "grouped"):
            gradient, accumulator = map(str, arguments[:2])
            stochastic = kind == "accumulation" and arguments[2:] == [True]
        elif kind in ("norm", "softmax"):
            accumulator = str(arguments[0])
        if kind in ("norm", "end", "join"):
            variant = f"norm {arguments[-1]}" + (f", {arguments[0]}" if kind == "end" else "")
        streams = kind in ("accumulation", "norm")
        yield Kernel(
            backend="triton",
            name=str(arguments[2]) if kind == "rows" else names[str(kind)],
            gradient=gradient,
            accumulator=accumulator,
            stochastic=stochastic,
            variant=variant,
            architecture=architecture,
            threads=result["threads"],
            registers=usage["REG"],
            shared=max(usage["SHARED"], result["shared"]),
            stack=usage["STACK"] + usage["LOCAL"],
            local_accesses=local_accesses(code),
            loops=main_loops(code, gradient, accumulator) if streams else [],
        )


def compiled(backend: str, source: str, architecture: str, wanted: Wanted) -> Path:
    if backend == "cuda":
        return compilers.nvcc_compiled(source, architecture)
    return compilers.triton_compiled(tuple((architecture, *wanted_kernel) for wanted_kernel in wanted))


@functools.cache
def kernels(backend: str, source: str, architecture: str, wanted: Wanted = ()) -> list[Kernel]:
    """Return the kernels of one of `SOURCES` for an architecture, from the cache if possible.

    wanted: which of Triton's kernels, as `triton_wanted` returns them; empty: all.
    """
    if backend == "triton":
        wanted = wanted or triton_wanted(source)

    def read_in(folder: Path) -> None:
        if backend == "cuda":
            found = cuda_kernels(source, architecture)
        else:
            found = triton_kernels(source, architecture, wanted)
        (folder / "kernels.json").write_text(json.dumps([dataclasses.asdict(kernel) for kernel in found]))

    made_from = [backend, source, architecture, compiled(backend, source, architecture, wanted).name]
    made_from.append(compilers.version_of(str(compilers.CUOBJDUMP)))
    readers = [(Path(__file__).parent / name).read_bytes() for name in READERS]
    kind = f"machine-code-{backend}-{source}-{architecture}"
    folder = compilers.cached(kind, [*made_from, *readers], read_in)
    return [
        Kernel(**{**facts, "loops": [MainLoop(**loop) for loop in facts["loops"]]})
        for facts in json.loads((folder / "kernels.json").read_text())
    ]
