"""Rewrites `benchmarks/results/machine_code.csv` and the tables of docs/machine-code.md.

    python -m machine_code

It compiles every GPU kernel for every architecture, unless that is in the cache, and reads the machine code.
Needs nvcc, cuobjdump and Triton; no GPU. Nothing is measured.
"""

from __future__ import annotations

import csv
import importlib.metadata
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from . import compile as compilers
from .devices import ARCHITECTURES, COMPILED, DEVICES, Device
from .kernels import ADDS, OVERWRITES, READS, SOURCES, Kernel, MainLoop, kernels
from .prediction import Prediction, blocks_per_multiprocessor, occupancy, predict

CSV = compilers.ROOT / "benchmarks" / "results" / "machine_code.csv"
PAGE = compilers.ROOT / "docs" / "machine-code.md"
#: Kernels that stream, in the page's order, by what the page says that they do.
STREAMS = {
    ("flat_kernel", ADDS): "adds",
    ("flat_kernel", OVERWRITES): "overwrites",
    ("flat_norm_kernel", ADDS): "adds, and leaves a norm",
    ("flat_norm_kernel", READS): "reads for a norm",
    ("scale_accumulate", ADDS): "adds or overwrites",
    ("norm_partials", READS): "reads for a norm",
}
BACKENDS = {"cuda": "CUDA", "triton": "Triton"}

Streaming = Mapping[str, tuple[Kernel, MainLoop]]


def rooms(kernel: Kernel) -> int:
    """For how many tensors there is room in a launch's arguments, in the one that has most of it."""
    return int(kernel.variant.split(", ")[-1].split()[0]) if kernel.variant.endswith("tensors") else 0


def identity(kernel: Kernel) -> tuple[str, ...]:
    """Of a kernel, whatever the architecture and the number of tensors that it has room for."""
    variant = ", ".join(part for part in kernel.variant.split(", ") if not part.endswith("tensors"))
    return kernel.backend, kernel.name, kernel.pair, variant


def all_kernels() -> dict[tuple[str, ...], dict[str, Kernel]]:
    """By identity and architecture. Of kernels that differ in their room for tensors, the largest counts."""
    found: dict[tuple[str, ...], dict[str, Kernel]] = {}
    for backend, architectures in COMPILED.items():
        for source, architecture in itertools.product(SOURCES[backend], architectures):
            for kernel in sorted(kernels(backend, source, architecture), key=rooms):
                found.setdefault(identity(kernel), {})[architecture] = kernel
    return found


def lines(kernels: Mapping[tuple[str, ...], Mapping[str, Kernel]]) -> Iterator[dict[str, object]]:
    """The CSV's: one for each kernel, main loop and device."""
    for key in sorted(kernels):
        for device in DEVICES:
            kernel = kernels[key][device.code[key[0]]]
            backend, name, pair, variant = key
            line: dict[str, object] = {"backend": backend, "compiler": compiler(backend), "kernel": name}
            line |= {"dtypes": pair, "variant": variant}
            line |= {"device": device.name, "code": kernel.architecture, "threads": kernel.threads}
            line |= {"registers": kernel.registers, "shared_bytes": kernel.shared}
            line |= {"local_bytes": kernel.stack, "local_accesses": kernel.local_accesses}
            line |= {"blocks": blocks_per_multiprocessor(kernel, device.architecture)}
            line |= {"occupancy": round(occupancy(kernel, device.architecture), 3)}
            for loop in kernel.loops:
                yield line | of_loop(kernel, loop, device)
            if not kernel.loops:
                yield line


def compiler(backend: str) -> str:
    if backend == "triton":
        return f"Triton {importlib.metadata.version('triton')}"
    version = re.search(r"V([\d.]+)", compilers.version_of(str(compilers.NVCC)))
    return f"nvcc {version[1] if version else 'of unknown version'}"


def of_loop(kernel: Kernel, loop: MainLoop, device: Device) -> dict[str, object]:
    found = predict(kernel, loop, device)
    return {
        "loop": loop.role,
        "elements": loop.elements,
        "load_widths": " ".join(map(str, loop.load_bytes)),
        "store_widths": " ".join(map(str, loop.store_bytes)),
        "loads_in_flight": loop.loads_in_flight,
        "bytes_in_flight": loop.bytes_in_flight,
        "bytes_per_element": loop.bytes_per_element,
        "instructions_per_element": round(loop.instructions_per_element, 2),
        "dram_ps_per_element": round(found.dram * 1e12, 3),
        "instructions_ps_per_element": round(found.instructions * 1e12, 3),
        "slowest_instructions": found.pipe,
        "bound": found.bound,
        "answer_ns": round(found.answer * 1e9),
    }


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    body = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return ["| " + " | ".join(header) + " |", "|---" * len(header) + "|", *body]


def streaming(
    kernels: Mapping[tuple[str, ...], Mapping[str, Kernel]],
) -> Iterator[tuple[str, str, Streaming]]:
    """For each streaming kernel and role: what the page calls it, its dtypes, its loops by architecture."""
    for (name, role), words in STREAMS.items():
        for (backend, found, pair, variant), by_architecture in kernels.items():
            # The largest magnitude is left to the CSV.
            if (
                found == name
                and "inf" not in variant
                and ("reads" in variant) == (role == READS and backend == "cuda")
            ):
                loops = {
                    architecture: (kernel, loop)
                    for architecture, kernel in by_architecture.items()
                    for loop in kernel.loops
                    if loop.role == role
                }
                if loops:
                    yield f"{BACKENDS[backend]} {words}", pair, loops


def cell(found: Prediction) -> str:
    mark = "" if found.bound == "DRAM" else "**instructions** "
    return f"{mark}{100 * found.share:.0f} % {found.pipe}"


def rooflines(kernels: Mapping[tuple[str, ...], Mapping[str, Kernel]]) -> list[str]:
    rows = []
    for words, pair, loops in streaming(kernels):
        backend = next(iter(loops.values()))[0].backend
        cells = [cell(predict(*loops[device.code[backend]], device)) for device in DEVICES]
        each = {f"{loop.bytes_per_element:g}" for _, loop in loops.values()}
        rows.append([words, pair, "/".join(sorted(each)), *cells])
    return table(["kernel", "dtypes", "bytes", *(device.name for device in DEVICES)], rows)


def spread(values: Iterable[float], form: str = "{:g}") -> str:
    ordered = sorted(set(values))
    ends = [form.format(value) for value in (ordered[0], ordered[-1])]
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def streams(kernels: Mapping[tuple[str, ...], Mapping[str, Kernel]]) -> list[str]:
    rows = []
    for words, pair, loops in streaming(kernels):
        found = list(loops.values())
        backend = found[0][0].backend
        used = [(*loops[device.code[backend]], device) for device in DEVICES]
        shares = [100 * occupancy(kernel, device.architecture) for kernel, _, device in used]
        answers = [1e9 * predict(*each).answer for each in used]
        widths = [
            "/".join(
                str(8 * width) for width in sorted({w for _, loop in found for w in getattr(loop, name)})
            )
            for name in ("load_bytes", "store_bytes")
        ]
        rows.append(
            [
                words,
                pair,
                spread(kernel.registers for kernel, _ in found),
                spread(shares, "{:.0f} %"),
                widths[0],
                widths[1] or "none",
                spread(loop.loads_in_flight for _, loop in found),
                spread(answers, "{:.0f}"),
                spread((loop.instructions_per_element for _, loop in found), "{:.1f}"),
            ]
        )
    header = ["kernel", "dtypes", "registers", "occupancy", "bits of a load", "of a store", "loads in flight"]
    return table([*header, "answer in ns", "instructions per element"], rows)


def others(kernels: Mapping[tuple[str, ...], Mapping[str, Kernel]]) -> list[str]:
    groups: dict[tuple[str, str], list[Kernel]] = {}
    for (backend, name, *_), by_architecture in kernels.items():
        groups.setdefault((backend, name), []).extend(by_architecture.values())
    rows = []
    for (backend, name), found in sorted(groups.items()):
        shares = [100 * occupancy(kernel, ARCHITECTURES[kernel.architecture]) for kernel in found]
        spilled = sum(bool(kernel.stack or kernel.local_accesses) for kernel in found)
        rows.append(
            [
                BACKENDS[backend],
                f"`{name}`",
                len(found),
                spread(kernel.registers for kernel in found),
                spread(kernel.shared for kernel in found),
                spread(shares, "{:.0f} %"),
                spilled or "none",
            ]
        )
    header = [
        "backend",
        "kernel",
        "compiled",
        "registers",
        "bytes of shared memory",
        "occupancy",
        "with spills",
    ]
    return table(header, rows)


def devices() -> list[str]:
    header = [
        "device",
        "architecture",
        "multiprocessors",
        "boost clock",
        "memory",
        "CUDA code",
        "Triton code",
    ]
    rows = []
    for each in DEVICES:
        figures = [each.multiprocessors, f"{each.clock / 1e6:.0f} MHz", f"{each.bandwidth / 1e9:.0f} GB/s"]
        rows.append(
            [each.name, each.architecture.name, *figures, each.code["cuda"], each.code["triton"], each.source]
        )
    return table([*header, "source"], rows)


def architectures() -> list[str]:
    header = [
        "architecture",
        "warps",
        "blocks",
        "shared memory",
        "float32",
        "float64",
        "integer, logic, select",
    ]
    rows = [
        [
            each.name,
            each.warps,
            each.blocks,
            f"{each.shared >> 10} KiB",
            each.float32,
            each.float64,
            each.integer,
            each.conversions,
            each.conversions64,
        ]
        for each in ARCHITECTURES.values()
    ]
    return table([*header, "conversions", "of 64 bits"], rows)


def written(page: str, parts: Mapping[str, Sequence[str]]) -> str:
    """The page with its tables replaced, each between its markers."""
    for name, part in parts.items():
        begin, end = f"<!-- {name}: written by make machine-code -->\n", f"<!-- end of {name} -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"no markers for {name!r}: {begin.strip()} and {end}")
        page = before + begin + "\n".join(part) + "\n" + end + after
    return page


def parts(kernels: Mapping[tuple[str, ...], Mapping[str, Kernel]]) -> dict[str, list[str]]:
    compiled = f"Compiled by {compiler('cuda')} and {compiler('triton')}."
    return {
        "devices": [*devices(), "", compiled],
        "architectures": architectures(),
        "rooflines": rooflines(kernels),
        "loops": streams(kernels),
        "kernels": others(kernels),
    }


def read_csv() -> list[dict[str, str]]:
    with open(CSV, newline="") as file:
        return list(csv.DictReader(file))


def main(csv_path: Path = CSV, page: Path = PAGE) -> int:
    for backend in BACKENDS:
        if reason := compilers.obstacle(backend):
            print(f"machine_code: {reason}", file=sys.stderr)
            return 1
    found = all_kernels()
    rows = list(lines(found))
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with open(csv_path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    page.write_text(written(page.read_text(), parts(found)))
    print(f"{len(rows)} lines of {csv_path.name}, and the tables of {page.name}")
    return 0
