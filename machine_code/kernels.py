"""Every GPU kernel as its machine code is: registers, spills, shared memory, and the main loops of those that
stream through memory."""

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
#: What is compiled together: the files of csrc/cuda/, and the kinds of Triton's kernels.
SOURCES = {
    "cuda": ("accumulate", "norm", "rows", "softmax"),
    "triton": ("accumulation", "norm", "rows", "grouped", "softmax"),
}
#: Ours, by the name in the machine code.
NAMES = {
    "accumulate": re.compile(
        r"(?P<kernel>flat_kernel|strided_kernel)ILi(?P<pair>\d+)E\w*?BatchILi(?P<room>\d+)E"
    ),
    "norm": re.compile(
        r"(?P<kernel>(?:flat|strided|finish)_norm_kernel)I(?:Li(?P<pair>\d+)E)?\w*?NormKindE(?P<norm>\d)E"
        r"(?:Lb(?P<reads>\d)E\w*?BatchILi(?P<room>\d+)E)?"
    ),
    "rows": re.compile(r"(?P<kernel>row_kernel)ILi(?P<pair>\d+)ELb(?P<aligned>\d)ELb(?P<long>\d)E"),
    "softmax": re.compile(r"(?P<kernel>softmax_(?:statistics|gradient)_kernel)ILNS_5DtypeE(?P<dtype>\d)E"),
}
#: Of Triton, by what `machine_code/triton_kernels.py` calls it.
TRITON_NAMES = {
    "accumulation": "scale_accumulate",
    "norm": "norm_partials",
    "end": "finish_norm",
    "join": "join_partials",
    "grouped": "grouped_accumulate",
}
#: The modules that decide what is read of machine code.
READERS = ("compile.py", "disassembly.py", "kernels.py")
ADDS, OVERWRITES, READS = "adds", "overwrites", "reads"
#: Vector accesses: what a main loop moves memory by.
VECTOR_BYTES = 8


@dataclasses.dataclass(frozen=True)
class MainLoop:
    """A main loop, per thread and round. `role`: what it does with accumulators.

    `loaded`, `stored`: bytes of global memory; `load_bytes`, `store_bytes`: widths of single accesses;
    `loads_in_flight` and `bytes_in_flight`: issued before the first loaded value is used; `instructions`: how
    often each kind stands in it.
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
    """One kernel for one architecture. `variant`: what tells it from others of the same name and dtypes.

    `stack`: bytes of local memory of a thread; `local_accesses`: instructions that load from there or store.
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
    """Our dtype pairs in their order: gradient, accumulator, whether sums are rounded stochastically."""
    table = re.search(r"kPairs\[\] = \{(.*?)\n\};", (COMMON / "dtypes.h").read_text(), re.DOTALL)
    assert table is not None
    found = re.findall(r"\{Dtype::k(\w+), Dtype::k(\w+)\}", table[1])
    return [
        (gradient.lower(), sums.lower().removeprefix("stochastic"), sums.startswith("Stochastic"))
        for gradient, sums in found
    ]


@functools.cache
def constant(header: str, name: str) -> int:
    """A number that a header of `csrc/cuda/device/` defines."""
    text = (compilers.ROOT / "csrc" / "cuda" / "device" / header).read_text()
    match = re.search(rf"\b{name} = (\d+);", text)
    assert match is not None
    return int(match[1])


def main_loops(code: Sequence[Instruction], gradient: str, accumulator: str) -> list[MainLoop]:
    """The loops that take most of a large tensor's elements.

    Of the innermost loops whose accesses to global memory are all vectors, those of one role are compared: a
    loop that stores adds or overwrites, by whether it loads accumulators; one that stores nothing reads. A
    loop of Triton's loads accumulators on a condition, and so does both. The main loop of a role moves the
    most bytes in a round; among equals, it has the lowest address: of a norm's passes, the first.

    How many elements a round takes follows from the bytes that it stores, or loads if it stores nothing, and
    from the size of an accumulator.
    """
    best: dict[str, Loop] = {}
    for loop in loops(code):
        accesses = loop.accesses("LDG", "STG")
        if not accesses or any(each.bytes < VECTOR_BYTES for each in accesses):
            continue
        elements = (loop.stored or loop.loaded) // BYTES[accumulator]
        moved = loop.loaded - (elements * BYTES[gradient] if gradient else 0)
        role = READS if not loop.stored else ADDS if moved else OVERWRITES
        if role not in best or loop.loaded + loop.stored > best[role].loaded + best[role].stored:
            best[role] = loop
    if ADDS in best and any(each.predicate for each in best[ADDS].accesses("LDG")):
        # Its loads of accumulators depend on a condition: it overwrites too.
        best.pop(OVERWRITES, None)
    return [described(role, loop, BYTES[accumulator]) for role, loop in sorted(best.items())]


def described(role: str, loop: Loop, size: int) -> MainLoop:
    return MainLoop(
        role=role,
        elements=(loop.stored or loop.loaded) // size,
        loaded=loop.loaded,
        stored=loop.stored,
        load_bytes=sorted({each.bytes for each in loop.accesses("LDG")}),
        store_bytes=sorted({each.bytes for each in loop.accesses("STG")}),
        loads_in_flight=len(loop.loads_in_flight),
        bytes_in_flight=sum(each.bytes for each in loop.loads_in_flight),
        instructions=dict(sorted(loop.instructions.items())),
    )


def local_accesses(code: Sequence[Instruction]) -> int:
    return sum(each.kind in ("LDL", "STL") for each in code)


def cuda_kernels(source: str, architecture: str) -> Iterator[Kernel]:
    """The kernels of `csrc/cuda/SOURCE.cu`."""
    cubin = compilers.nvcc_compiled(source, architecture) / f"{source}.cubin"
    usage = compilers.resources(cubin)
    for mangled, code in functions(compilers.dumped(cubin, "sass")):
        match = NAMES[source].search(mangled)
        assert match is not None, mangled
        parts = match.groupdict()
        gradient, accumulator, stochastic = (
            pairs()[int(parts["pair"])] if parts.get("pair") else ("", "float64", False)
        )
        if parts.get("dtype"):
            accumulator = DTYPES[int(parts["dtype"])]
        variant, streams = [], False
        if parts.get("norm"):
            variant.append("norm 2" if parts["norm"] == "0" else "norm inf")
        if parts.get("reads") == "1":
            variant.append("reads")
            gradient = ""
        if parts.get("room"):
            variant.append(f"{parts['room']} tensors")
            streams = parts["kernel"].startswith("flat")
        if parts.get("aligned"):
            variant += ["aligned" if parts["aligned"] == "1" else "any alignment"]
            variant += ["long rows"] if parts["long"] == "1" else []
        finish = parts["kernel"].startswith("finish")
        yield Kernel(
            backend="cuda",
            name=parts["kernel"],
            gradient=gradient,
            accumulator=accumulator,
            stochastic=stochastic,
            variant=", ".join(variant),
            architecture=architecture,
            threads=constant(
                *(("norm_block.h", "kFinishThreads") if finish else ("accumulate_block.h", "kThreads"))
            ),
            registers=usage[mangled]["REG"],
            shared=usage[mangled]["SHARED"],
            stack=usage[mangled]["STACK"] + usage[mangled]["LOCAL"],
            local_accesses=local_accesses(code),
            loops=main_loops(code, gradient, accumulator) if streams else [],
        )


def triton_wanted(source: str) -> list[tuple[object, ...]]:
    """What is compiled of one kind of Triton's kernels, without the target."""
    if source == "norm":
        kinds = ("2", "inf")
        wanted = [("norm", dtype, kind) for dtype in BYTES for kind in kinds]
        wanted += [("end", dtype, kind) for dtype in ("float32", "float64") for kind in kinds]
        return [*wanted, *(("join", kind) for kind in kinds)]
    if source == "softmax":
        return [(source, dtype, name) for dtype in DTYPES[:3] for name in ("statistics", "gradient")]
    more = {
        "accumulation": lambda noise: [noise[:1]],
        "rows": lambda noise: [(kernel, *noise) for kernel in ("add_runs", "add_long_rows")],
        "grouped": lambda noise: [(False, "ieee", *noise)],
    }[source]
    return [
        (source, gradient, accumulator, *rest)
        for gradient, accumulator, stochastic in pairs()
        for rest in more((True, True) if stochastic else ())
    ]


def triton_kernels(source: str, architecture: str) -> Iterator[Kernel]:
    """One kind of Triton's kernels."""
    wanted = triton_wanted(source)
    folder = compiled("triton", source, architecture)
    for what, result in zip(wanted, json.loads((folder / "compiled.json").read_text()), strict=True):
        cubin = folder / result["cubin"]
        ((_, usage),) = compilers.resources(cubin).items()
        ((_, code),) = functions(compilers.dumped(cubin, "sass"))
        kind, *arguments = what
        names = TRITON_NAMES | {"softmax": f"softmax_{arguments[-1]}"}
        gradient, accumulator, stochastic, variant = "", "float64", False, ""
        if kind in ("accumulation", "rows", "grouped"):
            gradient, accumulator, *more = map(str, arguments)
            stochastic = "True" in more
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


def compiled(backend: str, source: str, architecture: str) -> Path:
    if backend == "cuda":
        return compilers.nvcc_compiled(source, architecture)
    return compilers.triton_compiled(tuple((architecture, *each) for each in triton_wanted(source)))


@functools.cache
def kernels(backend: str, source: str, architecture: str) -> list[Kernel]:
    """The kernels of one of `SOURCES` for an architecture, read once for all runs."""

    def read_in(folder: Path) -> None:
        found = (cuda_kernels if backend == "cuda" else triton_kernels)(source, architecture)
        (folder / "kernels.json").write_text(json.dumps([dataclasses.asdict(kernel) for kernel in found]))

    made_from = [backend, source, architecture, compiled(backend, source, architecture).name]
    made_from.append(compilers.version_of(str(compilers.CUOBJDUMP)))
    readers = [(Path(__file__).parent / name).read_bytes() for name in READERS]
    kind = f"machine-code-{backend}-{source}-{architecture}"
    folder = compilers.cached(kind, [*made_from, *readers], read_in)
    return [
        Kernel(**{**each, "loops": [MainLoop(**loop) for loop in each["loops"]]})
        for each in json.loads((folder / "kernels.json").read_text())
    ]
