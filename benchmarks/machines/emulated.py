"""Smaller machines, emulated by environment variables that limit libraries to a part of the CPU's features.

Libraries read these variables once, so each machine needs a new process. oneDNN ignores wrong values without
an error, so the process checks what took effect: see `effects()` and `Machine.wrong()`.
"""

import dataclasses
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..harness import ONE_THREAD, in_process, processes

T = TypeVar("T")

#: What oneDNN calls the instructions that it may use.
SSE41, AVX2 = "Intel SSE4.1", "Intel AVX2"
AVX512 = "Intel AVX-512 with AVX512BW, AVX512VL, and AVX512DQ extensions"
AVX512_BF16 = "Intel AVX-512 with Intel DL Boost and bfloat16 support"


@dataclasses.dataclass(frozen=True)
class Machine:
    """One machine: `settings` are environment variables, and `expects` what `effects()` must return.

    above: flags of /proc/cpuinfo. A CPU with none of them has no more than this machine.
    """

    name: str
    about: str
    threads: int = 2
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    expects: Mapping[str, str] = dataclasses.field(default_factory=dict)
    above: tuple[str, ...] = ()

    def environment(self, caches: Path, sources: str) -> dict[str, str]:
        """Return the environment of a process that is this machine.

        Files go below `caches`: tuning results for each digest of the `sources`, and what torch has compiled.
        """
        caches /= self.name
        own = {"OMP_NUM_THREADS": str(self.threads), "OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
        own |= {"FUSEDACC_CACHE": str(caches / sources), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
        return {**os.environ, **own, **self.settings}

    def left_out(self, flags: frozenset[str]) -> str:
        """Return why this machine cannot be emulated on a CPU with these flags; empty if it can."""
        if self.above and flags.isdisjoint(self.above):
            return f"left out: the CPU has none of {', '.join(self.above)}, so it has no more than this"
        return ""

    def wrong(self, found: Mapping[str, str]) -> str:
        """Return which settings took no effect, given what `effects()` returned; empty if all did.

        Threads that share a core count as such too.
        """
        wanted = {**self.expects, "threads": str(self.threads)}
        differ = [
            f"{name} is {found[name]!r}, not {to!r}" for name, to in wanted.items() if found[name] != to
        ]
        if int(found["cores"]) < self.threads:
            differ.append(f"{self.threads} threads have {found['cores']} cores")
        return "; ".join(differ)


_AVX2 = {
    "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "FUSEDACC_CPU_CAPABILITY": "avx2",
}  # fmt: skip
_IS_AVX2 = {"oneDNN": AVX2, "torch": "AVX2", "fusedacc": "avx2"}
#: On AMD, only MKL's mode of reproducible results limits it to less than AVX2.
_BASELINE = {
    "ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE",
    "FUSEDACC_CPU_CAPABILITY": "baseline",
}  # fmt: skip
_IS_BASELINE = {"oneDNN": SSE41, "torch": "DEFAULT", "fusedacc": "baseline"}
_HAS_AVX512 = ("avx512f",)

MACHINES = (
    Machine("native", "as it is, two threads"),
    Machine("native-1", "as it is, one thread", 1),
    Machine(
        "avx512-bf16", "AVX-512 with bfloat16 instructions, no AMX; two threads", 2,
        {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, {"oneDNN": AVX512_BF16},
        ("amx_bf16", "amx_tile", "avx512_fp16"),
    ),
    Machine(
        "avx512", "AVX-512 without bfloat16 instructions, two threads", 2,
        {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "FUSEDACC_CPU_CAPABILITY": "avx512"},
        {"oneDNN": AVX512, "fusedacc": "avx512"}, ("avx512_vnni", "avx512_bf16"),
    ),
    Machine("avx2", "AVX2, two threads", 2, _AVX2, _IS_AVX2, _HAS_AVX512),
    Machine("avx2-1", "AVX2, one thread", 1, _AVX2, _IS_AVX2, _HAS_AVX512),
    Machine("baseline", "SSE4.1 and less, two threads", 2, _BASELINE, _IS_BASELINE, ("avx2",)),
)  # fmt: skip
KINDS = {kind.name: kind for kind in MACHINES}


def flags() -> frozenset[str]:
    """Return the CPU's flags in /proc/cpuinfo; none if there is no such file or line."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":")[1] for line in lines if line.startswith("flags")), "").split())


def effects() -> dict[str, str]:
    """Return what this process uses: oneDNN's instructions and bfloat16 product, MKL's processor and mode of
    reproducible results, the loops of torch and fusedacc, and the threads with the cores that they may use.
    """
    from fusedacc.kernels import library

    with tempfile.TemporaryFile() as file:
        said = os.dup(1)
        os.dup2(file.fileno(), 1)  # both libraries print to the C library's standard output
        try:
            with torch.backends.mkldnn.verbose(1), torch.backends.mkl.verbose(1):
                images, weight = torch.ones(1, 8, 8, 8), torch.ones(8, 8, 3, 3)
                torch.mkldnn_convolution(images, weight, None, (0, 0), (1, 1), (1, 1), 1)
                torch.ones(64, 64, dtype=torch.bfloat16) @ torch.ones(64, 64, dtype=torch.bfloat16)
                torch.ones(64, 64) @ torch.ones(64, 64)
                torch.ones(1 << 20).add_(1)  # starts all threads
        finally:
            os.dup2(said, 1)
            os.close(said)
        file.seek(0)
        text = file.read().decode()

    def found(pattern: str) -> str:
        match = re.search(pattern, text)
        return match.group(1).strip() if match else ""

    mkl, branch = found(r"Product build \d+ for (.*) processors,"), found(r"CNR:(\S+)")
    mkl += f", {branch}" if branch not in ("", "OFF") else ""
    limit = os.environ.get("MKL_ENABLE_INSTRUCTIONS")
    mkl += f", {limit} shows no effect" if limit and limit not in mkl else ""
    return {
        "oneDNN": found(r"info,cpu,isa:(.*)"),
        "bfloat16 product": found(r"cpu,matmul,([^,]+),") or "torch's own",
        "MKL": mkl or "not built",
        "torch": torch.backends.cpu.get_cpu_capability(),
        "fusedacc": library.built_with()["cpu_capability"] if library.load_error() is None else "not built",
        "threads": str(torch.get_num_threads()),
        "cores": str(_cores()),
    }


class WrongMachineError(RuntimeError):
    """The settings of an emulated machine took no effect."""


def measured_as(machine: str, caches: Path | None, name: str, measure: Callable[..., T], *given: Any) -> T:
    """Return what `measure(*given)` returns in a new process that is started as that machine.

    Files go below `caches`, if they are to be kept: see `Machine.environment`. Raises WrongMachineError.
    """
    kind = KINDS[machine]
    with tempfile.TemporaryDirectory() as folder:
        settings = kind.environment(caches or Path(folder), name) | (ONE_THREAD if kind.threads == 1 else {})
        with processes(settings, 1) as pool:
            return in_process(pool, measured_if, machine, measure, *given)


def measured_if(machine: str, measure: Callable[..., T], *given: Any) -> T:
    """Return what `measure(*given)` returns. Raises WrongMachineError if this process is not that machine."""
    if wrong := KINDS[machine].wrong(effects()):
        raise WrongMachineError(f"settings took no effect: {wrong}")
    return measure(*given)


def _cores() -> int:
    """Return how many cores the threads of this process may run on."""
    try:
        threads = [int(name) for name in os.listdir("/proc/self/task")]
        return len(set().union(*(os.sched_getaffinity(thread) for thread in threads)))
    except (OSError, AttributeError):  # no Linux
        return os.cpu_count() or 1
