"""Puts bugs of every kind that the emulated device should find into copies of the project.

    python -m emulation.mutants [PART_OF_A_NAME ...]

Each mutant replaces one piece of text. With the replacement, the mutant's tests must fail on the emulated
device. Without it, they must pass. For a mutant of the native module, the module is compiled again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from mutant import Mutant
from mutant_copies import ROOT, project

NORMS = "tests/cuda/test_norm_cuda.py -k cuda"
SUMS = "tests/cuda/test_cuda_ops.py"
PROGRAMS = "tests/emulation/tests/test_programs.py"
NATIVE = "tests/cuda/test_native_cuda.py"
DEVICES = "tests/cuda/test_devices_cuda.py -k weights"
QUEUE = "csrc/autograd/launch_queue.cpp"
ENGINE = "csrc/autograd/engine.cpp"
CAPTURE = "fusedacc/autograd/capture.py"
PASSED, FAILED = 0, 1


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
        "the caller's stream does not wait for what was added on other streams",
        QUEUE,
        "  for (const c10::Stream& stream : streams_) wait_for(*current_stream(stream.device()), stream);\n",
        "",
        NATIVE,
    ),
    Mutant(
        "a stream on which sums were written is forgotten",
        QUEUE,
        "streams_.push_back(stream);",
        "(void)0;",
        NATIVE,
    ),
    Mutant(
        "an addition does not wait for an earlier one on another stream",
        QUEUE,
        "    wait_for(stream, *slot->writer);\n",
        "    (void)0;\n",
        NATIVE,
    ),
    Mutant(
        "an addition is not recorded as the last one to its sum",
        QUEUE,
        "  slot->writer = stream;\n",
        "  if (!slot->writer.has_value()) slot->writer = stream;\n",
        f"{NATIVE} {PROGRAMS}",
    ),
    Mutant(
        "a launch does not wait for earlier additions to its sums",
        QUEUE,
        "    for (const auto& slot : batch.slots) order(slot, *batch.stream);\n",
        "    (void)0;\n",
        NATIVE,
    ),
    Mutant(
        "gradients are added on the caller's stream",
        QUEUE,
        "  const c10::OptionalStreamGuard on_stream(batch.stream);\n",
        "",
        NATIVE,
    ),
    Mutant(
        "a module does not wait for an earlier addition on another stream",
        QUEUE,
        "  if (stream.has_value()) order(slot, *stream);\n",
        "",
        f"{NATIVE} {PROGRAMS}",
    ),
    Mutant(
        "a product overtakes an addition that waits",
        QUEUE,
        "  if (slot->waits) flush();\n  const std::optional<c10::Stream> stream = current_stream(slot->",
        "  const std::optional<c10::Stream> stream = current_stream(slot->",
        NATIVE,
    ),
    Mutant(
        "one launch adds to a sum twice",
        ENGINE,
        "  if (slot->waits) queue_.flush();  // Python may make",
        "  // Python may make",
        NATIVE,
    ),
    Mutant(
        "a slot is not known to wait",
        QUEUE,
        "  slot->waits = true;\n",
        "",
        NATIVE,
    ),
    Mutant(
        "a slot waits for ever after a launch",
        QUEUE,
        "    for (const auto& slot : batch.slots) slot->waits = false;\n  }\n  try {",
        "  }\n  try {",
        NATIVE,
    ),
    Mutant(
        "a gradient that others can change waits for a launch",
        QUEUE,
        "if (!may_wait || nbytes_ >= limit_) flush();",
        "if (nbytes_ >= limit_) flush();",
        NATIVE,
    ),
    Mutant(
        "gradients wait without a limit",
        QUEUE,
        "if (!may_wait || nbytes_ >= limit_) flush();",
        "if (!may_wait) flush();",
        NATIVE,
    ),
    Mutant(
        "each gradient is launched alone after the first full bucket",
        QUEUE,
        "std::exchange(batches_, {});\n  nbytes_ = 0;\n  for (const Batch& batch : batches) {\n"
        "    for (const auto& slot : batch.slots) slot->waits = false;\n  }\n  try {",
        "std::exchange(batches_, {});\n  for (const Batch& batch : batches) {\n"
        "    for (const auto& slot : batch.slots) slot->waits = false;\n  }\n  try {",
        NATIVE,
    ),
    Mutant(
        "gradients of two streams share a launch",
        QUEUE,
        "batch.stream == stream && ",
        "",
        f"{NATIVE} {PROGRAMS}",
    ),
    Mutant(
        "gradients of two factors share a launch",
        QUEUE,
        " && batch.addition.is_same(addition);",
        ";",
        NATIVE,
    ),
    Mutant(
        "the last stream of a backward pass is remembered in the next",
        QUEUE,
        "slot->writer.reset();",
        "(void)0;",
        f"{NATIVE} {PROGRAMS}",
    ),
    Mutant(
        "the engine goes on with a window whose capture has begun",
        ENGINE,
        "  if (on_gpu_ && is_capturing()) return false;",
        "",
        f"tests/cuda/test_graph_capture_cuda.py {NATIVE}",
    ),
    Mutant(
        "a backward pass of the engine ends without a wait",
        ENGINE,
        "      queue_.join();\n      const bool is_done",
        "      queue_.flush();\n      const bool is_done",
        NATIVE,
    ),
    Mutant(
        "a product is not ordered after earlier additions",
        ENGINE,
        "  if (!sum.is_cpu()) queue_.order_write(slot);\n  target->backward->added = true;",
        "  target->backward->added = true;",
        NATIVE,
    ),
    Mutant(
        "Python does not wait for the engine's additions",
        CAPTURE,
        "            self.engine.settle(slot)\n        return backward",
        "        return backward",
        f"{NATIVE} {PROGRAMS}",
    ),
    Mutant(
        "a scale on another device is given to a kernel",
        ENGINE,
        " ||\n         !(scale.on_host() || scale.tensor.device() == *slot.device)",
        "",
        f"tests/cuda/test_devices_cuda.py {PROGRAMS}",
    ),
    Mutant(
        "rows of a GPU are added with the operator for CPUs",
        ENGINE,
        "!gradients.is_cpu() || !slot->device->is_cpu()",
        "false",
        f"tests/cuda/test_rows_cuda.py {PROGRAMS}",
    ),
    Mutant(
        "nodes stay on the stream on which the wrapper was made",
        "fusedacc/autograd/registration.py",
        "            self._leave_former_streams()\n",
        "",
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
        "modules take a weight on the GPU for 1",
        ENGINE,
        "!backward->drops && backward->scale.on_host() &&",
        "!backward->drops &&",
        DEVICES,
    ),
    Mutant(
        "modules take a window's scale on the GPU for 1",
        ENGINE,
        "window_->sum_scale.on_host() && !must_add_in_python(slot, backward->scale);",
        "!must_add_in_python(slot, backward->scale);",
        DEVICES,
    ),
    Mutant(
        "modules take a deferred scale on the GPU for 1",
        ENGINE,
        " || !slot.beta.on_host()) return std::nullopt;",
        ") return std::nullopt;",
        DEVICES,
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


def is_caught(mutant: Mutant) -> bool:
    """Return whether the mutant's tests fail.

    Raises RuntimeError if the tests cannot run.
    """
    with project(mutant) as folder:
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
