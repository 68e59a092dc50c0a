"""Lists the tests that the emulated device cannot run, each with its reason."""

from __future__ import annotations

#: The reason for each part of a test's name.
REASONS = {
    "2_to_the_3": "tensors of more than 2^31 elements take too much memory and time",
    "more_elements_than_32_bits": "tensors of more than 2^32 elements take too much memory and time",
    "test_triton_grouped_cuda": "tl.dot becomes tensor-core instructions, which are not translated; the "
    "kernel runs interpreted in tests/kernels/test_triton_grouped.py",
    "test_a_sum_that_32_bits_cannot_index": "a sum of more than 2^31 elements takes too much memory and time",
    "test_a_norm_needs_two_launches": "the emulated device has no profiler",
    "test_bench_kernels": "the emulated device has no profiler that counts launches, and no clock",
    "the_peak_on_a_gpu_is_that_of_the_allocator": "the emulated device has no allocator with statistics",
    "one_launch_and_no_copy": "the emulated device has no profiler",
    "test_runs_on_the_current_stream_without_waiting": "the emulated device has always finished its work",
    "test_pytorchs_setting_allows_tf32": "a CPU has no TF32",
    "test_modes_with_cuda_graphs_train": "Inductor compiles Triton's kernels for a real GPU",
    **{
        f"test_no_allocation_is_as_large_as_the_sum[{layout}-{dtype}-float32]": "the emulated product "
        "copies 16-bit operands"
        for layout in ("rows", "columns")
        for dtype in ("bfloat16", "float16")
    },
}


def reason(node: str) -> str | None:
    """Return why the test with this node id is skipped, or None."""
    return next((why for part, why in REASONS.items() if part in node), None)
