"""Rewrites `benchmarks/results/machine_code.csv` and the tables of docs/machine-code.md.

    python -m machine_code

It compiles every GPU kernel for every architecture, unless the result is in the cache, and reads the machine
code. It needs nvcc, cuobjdump and Triton, but no GPU. Nothing is measured.
"""

from __future__ import annotations

import csv
import importlib.metadata
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from . import compile as compilers
from .devices import ARCHITECTURES, COMPILED, DEVICES, Device
from .kernels import ADDS, OVERWRITES, READS, SOURCES, Kernel, MainLoop, kernels
from .prediction import DRAM, blocks_per_multiprocessor, occupancy, predict

CSV = compilers.ROOT / "benchmarks" / "results" / "machine_code.csv"
PAGE = compilers.ROOT / "docs" / "machine-code.md"
#: The page's description of each streaming kernel and role, in the order of the page.
STREAMS = {
    ("flat_kernel", ADDS): "CUDA adds",
    ("flat_kernel", OVERWRITES): "CUDA overwrites",
    ("flat_norm_kernel", READS): "CUDA reads for a norm",
    ("scale_accumulate", ADDS): "Triton adds or overwrites",
    ("norm_partials", READS): "Triton reads for a norm",
}
BACKENDS = {"cuda": "CUDA", "triton": "Triton"}

#: A line of the CSV: the text of each column.
Line = Mapping[str, str]


def rooms(kernel: Kernel) -> int:
    """Return the number of tensors that fit in a launch's arguments, or 0 if the kernel has no such limit."""
    return int(kernel.variant.split(", ")[-1].split()[0]) if kernel.variant.endswith("tensors") else 0


def identity(kernel: Kernel) -> tuple[str, ...]:
    """Return a key of a kernel that does not depend on its architecture or on `rooms`."""
    variant = ", ".join(part for part in kernel.variant.split(", ") if not part.endswith("tensors"))
    return kernel.backend, kernel.name, kernel.pair, variant


def all_kernels() -> dict[tuple[str, ...], dict[str, Kernel]]:
    """Return all kernels by identity and architecture; of those that differ only in `rooms`, the largest."""
    found: dict[tuple[str, ...], dict[str, Kernel]] = {}
    for backend, architectures in COMPILED.items():
        for source, architecture in itertools.product(SOURCES[backend], architectures):
            for kernel in sorted(kernels(backend, source, architecture), key=rooms):
                found.setdefault(identity(kernel), {})[architecture] = kernel
    return found


def compiler(backend: str) -> str:
    if backend == "triton":
        return f"Triton {importlib.metadata.version('triton')}"
    version = re.search(r"V([\d.]+)", compilers.version_of(str(compilers.NVCC)))
    return f"nvcc {version[1] if version else 'of unknown version'}"


def lines() -> Iterator[dict[str, object]]:
    """Yield the lines of the CSV: one for each kernel, main loop and device."""
    found = all_kernels()
    for key in sorted(found):
        backend, name, pair, variant = key
        for device in DEVICES:
            kernel = found[key][device.code[backend]]
            line: dict[str, object] = {"backend": backend, "compiler": compiler(backend), "kernel": name}
            line |= {"dtypes": pair, "variant": variant, "device": device.name}
            line |= {"code": kernel.architecture, "threads": kernel.threads, "registers": kernel.registers}
            line |= {"shared_bytes": kernel.shared, "local_bytes": kernel.stack}
            line |= {"local_accesses": kernel.local_accesses}
            line |= {"blocks": blocks_per_multiprocessor(kernel, device.architecture)}
            line |= {"occupancy": round(occupancy(kernel, device.architecture), 3)}
            yield from (line | of_loop(kernel, loop, device) for loop in kernel.loops)
            if not kernel.loops:
                yield line


def of_loop(kernel: Kernel, loop: MainLoop, device: Device) -> dict[str, object]:
    found = predict(kernel, loop, device)
    return {
        "loop": loop.role,
        "elements": loop.elements,
        "load_bits": "/".join(str(8 * width) for width in loop.load_bytes),
        "store_bits": "/".join(str(8 * width) for width in loop.store_bytes),
        "loads_in_flight": loop.loads_in_flight,
        "bytes_in_flight": loop.bytes_in_flight,
        "bytes_per_element": f"{loop.bytes_per_element:g}",
        "instructions_per_element": round(loop.instructions_per_element, 2),
        "dram_ps_per_element": round(found.dram * 1e12, 3),
        "instructions_ps_per_element": round(found.instructions * 1e12, 3),
        "instructions_percent": round(100 * found.share),
        "slowest_instructions": found.pipe,
        "bound": found.bound,
        "answer_ns": round(found.answer * 1e9),
    }


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    body = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return ["| " + " | ".join(header) + " |", "|---" * len(header) + "|", *body]


def streaming(lines: Iterable[Line]) -> dict[tuple[str, str], list[Line]]:
    """Group the lines of streaming kernels by description and dtypes. Of norms, only the 2-norm counts."""
    found: dict[tuple[str, str], list[Line]] = {}
    for role, line in itertools.product(STREAMS, lines):
        if role == (line["kernel"], line["loop"]) and "inf" not in line["variant"]:
            found.setdefault((STREAMS[role], line["dtypes"]), []).append(line)
    return found


def rooflines(lines: Iterable[Line]) -> list[str]:
    rows = []
    for (words, dtypes), of_devices in streaming(lines).items():
        cells = [
            ("" if line["bound"] == DRAM else "**instructions** ")
            + f"{line['instructions_percent']} % {line['slowest_instructions']}"
            for line in of_devices
        ]
        rows.append([words, dtypes, of_devices[0]["bytes_per_element"], *cells])
    return table(["kernel", "dtypes", "bytes", *(device.name for device in DEVICES)], rows)


def spread(lines: Iterable[Line], column: str, factor: float = 1, form: str = "{:g}") -> str:
    values = sorted(factor * float(line[column]) for line in lines)
    ends = [form.format(value) for value in (values[0], values[-1])]
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def loops(lines: Iterable[Line]) -> list[str]:
    rows = []
    for (words, dtypes), found in streaming(lines).items():
        use = [spread(found, "registers"), spread(found, "occupancy", 100, "{:.0f} %")]
        bits = [found[0]["load_bits"], found[0]["store_bits"] or "none"]
        rest = [spread(found, "answer_ns"), spread(found, "instructions_per_element", 1, "{:.1f}")]
        rows.append([words, dtypes, *use, *bits, spread(found, "loads_in_flight"), *rest])
    header = ["kernel", "dtypes", "registers", "occupancy", "bits of a load", "of a store", "loads in flight"]
    return table([*header, "answer in ns", "instructions per element"], rows)


def every_kernel(lines: Iterable[Line]) -> list[str]:
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line["backend"], line["kernel"]), []).append(line)
    rows = []
    for (backend, name), found in groups.items():
        variants = len({(line["dtypes"], line["variant"]) for line in found})
        spills = sum(line["local_bytes"] != "0" or line["local_accesses"] != "0" for line in found) or "none"
        use = [spread(found, "registers"), spread(found, "shared_bytes")]
        use.append(spread(found, "occupancy", 100, "{:.0f} %"))
        rows.append([BACKENDS[backend], f"`{name}`", variants, *use, spills])
    header = ["backend", "kernel", "variants", "registers", "bytes of shared memory", "occupancy"]
    return table([*header, "with spills"], rows)


def devices(lines: Iterable[Line]) -> list[str]:
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
    for device in DEVICES:
        figures = [
            device.multiprocessors,
            f"{device.clock / 1e6:.0f} MHz",
            f"{device.bandwidth / 1e9:.0f} GB/s",
        ]
        code = [device.code[backend] for backend in BACKENDS]
        rows.append([device.name, device.architecture.name, *figures, *code, device.source])
    compilers = sorted({line["compiler"] for line in lines}, reverse=True)
    return [*table([*header, "source"], rows), "", f"Compiled by {' and '.join(compilers)}."]


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
    rows = []
    for architecture in ARCHITECTURES.values():
        limits = [architecture.warps, architecture.blocks, f"{architecture.shared >> 10} KiB"]
        rates = [
            architecture.float32,
            architecture.float64,
            architecture.integer,
            architecture.conversions,
            architecture.conversions64,
        ]
        rows.append([architecture.name, *limits, *rates])
    return table([*header, "conversions", "of 64 bits"], rows)


def written(page: str, lines: Sequence[Line]) -> str:
    """Return a page's text with new tables. Raises ValueError if it lacks a pair of markers."""
    parts = {"devices": devices(lines), "architectures": architectures(), "rooflines": rooflines(lines)}
    parts |= {"loops": loops(lines), "kernels": every_kernel(lines)}
    for name, part in parts.items():
        begin = f"<!-- {name}: written by make machine-code -->\n"
        end = f"<!-- end of {name} -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"no markers for {name!r}: {begin.strip()} and {end}")
        page = before + begin + "\n".join(part) + "\n" + end + after
    return page


def read_csv() -> list[Line]:
    with open(CSV, newline="") as file:
        return list(csv.DictReader(file))


def main() -> int:
    for backend in BACKENDS:
        if reason := compilers.obstacle(backend):
            print(f"machine_code: {reason}", file=sys.stderr)
            return 1
    rows = list(lines())
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with open(CSV, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    PAGE.write_text(written(PAGE.read_text(), read_csv()))
    print(f"{len(rows)} lines of {CSV.name}, and the tables of {PAGE.name}")
    return 0
