"""Amounts of memory: read, written, how much there is, and what torch's libraries take of it."""

from __future__ import annotations

import functools
import gc
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

#: Bytes of a unit, by its name in small letters.
UNITS = {"": 1, "b": 1}
UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)}
UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_ALLOWED = (
    'a number of bytes of at least 1, as an int, or text as "24GiB", "512 MiB" (powers of 1024) or "1.5GB" '
    "(powers of 1000); units are B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"
)


def check(name: str, value: Any, allowed: str, kinds: Any, right: Callable[[Any], bool]) -> Any:
    """Return an argument's value.

    Raises:
        TypeError: it is of none of the `kinds`.
        ValueError: it is not `right`.
    """
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(f"{name} is {allowed}; it was {value!r}, {type(value).__name__}")
    if not right(value):
        raise ValueError(f"{name} is {allowed}; it was {value!r}")
    return value


def parse_bytes(amount: int | str, name: str) -> int:
    """An amount of memory in bytes: of those, or of text with a number and a unit.

    Raises:
        TypeError: it is neither an int nor text.
        ValueError: it is no amount of memory, or less than a byte.
    """

    def bytes_in(amount: int | str) -> int:
        if isinstance(amount, int):
            return amount
        match = _AMOUNT.fullmatch(amount)
        return int(Fraction(match[1]) * UNITS.get(match[2].lower(), 0)) if match else 0

    return bytes_in(check(name, amount, _ALLOWED, int | str, lambda amount: bytes_in(amount) >= 1))


def check_int(name: str, number: int, least: int) -> int:
    """Return `number` if it is an int of at least `least`; raise an error that names it otherwise."""
    return check(name, number, f"an int of at least {least}", int, lambda number: number >= least)


def format_bytes(number: int) -> str:
    """An amount of memory for people: three figures, in powers of 1024."""
    if number < 0:
        return f"-{format_bytes(-number)}"
    unit, name = 1, "B"
    for power, letter in enumerate("KMGT", 1):
        if number >= 1024**power:
            unit, name = 1024**power, f"{letter}iB"
    amount = number / unit
    digits = 0 if amount >= 100 or unit == 1 else 1 if amount >= 10 else 2
    text = f"{amount:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {name}"


def available(device: torch.device | str) -> int:
    """Bytes that a process may still take on a device: on a CPU what the system could give without swapping,
    within the limits of the control groups that this process is in; on a GPU what the driver calls free.

    Raises:
        ValueError: the device is neither a CPU nor a CUDA GPU.
        RuntimeError: it cannot be told here.
    """
    where = torch.device(device)
    if where.type == "cuda":
        return int(torch.cuda.mem_get_info(where)[0])
    if where.type != "cpu":
        raise ValueError(f'device is "cpu" or "cuda"; it was "{where}"')
    return host_memory(Path("/"))


def host_memory(root: Path) -> int:
    """What `available` says of a CPU.

    Args:
        root: where `proc` and the file systems of control groups are, "/" but in tests.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError) as problem:
        raise RuntimeError(
            "how much memory is free cannot be told here: /proc/meminfo has no MemAvailable"
        ) from problem
    left = [room for group in _groups(root) for room in _rooms(group)]
    return max(0, min([free, *left]))


def _groups(root: Path) -> Iterator[Path]:
    """The folders of the groups that count this process's memory, of either version, and of those around."""
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        own = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for line in mounts:
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        first = kind[0] == "cgroup" and "memory" in kind[-1].split(",")
        if not first and kind[0] != "cgroup2":
            continue
        inside, point = fields[3], root / fields[4].lstrip("/")
        for number, controllers, path in own:
            if "memory" in controllers.split(",") if first else number == "0":
                # In a container the mount may begin at the container's own group, and not say so to it.
                below = path[len(inside) :] if inside != "/" and path.startswith(inside) else path
                folder = point / below.strip("/")
                folder = folder if folder.is_dir() else point
                yield folder
                while folder != point:
                    folder = folder.parent
                    yield folder


def _rooms(group: Path) -> Iterator[int]:
    """What a group's limits leave: files that are cached, and not in use, can be dropped."""
    for most, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.high", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = (group / most).read_text().strip()
            if limit == "max":
                continue
            taken = int((group / used).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            yield int(limit) - taken + int(stat.get(cached, 0))
        except (OSError, ValueError):  # a group without limits has no such files
            continue


@functools.cache
def scratch_bytes() -> int:
    """Bytes of address space that the libraries add to a process that trains; 0 where that cannot be read.

    oneDNN and MKL keep generated code and buffers for packed operands, and the C library keeps an arena of
    addresses for each thread. A process runs products, convolutions and attention, forward and backward, and
    compares the addresses that it holds before and after.
    """
    if not Path("/proc/self/statm").exists():
        return 0
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, "-c", f"import {__name__} as it; it.print_scratch_bytes({torch.get_num_threads()})"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return int(done.stdout) if done.returncode == 0 else 0


def _training(dtype: torch.dtype) -> None:
    def leaf(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    query, key, value = (leaf(1, 4, 256, 64) for _ in range(3))
    outputs = [
        functional.linear(leaf(256, 512), leaf(512, 512), leaf(512)),
        functional.conv2d(leaf(2, 32, 28, 28), leaf(32, 32, 3, 3), padding=1),
        functional.scaled_dot_product_attention(query, key, value),
        functional.layer_norm(leaf(256, 512), (512,)),
    ]
    for output in outputs:
        output.sum().backward()


def print_scratch_bytes(threads: int) -> None:
    """Do the work of `scratch_bytes` in its process."""
    torch.set_num_threads(threads)
    torch.zeros(2**20).add_(1).sum()  # starts the threads
    gc.collect()
    before = address_space_bytes()
    for dtype in (torch.float32, torch.bfloat16):
        _training(dtype)
    gc.collect()
    print(max(0, address_space_bytes() - before))


def address_space_bytes() -> int:
    """Return the size of this process's address space (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
