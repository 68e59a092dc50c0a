"""The Triton backend on a GPU: the bits of the compiled backends, graphs, and more than 2^31 elements."""

import gc

import pytest
import torch
from cases import GRADIENT_LAYOUTS, LAYOUTS, PAIR_IDS, PAIRS, assert_matches_oracle, copies, random_lists
from gpu import captured, needs, needs_memory

from fusedacc import functional
from fusedacc.kernels import registry

pytestmark = pytest.mark.cuda

SHAPES = [(), (0,), (1,), (7,), (1023,), (1024,), (3, 5), (2, 3, 4, 5), (16384,), (100_003,)]


@pytest.fixture(autouse=True)
def _triton_runs():
    needs("triton")


def others():
    """Return the compiled backends, each with the device of its tensors."""
    return [
        (name, device)
        for name, device in (("cuda", "cuda"), ("cpu", "cpu"))
        if registry.obstacle(name, torch.device(device), torch.float32, torch.float32) is None
    ]


@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("scale", [1.0, 0.3, "tensor"])
@pytest.mark.parametrize("overwrite", [False, True, "some"])
def test_equals_the_compiled_backends_bit_for_bit(pair, scale, overwrite, generator):
    accumulators, gradients = random_lists([pair], SHAPES, generator, device="cuda")
    if overwrite == "some":
        overwrite = [index % 2 == 0 for index in range(len(SHAPES))]
    value = torch.tensor(0.7) if scale == "tensor" else scale
    before = copies(accumulators)
    on_device = value.cuda() if scale == "tensor" else value
    functional.scale_accumulate_(accumulators, gradients, on_device, overwrite=overwrite, backend="triton")
    assert_matches_oracle(accumulators, before, gradients, on_device, overwrite)
    for name, device in others():
        expected = [tensor.to(device, copy=True) for tensor in before]
        fresh = [tensor.to(device) for tensor in gradients]
        there = value.to(device) if scale == "tensor" else value
        functional.scale_accumulate_(expected, fresh, there, overwrite=overwrite, backend=name)
        for result, wanted in zip(accumulators, expected, strict=True):
            assert torch.equal(result.cpu(), wanted.cpu()), name


@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("on_device", [False, True])
def test_kept_sums_equal_the_compiled_backends_bit_for_bit(pair, on_device, generator):
    before, gradients = random_lists([pair], SHAPES, generator, device="cuda")
    results = {}
    for name, device in [("triton", "cuda"), *others()]:
        sums = [tensor.to(device, copy=True) for tensor in before]
        fresh = [tensor.to(device) for tensor in gradients]
        beta = torch.tensor(0.7, device=device) if on_device else 0.7
        registry.get(name).accumulate_(sums, fresh, 1 / 3, False, beta)
        registry.get(name).prepare(sums)(fresh, 1 / 3, False, beta)
        results[name] = [total.cpu() for total in sums]
    for name, sums in results.items():
        assert all(map(torch.equal, sums, results["triton"])), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gradient_layout", GRADIENT_LAYOUTS)
def test_any_strides(layout, gradient_layout, generator):
    shapes = [(3, 5), (2, 3, 4, 5), (129, 65), (6,), (0, 3)]
    accumulators, gradients = random_lists(
        PAIRS, shapes, generator, layout=layout, gradient_layout=gradient_layout, device="cuda"
    )
    before = copies(accumulators)
    functional.scale_accumulate_(accumulators, gradients, 0.7, backend="triton")
    assert_matches_oracle(accumulators, before, gradients, 0.7, False, fused=False)


@pytest.mark.parametrize("prepared", [False, True], ids=["fresh", "plan"])
def test_graph_capture(prepared, generator):
    accumulators, gradients = random_lists(PAIRS[:4], [(5,), (2000,), (70_000,)], generator, device="cuda")
    expected = copies(accumulators)
    scale = torch.tensor(0.5, device="cuda")
    plan = functional.prepare(accumulators, backend="triton")

    def step():
        if prepared:
            plan(gradients, scale)
        else:
            functional.scale_accumulate_(accumulators, gradients, scale, backend="triton")

    graph, _ = captured(step)
    functional.scale_accumulate_(expected, gradients, scale, backend="triton")
    for turn in range(3):
        # Allocations, frees and uploads of the host between replays must not change the graph's table.
        gc.collect()
        torch.zeros(10_000, pin_memory=True)
        functional.scale_accumulate_([torch.zeros(3, device="cuda")], [torch.ones(3, device="cuda")], 9.0)
        for gradient in gradients:
            gradient.mul_(-0.5)
        scale.fill_(turn + 1.5)
        graph.replay()
        functional.scale_accumulate_(expected, gradients, scale, backend="triton")
        torch.cuda.synchronize()
        assert all(map(torch.equal, accumulators, expected))


def test_one_plan_on_two_streams(generator):
    accumulators, gradients = random_lists([PAIRS[0]], [(1000,)] * 20, generator, device="cuda")
    expected = copies(accumulators)
    plan = functional.prepare(accumulators, backend="triton")
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for turn in range(6):
        stream = streams[turn % 2]
        stream.wait_stream(streams[1 - turn % 2])
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            plan(gradients, 0.5)
        functional.scale_accumulate_(expected, gradients, 0.5, backend="triton")
    torch.cuda.synchronize()
    assert all(map(torch.equal, accumulators, expected))


def test_more_elements_than_32_bits_count():
    elements = 2**31 + 5
    needs_memory(6 * elements + 2**30)
    accumulator = torch.zeros(elements, device="cuda")
    gradient = torch.ones(elements, dtype=torch.bfloat16, device="cuda")
    gradient[-3:] = 5
    functional.scale_accumulate_([accumulator], [gradient], 0.5, backend="triton")
    assert accumulator[-3:].tolist() == [2.5] * 3
    assert accumulator[: 2**31].amin().item() == accumulator[: 2**31].amax().item() == 0.5


def test_the_table_of_a_deleted_plan_exists_until_the_last_launch_ends():
    """Its memory belongs to the default stream, which must not reuse it while the side stream reads it."""
    sums, gradients = ([torch.full((4096,), value, device="cuda") for _ in range(3)] for value in (1.0, 2.0))
    plan = functional.prepare(sums, backend="triton")
    plan(gradients, 1.0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        plan(gradients, 1.0)
    del plan
    gc.collect()
    for _ in range(8):
        torch.full((8,), -1, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    assert all(bool((total == 5.0).all()) for total in sums)
