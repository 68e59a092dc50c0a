"""Lets g++ link against an older glibc than the one of this machine, for wheels that run on older systems.

    python .ci/old_glibc.py FOLDER 2.28

It writes libraries to the folder that have the symbols of this machine's glibc and no code. Each symbol has
the newest version that is not newer than the given one. A linker that searches this folder first (`-L`)
refers to these versions. Symbols that have only newer versions are left out, and stay undefined in what is
linked.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

#: The libraries of glibc that have code, and those that were merged into libc in glibc 2.34. Programs for an
#: older glibc must still name them.
LIBRARIES = ("libc.so.6", "libm.so.6")
MERGED = ("libpthread.so.0", "libdl.so.2", "librt.so.1")


def find(library: str) -> str:
    """Return the path of a library that g++ would link."""
    return subprocess.run(
        ["g++", f"-print-file-name={library}"], capture_output=True, text=True, check=True
    ).stdout.strip()


def numbers(version: str) -> tuple[int, ...]:
    """Return (2, 28) for `GLIBC_2.28`."""
    return tuple(map(int, version.removeprefix("GLIBC_").split(".")))


def symbols(library: str, newest: str) -> dict[str, tuple[str, bool]]:
    """Return the version of each symbol of a library, and whether it is data."""
    listed = subprocess.run(
        ["nm", "--dynamic", "--defined-only", "--with-symbol-versions", library],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found: dict[str, tuple[str, bool]] = {}
    for kind, name, version in re.findall(r" (\w) (\S+?)@+(GLIBC_[\d.]+)$", listed, re.MULTILINE):
        if numbers(version) <= numbers(newest) and (
            name not in found or numbers(found[name][0]) < numbers(version)
        ):
            found[name] = version, kind in "BDRVu"
    return found


def write_library(target: Path, versions: dict[str, tuple[str, bool]]) -> None:
    """Write a library with these symbols. Its file is named after its soname."""
    lines = []
    for number, (name, (version, is_data)) in enumerate(versions.items()):
        lines += [f".globl s{number}", f".type s{number}, {'@object' if is_data else '@function'}"]
        lines += [f"s{number}: .byte 0", f".symver s{number}, {name}@@{version}, remove"]
    assembly, script = target.with_suffix(".s"), target.with_suffix(".map")
    assembly.write_text("\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""]))
    known = sorted({version for version, _ in versions.values()}, key=numbers)
    script.write_text("".join(f"{version} {{}};\n" for version in known))
    options = ["-nostdlib", "-shared", f"-Wl,-soname,{target.name}"]
    if known:
        options.append(f"-Wl,--version-script={script}")
    subprocess.run(["g++", *options, str(assembly), "-o", str(target)], check=True)


def write_all(folder: Path, newest: str) -> None:
    """Write glibc's libraries for a version such as `2.28`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in LIBRARIES:
        real = find(name)
        write_library(folder / name, symbols(real, newest))
        plain = name.rpartition(".")[0]
        # Where g++ looks for `-lc` there is a script that names the library, and others that it needs.
        text = Path(find(plain)).read_bytes()
        if text.startswith(b"\x7fELF"):
            (folder / plain).unlink(missing_ok=True)
            (folder / plain).symlink_to(name)
        else:
            script = text.decode()
            for path in set(re.findall(rf"\S*/{re.escape(name)}\b", script)):
                script = script.replace(path, f'"{(folder / name).resolve()}"')
            (folder / plain).write_text(script)
    for name in MERGED:
        write_library(folder / name, {})
        plain = name.rpartition(".")[0]
        (folder / plain).unlink(missing_ok=True)
        (folder / plain).symlink_to(name)


def main(arguments: Iterable[str]) -> None:
    folder, newest = arguments
    write_all(Path(folder), newest)


if __name__ == "__main__":
    main(sys.argv[1:])
