"""Puts bugs of every kind that the emulated device should find into copies of the project.

    python -m emulation.mutants [PART_OF_A_NAME ...]

Each mutant replaces one piece of text. With the replacement, the mutant's tests must fail on the emulated
device. Without it, they must pass. For a mutant of the native module, the module is compiled again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

from .build import ROOT

#: Folders that are copied. All other files are symbolic links.
COPIED = ("csrc", "fusedacc", "tests")
NORMS = "tests/cuda/test_norm_cuda.py -k cuda"
SUMS = "tests/cuda/test_cuda_ops.py"
PROGRAMS = "tests/emulation/tests/test_programs.py"
QUEUE = "csrc/autograd/launch_queue.cpp"
#: The folder of the native module's sources.
MODULE = "csrc/autograd"
PASSED, FAILED = 0, 1


@dataclass(frozen=True)
class Mutant:
    """One bug: `new` replaces the text `old`, which must occur exactly once in the file `where`.

    tests: arguments for pytest. ptx: run the kernels as nvcc's PTX.
    """

    name: str
    where: str
    old: str
    new: str
    tests: str
    ptx: bool = False


MUTANTS = (
    Mutant(
        "no barrier before the warps' values are read",
        "csrc/cuda/norm.cu",
        "of_warp[threadIdx.x / 32] = state;\n    __syncthreads();",
        "of_warp[threadIdx.x / 32] = state;",
        NORMS,
    ),
    Mutant(
        "a barrier that only some threads reach",
        "csrc/cuda/norm.cu",
        "    __syncthreads();  // a join before may still be read",
        "    if (threadIdx.x < 64) __syncthreads();",
        NORMS,
    ),
    Mutant(
        "the last of many blocks' partial norms is forgotten",
        "csrc/cuda/torch_interface.cpp",
        "last.partials = {{norms, work.chunks}};",
        "last.partials = {{norms, work.chunks - 1}};",
        "tests/cuda/test_norm_cuda.py -k many_partials",
    ),
    Mutant(
        "steps of 16 bytes where the gradient is not aligned",
        "csrc/cuda/device/accumulate_block.h",
        "return head < count && aligned_for<kStep>(gradient + head) ? head : count;",
        "return head < count ? head : count;",
        f"{SUMS} -k misaligned",
    ),
    Mutant(
        "the same in nvcc's PTX",
        "csrc/cuda/device/accumulate_block.h",
        "return head < count && aligned_for<kStep>(gradient + head) ? head : count;",
        "return head < count ? head : count;",
        f"{SUMS} -k misaligned",
        ptx=True,
    ),
    Mutant(
        "steps of 16 bytes in Triton where a tensor is not aligned",
        "fusedacc/kernels/triton/backend.py",
        "misaligned = kernels.MISALIGNED if (address | pointer) % 16 else 0",
        "misaligned = 0",
        "tests/cuda/test_sanitized.py -k triton",
    ),
    Mutant(
        "the last chunk of a tensor is not cut off",
        "csrc/cuda/device/accumulate_block.h",
        "chunk.count = static_cast<int32_t>(left < chunk_elements ? left : chunk_elements);",
        "chunk.count = chunk_elements;",
        f"{SUMS} -k misaligned",
    ),
    Mutant(
        "a mask of Triton's kernel is missing",
        "fusedacc/kernels/triton/kernels.py",
        "tl.store(accumulator + done + lane, sums, mask=inside)",
        "tl.store(accumulator + done + lane, sums)",
        "tests/cuda/test_triton_cuda.py",
    ),
    Mutant(
        "another stream's use of a plan's table is not recorded",
        "fusedacc/kernels/triton/backend.py",
        "            self._table.record_stream(torch.cuda.current_stream(self._device))\n",
        "            pass\n",
        "tests/cuda/test_triton_cuda.py -k deleted_plan",
    ),
    Mutant(
        "the caller's stream does not wait for what modules have added on other streams",
        "fusedacc/autograd/graph_task.py",
        "        if current.cuda_stream != raw:\n            current.wait_stream(stream_at(raw, device))\n"
        "        for slot in slots:",
        "        for slot in slots:",
        PROGRAMS,
    ),
    Mutant(
        "a module does not wait for an earlier addition on another stream",
        "fusedacc/autograd/graph_task.py",
        "        torch.cuda.current_stream(device).wait_stream(stream_at(slot.writer_stream, device))\n",
        "        pass\n",
        PROGRAMS,
    ),
    Mutant(
        "the caller does not wait for a bucket that was added on its own stream",
        "fusedacc/autograd/graph_task.py",
        "        yield\n    current.wait_stream(stream)\n",
        "        yield\n",
        PROGRAMS,
    ),
    Mutant(
        "a bucket is added on the caller's stream",
        "fusedacc/autograd/graph_task.py",
        "    if current.cuda_stream == raw:\n        yield\n        return\n",
        "    if True:\n        yield\n        return\n",
        f"{PROGRAMS} tests/cuda/test_streams_cuda.py",
    ),
    Mutant(
        "the default stream's handle makes a new stream",
        "fusedacc/autograd/graph_task.py",
        "    return torch.cuda.get_stream_from_external(raw, device)",
        "    return torch.cuda.ExternalStream(raw, device=device)",
        f"{PROGRAMS} tests/cuda/test_streams_cuda.py",
    ),
    Mutant(
        "the caller's stream does not wait for what native code has added on other streams",
        QUEUE,
        "    wait_for(current_stream(stream.device()), stream);\n",
        "",
        "tests/cuda/test_native_cuda.py",
    ),
    Mutant(
        "a native addition does not wait for an earlier one on another stream",
        QUEUE,
        "  wait_for(stream, writer->second);\n",
        "",
        "tests/cuda/test_native_cuda.py",
    ),
    Mutant(
        "native code launches on the caller's stream",
        QUEUE,
        "  const c10::StreamGuard on_stream(batch.stream);\n",
        "",
        "tests/cuda/test_native_cuda.py",
    ),
    Mutant(
        "a product overtakes an addition that waits",
        QUEUE,
        "  if (waiting_.count(identity) != 0) launch();\n  const auto writer",
        "  const auto writer",
        "tests/cuda/test_native_cuda.py",
    ),
    Mutant(
        "one launch adds to a sum twice",
        QUEUE,
        "  if (waiting_.count(identity) != 0) launch();  // no launch adds to a sum twice\n",
        "",
        "tests/cuda/test_native_cuda.py",
    ),
    Mutant(
        "a gradient that others can change waits for a launch",
        QUEUE,
        "  if (!may_wait || nbytes_ >= limit_) launch();\n",
        "  if (nbytes_ >= limit_) launch();\n",
        "tests/cuda/test_native_cuda.py",
    ),
    Mutant(
        "gradients wait without a limit",
        QUEUE,
        "  if (!may_wait || nbytes_ >= limit_) launch();\n",
        "  if (!may_wait) launch();\n",
        "tests/cuda/test_native_cuda.py",
    ),
    Mutant(
        "native code goes on with a window whose capture has begun",
        "csrc/autograd/middle_of_window.cpp",
        "  if (plan_.on_gpu && is_capturing()) return false;\n",
        "",
        "tests/cuda/test_graph_capture_cuda.py tests/cuda/test_native_cuda.py",
    ),
    Mutant(
        "nodes stay on the stream on which the wrapper was made",
        "fusedacc/autograd/registration.py",
        "            self._leave_former_streams()\n",
        "",
        "tests/cuda/test_stream_changes_cuda.py",
    ),
    Mutant(
        "a parameter that loses its hook never gets it back",
        "fusedacc/autograd/registration.py",
        "        self._seen = None\n        self._shards.disarm(slot)\n",
        "        self._shards.disarm(slot)\n",
        "tests/cuda/test_stream_changes_cuda.py",
    ),
    Mutant(
        "the CPU reads a number before it has arrived",
        "fusedacc/kernels/torch_state.py",
        'non_blocking=device.type != "cpu"',
        "non_blocking=True",
        "tests/cuda/test_devices_cuda.py",
    ),
    Mutant(
        "torch's kernel on a CPU takes a scale that is on a GPU",
        "fusedacc/optimizer/update.py",
        " and len(sums.on_gpu) < 2",
        "",
        "tests/cuda/test_devices_cuda.py",
    ),
    Mutant(
        "a driver that is too old is not noticed",
        "fusedacc/kernels/native.py",
        "        if problem is not None:\n            toolkit =",
        "        if False:\n            toolkit =",
        "tests/emulation/tests/test_old_driver.py",
    ),
    Mutant(
        "a float32 scale is taken for the float64 number",
        "tests/cuda/test_sanitized.py",
        "scale = torch.tensor(0.75, device",
        "scale = torch.tensor(0.7500001, device",
        "tests/cuda/test_sanitized.py -k plan",
    ),
    Mutant(
        "a self-test runs while a graph is captured",
        "fusedacc/kernels/selftest.py",
        "        captures = torch_state.capturing()\n",
        "        captures = False\n",
        "tests/cuda/test_selftest_cuda.py -k capture",
    ),
)


def run(copy: Path, mutant: Mutant) -> subprocess.CompletedProcess[str]:
    """Run a mutant's tests in a copy until one fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-p", "emulation.plugin", "-m", "cuda", *mutant.tests.split()]
    environment = os.environ | {
        "PYTHONPATH": f"{copy}{os.pathsep}{copy / 'tests'}",
        "OMP_NUM_THREADS": "1",
        "EMULATION_SEED": "1",
    }
    environment |= {"EMULATION_PTX": "1"} if mutant.ptx else {}
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)


def compile_module(folder: Path) -> None:
    """Compile a copy's native module from its sources, without optimization.

    Raises subprocess.CalledProcessError if it does not compile.
    """
    together = folder / "module.cpp"
    sources = sorted((folder / MODULE).glob("*.cpp"))
    together.write_text("".join(f'#include "{source}"\n' for source in sources))
    module = next((folder / "fusedacc").glob(f"_autograd.torch-{torch.__version__}.*.so"))
    headers = [f"-isystem{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
    defines = ["-DTORCH_EXTENSION_NAME=_autograd", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    command = [
        "c++",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
        "-std=c++20",
        "-O0",
        *defines,
        *headers,
        str(together),
    ]
    subprocess.run([*command, "-o", str(module)], check=True)


def project(folder: Path) -> None:
    """Copy the project into a folder."""
    for source in ROOT.iterdir():
        if source.name in COPIED:
            shutil.copytree(source, folder / source.name)
        elif source.name != ".pytest_cache":
            (folder / source.name).symlink_to(source)


def is_caught(mutant: Mutant) -> bool:
    """Return whether the mutant's tests fail.

    Raises RuntimeError if the text does not occur exactly once, or the tests cannot run.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        project(folder)
        target = folder / mutant.where
        text = target.read_text()
        if text.count(mutant.old) != 1:
            raise RuntimeError(
                f"{mutant.name}: its text occurs {text.count(mutant.old)} times in {mutant.where}"
            )
        target.write_text(text.replace(mutant.old, mutant.new))
        if mutant.where.startswith(MODULE):
            compile_module(folder)
        done = run(folder, mutant)
    # The device aborts the process after a misaligned access, for example. Then pytest sets no exit status.
    if done.returncode < 0 or "EMULATION:" in done.stderr + done.stdout:
        return True
    if done.returncode not in (PASSED, FAILED):
        raise RuntimeError(f"{mutant.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == FAILED


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help="run the mutants whose name contains one of these (all)")
    options = parser.parse_args()
    mutants = [m for m in MUTANTS if not options.parts or any(part in m.name for part in options.parts)]
    survived = []
    for mutant in mutants:
        caught = is_caught(mutant)
        print(f"{'caught' if caught else 'NOT CAUGHT'}: {mutant.name}", flush=True)
        if not caught:
            survived.append(mutant.name)
    tried = {(mutant.tests, mutant.ptx): mutant for mutant in mutants}
    wrong = [mutant.tests for mutant in tried.values() if run(ROOT, mutant).returncode != PASSED]
    for tests in wrong:
        print(f"these tests also fail without a mutant: {tests}")
    print(f"{len(mutants) - len(survived)} of {len(mutants)} were caught")
    return 1 if survived or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
