"""Lesser machines, emulated: environment variables that hold libraries to less than the CPU has.

Each is for a fresh process, as every library reads its variable once. oneDNN accepts any nonsense in silence,
so what took effect is looked at from within: `effects()`, and `Machine.wrong()` against it.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

#: What oneDNN calls the instructions that it may use.
SSE41, AVX2 = "Intel SSE4.1", "Intel AVX2"
AVX512 = "Intel AVX-512 with AVX512BW, AVX512VL, and AVX512DQ extensions"
AVX512_BF16 = "Intel AVX-512 with Intel DL Boost and bfloat16 support"


@dataclasses.dataclass(frozen=True)
class Machine:
    """`about`: in words. `settings`: environment variables, beside the number of threads. `expects`: what
    `effects()` is to say. `above`: flags of /proc/cpuinfo, one of which a CPU has that has more than this."""

    name: str
    about: str
    threads: int = 2
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    expects: Mapping[str, str] = dataclasses.field(default_factory=dict)
    above: tuple[str, ...] = ()

    def environment(self, caches: Path, sources: str) -> dict[str, str]:
        """The variables of a process that is this machine. What it remembers is under `caches`; what trials
        of fusedacc have chosen is kept for each state of the `sources`, what torch has compiled for all.
        """
        caches /= self.name
        own = {"OMP_NUM_THREADS": str(self.threads), "OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
        own |= {"FUSEDACC_CACHE": str(caches / sources), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
        return {**os.environ, **own, **self.settings}

    def left_out(self, flags: frozenset[str]) -> str:
        """Why this machine cannot be emulated on a CPU with these flags; empty if it can."""
        if self.above and flags.isdisjoint(self.above):
            return f"left out: the CPU has none of {', '.join(self.above)}, so that it is no more than this"
        return ""

    def wrong(self, found: Mapping[str, str]) -> str:
        """Which of its settings took no effect, by what `effects()` found; empty if all did.

        So that threads that share a core are found out too.
        """
        wanted = {**self.expects, "threads": str(self.threads)}
        differ = [
            f"{name} is {found[name]!r}, not {text!r}" for name, text in wanted.items() if found[name] != text
        ]
        if int(found["cores"]) < self.threads:
            differ.append(f"{self.threads} threads have {found['cores']} cores")
        return "; ".join(differ)


_AVX2 = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "FUSEDACC_CPU_CAPABILITY": "avx2",
}
_IS_AVX2 = {"oneDNN": AVX2, "torch": "AVX2", "fusedacc": "avx2"}
#: MKL on AMD knows no other way to less than AVX2 than that of reproducible bits on any CPU.
_BASELINE = {
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "FUSEDACC_CPU_CAPABILITY": "baseline",
}
_IS_BASELINE = {"oneDNN": SSE41, "torch": "DEFAULT", "fusedacc": "baseline"}
_HAS_AVX512 = ("avx512f",)

MACHINES = (
    Machine("native", "as it is, two threads"),
    Machine("native-1", "as it is, one thread", 1),
    Machine(
        "avx512-bf16",
        "AVX-512 with bfloat16 instructions, no AMX; two threads",
        settings={"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
        expects={"oneDNN": AVX512_BF16},
        above=("amx_bf16", "amx_tile", "avx512_fp16"),
    ),
    Machine(
        "avx512",
        "AVX-512 without bfloat16 instructions, two threads",
        settings={"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "FUSEDACC_CPU_CAPABILITY": "avx512"},
        expects={"oneDNN": AVX512, "fusedacc": "avx512"},
        above=("avx512_vnni", "avx512_bf16"),
    ),
    Machine("avx2", "AVX2, two threads", settings=_AVX2, expects=_IS_AVX2, above=_HAS_AVX512),
    Machine("avx2-1", "AVX2, one thread", 1, _AVX2, _IS_AVX2, _HAS_AVX512),
    Machine(
        "baseline", "SSE4.1 and less, two threads", settings=_BASELINE, expects=_IS_BASELINE, above=("avx2",)
    ),
)


def flags() -> frozenset[str]:
    """Those of the CPU in /proc/cpuinfo; none where it has no such file or line."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":")[1] for line in lines if line.startswith("flags")), "").split())


def effects() -> dict[str, str]:
    """What this process uses: oneDNN's instructions and its bfloat16 product, MKL's processor and branch of
    reproducible bits, torch's and fusedacc's own loops, threads, and the cores that they may run on."""
    from fusedacc.kernels import library

    with tempfile.TemporaryFile() as file:
        said = os.dup(1)
        os.dup2(file.fileno(), 1)  # both libraries write to the C library's standard output
        try:
            with torch.backends.mkldnn.verbose(1), torch.backends.mkl.verbose(1):
                torch.mkldnn_convolution(
                    torch.ones(1, 8, 8, 8), torch.ones(8, 8, 3, 3), None, (0, 0), (1, 1), (1, 1), 1
                )
                torch.ones(64, 64, dtype=torch.bfloat16) @ torch.ones(64, 64, dtype=torch.bfloat16)
                torch.ones(64, 64) @ torch.ones(64, 64)
                torch.ones(1 << 20).add_(1)  # by all threads
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


def _cores() -> int:
    """How many cores the threads of this process may run on, each being pinned or not."""
    try:
        threads = [int(name) for name in os.listdir("/proc/self/task")]
        return len(set().union(*(os.sched_getaffinity(thread) for thread in threads)))
    except (OSError, AttributeError):  # no Linux
        return os.cpu_count() or 1
