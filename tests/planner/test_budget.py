"""Amounts of memory: parsing, formatting, and how much is available."""

import re
from pathlib import Path

import pytest

from fusedacc.planner import budget

MIB = 2**20


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (7, 7),
        ("7", 7),
        ("24GiB", 24 * 2**30),
        ("512 MiB", 512 * MIB),
        (" 1.5gb ", 1_500_000_000),
        (".5 kB", 500),
        ("0.1TB", 10**11),
    ],
)
def test_amounts(text: int | str, number: int):
    assert budget.parse_bytes(text, "room") == number


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e9", "24G", "1,5GB", "0.1B", "0GiB", 0, -5])
def test_bad_amounts(text: int | str):
    told = "room is a number of bytes of at least 1, as an int, or text as .24GiB"
    with pytest.raises(ValueError, match=told):
        budget.parse_bytes(text, "room")


def test_format_bytes():
    numbers = (0, 1023, 1024, 1536, 95 * MIB, 1000 * MIB, 24 * 2**30, 2**42 * 3 // 2, -1536)
    texts = [budget.format_bytes(number) for number in numbers]
    assert texts == ["0 B", "1023 B", "1 KiB", "1.5 KiB", "95 MiB", "1000 MiB", "24 GiB", "6 TiB", "-1.5 KiB"]


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


V2 = "1 0 0:1 / /group rw - cgroup2 cgroup2 rw"
V1 = "1 0 0:1 {} /group/memory rw - cgroup cgroup rw,memory"
#: The mount of a control group, the process's group, files below the mount, and the KiB that are available.
CONTROL_GROUPS = [
    ("", "", {}, 1000),
    (
        *(V2, "0::/a/b"),
        {"a/memory.max": "max", "a/b/memory.max": "900", "a/b/memory.current": "500"}
        | {"a/b/memory.stat": "anon 300\ninactive_file 50"},
        450,
    ),
    (
        *(V2, "0::/a/b"),
        {"a/b/memory.max": "max", "a/memory.high": "700", "a/memory.current": "500"}
        | {"a/memory.stat": "inactive_file 0"},
        200,
    ),
    (
        *(V1.format("/host/box"), "4:memory:/host/box\n0::/"),
        {"memory/memory.limit_in_bytes": "800", "memory/memory.usage_in_bytes": "900"}
        | {"memory/memory.stat": "inactive_file 5\ntotal_inactive_file 130"},
        30,
    ),
    (
        *(V1.format("/"), "4:memory:/not/seen/here\n0::/"),
        {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "900"}
        | {"memory/memory.stat": "total_inactive_file 130"},
        1000,
    ),
]


@pytest.mark.parametrize(("mount", "own", "files", "left"), CONTROL_GROUPS)
def test_available_memory_within_control_groups(tmp_path, mount, own, files, left):
    def in_bytes(text: str) -> str:
        return re.sub(r"\b\d{1,4}\b", lambda kib: f"{1024 * int(kib[0])}", text)

    write(tmp_path, **{f"group/{name}": in_bytes(text) for name, text in files.items()})
    write(tmp_path, **{"proc/meminfo": "MemTotal: 2000 kB\nMemAvailable: 1000 kB\n"})
    write(tmp_path, **{"proc/self/mountinfo": mount, "proc/self/cgroup": own})
    assert budget.host_memory(tmp_path) == 1024 * left


def test_errors_of_available_memory(tmp_path: Path):
    with pytest.raises(RuntimeError, match="no MemAvailable"):
        budget.host_memory(tmp_path)
    with pytest.raises(ValueError, match='device is "cpu" or "cuda"; it was "meta"'):
        budget.available("meta")
    assert 0 < budget.available("cpu") < 2**50
