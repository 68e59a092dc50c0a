"""Tests that the emulated device cannot run, each with its reason."""

from __future__ import annotations

#: By a part of the test's name.
REASONS = {
    "2_to_the_3": "tensors of more than 2^31 elements take too much memory and time",
    "more_elements_than_32_bits": "tensors of more than 2^32 elements take too much memory and time",
    "test_triton_grouped_cuda": "tl.dot becomes tensor-core instructions, which are not translated; the "
    "kernel runs interpreted in tests/kernels/test_triton_grouped.py",
    "test_a_sum_that_32_bits_cannot_index": "a sum of more than 2^31 elements takes too much memory and time",
    "test_a_norm_is_two_launches": "there is no profiler of the emulated device",
    "test_bench_kernels": "there are no launches to count by the profiler, and no clock of the device",
    "test_peak_on_a_gpu_is_the_allocators": "there are no statistics of a caching allocator",
    "test_the_largest_that_fits_on_a_gpu": "it tries out sizes in processes of their own",
    "one_launch_and_no_copy": "there is no profiler of the emulated device",
    "test_runs_on_the_current_stream_without_waiting": "the emulated device is never busy when it is asked",
    "test_tf32_is_as_torch_is_set": "a CPU has no TF32",
    **{
        f"test_nothing_as_large_as_the_sum_is_allocated[{layout}-{dtype}-float32]": "the emulated product of "
        "16-bit operands copies them"
        for layout in ("rows", "columns")
        for dtype in ("bfloat16", "float16")
    },
}


def reason(node: str) -> str | None:
    """Why the test of that name is left out, or None."""
    return next((why for part, why in REASONS.items() if part in node), None)
