"""Amounts of memory: parse them, format them, ask how much is free, and measure the libraries' scratch."""

from __future__ import annotations

import functools
import gc
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

#: Bytes per unit, by lower-case name.
UNITS = {"": 1, "b": 1}
UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)}
UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_ALLOWED = (
    'a number of bytes of at least 1, as an int, or text as "24GiB", "512 MiB" (powers of 1024) or "1.5GB" '
    "(powers of 1000); units are B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"
)


def check(name: str, value: Any, allowed: str, kinds: Any, right: Callable[[Any], bool]) -> Any:
    """Return `value`, or raise TypeError or ValueError with the argument's name and what is allowed."""
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(f"{name} is {allowed}; it was {value!r}, {type(value).__name__}")
    if not right(value):
        raise ValueError(f"{name} is {allowed}; it was {value!r}")
    return value


def parse_bytes(amount: int | str, name: str) -> int:
    """Return an amount of memory in bytes, from an int or from text with a unit.

    Raises:
        TypeError: the amount is neither an int nor text.
        ValueError: the text is not an amount of memory, or the amount is below one byte.
    """
    number: Any = amount
    if isinstance(amount, str):
        match = _AMOUNT.fullmatch(amount)
        number = int(Fraction(match[1]) * UNITS.get(match[2].lower(), 0)) if match else 0
    check(name, amount, _ALLOWED, int | str, lambda _: number >= 1)
    return number


def check_int(name: str, number: int, least: int) -> int:
    """Return `number`, which must be an int of at least `least`."""
    return check(name, number, f"an int of at least {least}", int, lambda number: number >= least)


def format_bytes(number: int) -> str:
    """Return an amount of memory as text: three digits and a power of 1024."""
    power = min((abs(number).bit_length() - 1) // 10, 4) if number else 0
    amount = number / 1024**power
    digits = 2
    if abs(amount) >= 100:
        digits = 0
    elif abs(amount) >= 10:
        digits = 1
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{round(amount, digits):.10g} {unit}"


def available(device: torch.device | str) -> int:
    """Return the free bytes of a device.

    On a CPU: what the system can give without swapping, within this process's control-group limits. On a GPU:
    what the driver reports as free.

    Raises:
        ValueError: the device is neither a CPU nor a CUDA GPU.
        RuntimeError: the system does not report it.
    """
    where = torch.device(device)
    if where.type == "cuda":
        return int(torch.cuda.mem_get_info(where)[0])
    if where.type != "cpu":
        raise ValueError(f'device is "cpu" or "cuda"; it was "{where}"')
    return host_memory(Path("/"))


def host_memory(root: Path) -> int:
    """Return the free memory of the CPU. root: the folder of `proc` and the control groups, for tests."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError) as problem:
        raise RuntimeError("the free memory is unknown: /proc/meminfo has no MemAvailable") from problem
    rooms = [room for group in _groups(root) for room in _rooms(group)]
    return max(0, min([free, *rooms]))


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of the control groups (version 1 and 2) that limit this process's memory."""
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for line in mounts:
        before, _, after = line.partition(" - ")
        fields = before.split()
        filesystem, *_, options = after.split()
        is_version_1 = filesystem == "cgroup" and "memory" in options.split(",")
        if not is_version_1 and filesystem != "cgroup2":
            continue
        mounted = fields[3]
        mount_point = root / fields[4].lstrip("/")
        for number, controllers, path in groups:
            limits_memory = "memory" in controllers.split(",") if is_version_1 else number == "0"
            if not limits_memory:
                continue
            # In a container the mount may begin at the container's own group, and not say so to it.
            if mounted != "/" and path.startswith(mounted):
                path = path[len(mounted) :]
            folder = mount_point / path.strip("/")
            if not folder.is_dir():
                folder = mount_point
            yield folder
            while folder != mount_point:
                folder = folder.parent
                yield folder


def _rooms(group: Path) -> Iterator[int]:
    """Yield the bytes that each limit of a group leaves free. Inactive cached files count as free."""
    for most, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.high", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = (group / most).read_text().strip()
            if limit == "max":
                continue
            bytes_used = int((group / used).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            yield int(limit) - bytes_used + int(stat.get(cached, 0))
        except (OSError, ValueError):  # a group without limits has no such files
            continue


@functools.cache
def scratch_bytes() -> int:
    """Return the bytes of address space that libraries add to a training process; 0 if that is unknown.

    oneDNN and MKL keep generated code and packed operands, and the C library keeps an arena per thread. A
    child process runs matrix products, convolutions and attention, and compares its address space before and
    after.
    """
    if not Path("/proc/self/statm").exists():
        return 0
    path = [str(Path(__file__).parents[2]), *map(str, sys.path)]
    code = f"import sys; sys.path[:] = {path!r}; import {__name__} as it; "
    done = subprocess.run(
        [sys.executable, "-c", f"{code}it.print_scratch_bytes({torch.get_num_threads()})"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return int(done.stdout) if done.returncode == 0 else 0


def print_scratch_bytes(threads: int) -> None:
    """Measure `scratch_bytes` in the child process and print it."""
    torch.set_num_threads(threads)
    torch.zeros(2**20).add_(1).sum()  # starts the threads
    gc.collect()
    before = address_space_bytes()
    for dtype in (torch.float32, torch.bfloat16):
        leaf = functools.partial(torch.zeros, dtype=dtype, requires_grad=True)
        query, key, value = (leaf(1, 4, 256, 64) for _ in range(3))
        outputs = [
            functional.linear(leaf(256, 512), leaf(512, 512), leaf(512)),
            functional.conv2d(leaf(2, 32, 28, 28), leaf(32, 32, 3, 3), padding=1),
            functional.scaled_dot_product_attention(query, key, value),
            functional.layer_norm(leaf(256, 512), (512,)),
        ]
        for output in outputs:
            output.sum().backward()
        del query, key, value, outputs, output
    gc.collect()
    print(max(0, address_space_bytes() - before))


def address_space_bytes() -> int:
    """Return the size of this process's address space (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
