"""Properties that the machine code of the GPU kernels must keep.

These are: no spills, wide accesses, loads in flight, resident warps, and memory as the first bound. Nothing
is measured.
"""

import dataclasses
import itertools
import re
import subprocess
from pathlib import Path

import pytest
import sweeps
from build_cache import cached
from machine_code import compile as compilers
from machine_code import disassembly, prediction, tables
from machine_code.devices import ARCHITECTURES, COMPILED, DEVICES, SHARED_RESERVED
from machine_code.kernels import ADDS, BYTES, OVERWRITES, READS, SOURCES, Kernel, MainLoop, pairs
from machine_code.kernels import kernels as read_kernels

ACCUMULATING = ("accumulate", "accumulation")
STREAMS = (*ACCUMULATING, "norm")
CODE = [
    pytest.param(
        backend,
        source,
        architecture,
        id=f"{backend}-{source}-{architecture}",
        marks=pytest.mark.skipif(
            compilers.obstacle(backend) is not None, reason=str(compilers.obstacle(backend))
        ),
    )
    for backend, architectures in COMPILED.items()
    for source in SOURCES[backend]
    for architecture in architectures
    if sweeps.FULL or (architecture == "sm_90" and (backend == "cuda" or source in STREAMS))
]
#: Streaming kernels that add or overwrite.
ACCUMULATE = [each for each in CODE if each.values[1] in ACCUMULATING]
STREAMING = [each for each in CODE if each.values[1] in STREAMS]
each_code = pytest.mark.parametrize(("backend", "source", "architecture"), CODE)
each_accumulate = pytest.mark.parametrize(("backend", "source", "architecture"), ACCUMULATE)
each_streaming = pytest.mark.parametrize(("backend", "source", "architecture"), STREAMING)


#: Triton's kernels that `make test` reads. The disassembler takes half a second for each.
FEW = {
    "accumulation": (
        ("accumulation", "float32", "float32"),
        ("accumulation", "bfloat16", "float32"),
        ("accumulation", "float32", "bfloat16", True),
    ),
    "norm": (("norm", "bfloat16", "2"), ("norm", "float32", "inf")),
}


def kernels(backend: str, source: str, architecture: str) -> list[Kernel]:
    return read_kernels(backend, source, architecture, () if sweeps.FULL else FEW.get(source, ()))


def streams(*code: str) -> list[tuple[Kernel, MainLoop]]:
    return [(kernel, loop) for kernel in kernels(*code) for loop in kernel.loops]


#: A Hopper multiprocessor has 65,536 registers: with 64 per thread, four blocks of 256 threads fit.
MOST_REGISTERS = 64


@each_code
def test_no_kernel_spills(backend, source, architecture):
    found = kernels(backend, source, architecture)
    assert found
    spilled = [each for each in found if each.stack or each.local_accesses]
    assert spilled == []
    if architecture == "sm_90" and source != "grouped":
        assert max(each.registers for each in found) <= MOST_REGISTERS


@each_accumulate
def test_accumulation_moves_16_bytes_of_the_wider_side_at_a_time(backend, source, architecture):
    """On the narrower side a thread moves half as much at a time."""
    found = streams(backend, source, architecture)
    if sweeps.FULL or backend == "cuda":
        assert {(kernel.pair, loop.role) for kernel, loop in found} >= {
            (f"{gradient} into {sums}" + (", stochastic" if stochastic else ""), ADDS)
            for gradient, sums, stochastic in pairs()
        }
    for kernel, loop in found:
        gradient, sums = BYTES[kernel.gradient], BYTES[kernel.accumulator]
        # A Triton thread makes noise that eight elements share.
        step = 8 if kernel.stochastic and backend == "triton" else 16 // max(gradient, sums)
        widths = {min(16, step * gradient), min(16, step * sums)}
        assert set(loop.load_bytes) == widths if loop.role == ADDS else set(loop.load_bytes) <= widths
        assert loop.store_bytes == [min(16, step * sums)]


@each_streaming
def test_each_byte_is_moved_once(backend, source, architecture):
    """The byte counts in the documents assume that the loops move each byte once."""
    found = streams(backend, source, architecture)
    assert found
    for kernel, loop in found:
        gradient, sums = BYTES.get(kernel.gradient, 0), BYTES[kernel.accumulator]
        of_role = {ADDS: gradient + 2 * sums, OVERWRITES: gradient + sums, READS: sums}
        assert loop.bytes_per_element == of_role[loop.role]


#: Loads in flight, by the kind of sum. Each thread has four steps of two loads. With bfloat16 gradients and
#: sums, there are too few registers for all of them. With random bits, there are too few for more than half.
LEAST_LOADS = {"": 8, "bfloat16": 6, "stochastic": 4}


@each_accumulate
def test_loads_are_issued_before_the_first_is_used(backend, source, architecture):
    for kernel, loop in streams(backend, source, architecture):
        if loop.role == ADDS:
            narrow = kernel.gradient == kernel.accumulator == "bfloat16"
            kind = "stochastic" if kernel.stochastic else "bfloat16" if narrow else ""
            assert loop.loads_in_flight >= LEAST_LOADS[kind], kernel


@each_streaming
def test_enough_warps_are_resident(backend, source, architecture):
    """At least half of a data center GPU's warps are resident, and their loads cover a latency of 1 us."""
    for kernel, loop in streams(backend, source, architecture):
        for device in DEVICES:
            if device.code[backend] == architecture:
                assert prediction.occupancy(kernel, device.architecture) >= 0.5, (kernel, device.name)
                if loop.role == ADDS:
                    assert prediction.predict(kernel, loop, device).answer >= 1e-6, (kernel, device.name)


@each_streaming
def test_memory_is_the_first_bound(backend, source, architecture):
    """The exception is overwriting with random bits, once in a window: on a B200, its instructions take as
    long as its memory. An H100's memory has less than half of a B200's bandwidth.
    """
    for kernel, loop in streams(backend, source, architecture):
        for device in DEVICES:
            if device.code[backend] == architecture:
                found = prediction.predict(kernel, loop, device)
                most = 0.65 if not kernel.stochastic else 0.9 if loop.role != OVERWRITES else 1.2
                most /= 2 if architecture == "sm_90" else 1
                assert found.share < most, (kernel, loop.role, device.name)
                assert (found.bound == prediction.DRAM) == (found.share <= 1)


OCCUPANCY = """
#include <cstdio>
#include <cstdlib>
#include <cuda_occupancy.h>
// Lines of: capability, threads and shared memory of a multiprocessor, registers, shared memory and threads.
int main() {
  int major, minor, most, bytes, registers, shared, threads;
  while (std::scanf("%d %d %d %d", &major, &minor, &most, &bytes) == 4 &&
         std::scanf("%d %d %d", &registers, &shared, &threads) == 3) {
    cudaOccDeviceProp device;
    device.computeMajor = major, device.computeMinor = minor, device.warpSize = 32;
    device.maxThreadsPerBlock = 1024, device.maxThreadsPerMultiprocessor = most;
    device.regsPerBlock = device.regsPerMultiprocessor = 65536;
    device.sharedMemPerBlock = 48 << 10, device.sharedMemPerBlockOptin = bytes - RESERVED;
    device.sharedMemPerMultiprocessor = bytes, device.reservedSharedMemPerBlock = RESERVED, device.numSms = 1;
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = 1024, kernel.numRegs = registers, kernel.sharedSizeBytes = shared;
    kernel.partitionedGCConfig = PARTITIONED_GC_OFF, kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    kernel.maxDynamicSharedSizeBytes = 0, kernel.numBlockBarriers = 1;
    cudaOccDeviceState state;
    cudaOccResult result;
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, 0)) return 1;
    std::printf("%d\\n", result.activeBlocksPerMultiprocessor);
  }
}
"""


def test_occupancy_equals_nvidias_calculator():
    folders = [Path("/usr/local/cuda/include"), *([compilers.TRITON / "include"] if compilers.TRITON else [])]
    header = next((folder for folder in folders if (folder / "cuda_occupancy.h").exists()), None)
    if header is None:
        pytest.skip("needs NVIDIA's cuda_occupancy.h, which a CUDA toolkit or Triton's package would bring")

    def compile_in(folder: Path) -> None:
        (folder / "occupancy.cpp").write_text(OCCUPANCY)
        command = ["g++", "-I", header, f"-DRESERVED={SHARED_RESERVED}", folder / "occupancy.cpp"]
        subprocess.run([*command, "-o", folder / "occupancy"], check=True)

    text = (Path(header) / "cuda_occupancy.h").read_bytes()
    program = cached("occupancy", [OCCUPANCY, str(SHARED_RESERVED), text], compile_in) / "occupancy"
    found, lines = [], []
    plain = Kernel("cuda", "", "", "float32", False, "", "", 0, 0, 0, 0, 0, [])
    numbers = (16, 32, 40, 45, 56, 57, 64, 65, 80, 128, 255), (0, 1024, 10000, 40000), (64, 128, 256, 1024)
    for architecture, *own in itertools.product(ARCHITECTURES.values(), *numbers):
        kernel = dataclasses.replace(plain, **dict(zip(("registers", "shared", "threads"), own, strict=True)))
        found.append(prediction.blocks_per_multiprocessor(kernel, architecture))
        device = *divmod(int(architecture.name[3:]), 10), 32 * architecture.warps, architecture.shared
        lines.append(" ".join(map(str, (*device, *own))))
    printed = subprocess.run([program], input="\n".join(lines), capture_output=True, text=True, check=True)
    assert found == list(map(int, printed.stdout.split()))


SASS = """
		Function : kernel
        /*0000*/                   LDC R1, c[0x0][0x28] ;          /* 0x0 */
                                                                   /* 0x0 */
        /*0010*/                   LDG.E.64 R8, desc[UR4][R2.64] ; /* 0x0 */
        /*0020*/              @!P0 LDG.E.128 R4, desc[UR4][R6.64+0x10] ;
        /*0030*/                   LDG.E.64 R12, desc[UR4][R2.64+0x8] ;
        /*0040*/                   FFMA R4, R4, R9.reuse, -R8 ;
        /*0050*/                   F2FP.BF16.F32.PACK_AB R5, R6, R7 ;
        /*0060*/                   STG.E.128 desc[UR4][R6.64], R4 ;
        /*0070*/              @!P1 BRA 0x90 ;
        /*0080*/                   IMAD.IADD R1, R1, 0x1, R2 ;
        /*0090*/                   BRA.U UP0, 0x10 ;
        /*00a0*/                   EXIT ;
        /*00b0*/                   BRA 0xb0;
        /*00c0*/                   NOP;
"""


def read(text: str = SASS) -> disassembly.Loop:
    ((name, code),) = disassembly.functions(text)
    assert name == "kernel"
    assert code[-1].name == "EXIT"
    (loop,) = disassembly.loops(code)
    return loop


def test_machine_code_is_read():
    loop = read()
    assert [each.address for each in loop.body] == list(range(0x10, 0xA0, 0x10))
    assert (loop.loaded, loop.stored) == (32, 16)
    assert len(loop.loads_in_flight) == 3
    assert prediction.results_by_pipe(loop.instructions) == {
        "issue": 9,
        "float32": 2,
        "conversions": 2,
        "products": 1,
    }
    early = SASS.replace("LDG.E.64 R12, desc[UR4][R2.64+0x8] ;", "FADD R5, R5, R5 ;")
    assert len(read(early).loads_in_flight) == 2
    with pytest.raises(ValueError, match="computed"):
        read(SASS.replace("BRA.U UP0, 0x10", "BRX R2 -0x10"))
    with pytest.raises(ValueError, match="not an instruction"):
        read(SASS.replace("FFMA R4", "?? R4"))


def test_the_tables_of_the_page_equal_the_csv():
    lines = tables.read_csv()
    page = tables.PAGE.read_text()
    assert tables.written(page, lines) == page
    assert "## Predicted from the compiled code, not measured" in page
    changed = [{**line, "registers": "99"} for line in lines]
    assert tables.written(page, changed) != page
    folders = compilers.ROOT / "csrc" / "cuda", compilers.ROOT / "fusedacc" / "kernels" / "triton"
    sources = "".join(path.read_text() for folder in folders for path in folder.glob("*.*"))
    assert {line["kernel"] for line in lines} <= set(re.findall(r"(\w+)\(", sources))
