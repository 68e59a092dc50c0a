"""torch.compile(fullgraph=True) of the functional API: one operator per device, the same results."""

import pytest
import torch
from backends import cpu_backends
from cases import PAIRS, assert_matches_oracle, copies, random_lists

from fusedacc import functional


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def needs(backend):
    if backend not in cpu_backends():
        pytest.skip(f"the {backend} backend cannot run here")


def compiled(backend, compiler="aot_eager"):
    @torch.compile(fullgraph=True, backend=compiler)
    def step(accumulators, gradients, scale):
        flags = [index % 2 == 0 for index in range(len(accumulators))]
        functional.scale_accumulate_(accumulators, gradients, scale, overwrite=flags, backend=backend)
        return accumulators[0] * 2

    return step


@pytest.mark.parametrize("scale", [0.3, torch.tensor(0.7)], ids=["float", "tensor"])
@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_fullgraph(backend, scale, generator):
    needs(backend)
    accumulators, gradients = random_lists(PAIRS, [(5,), (3, 4)], generator)
    before = copies(accumulators)
    flags = [index % 2 == 0 for index in range(len(before))]
    versions = [tensor._version for tensor in accumulators]
    doubled = compiled(backend)(accumulators, gradients, scale)
    # In a trace, the eager backend's sums decompose into a product and a sum.
    assert_matches_oracle(accumulators, before, gradients, scale, flags, fused=backend == "cpu")
    assert torch.equal(doubled, accumulators[0] * 2)
    assert all(now._version > then for now, then in zip(accumulators, versions, strict=True))


def test_the_graph_holds_one_operator(generator):
    needs("cpu")
    graphs = []

    def record(graph, inputs):
        graphs.append(graph)
        return graph

    accumulators, gradients = random_lists(PAIRS, [(5,), (3, 4)], generator)
    compiled("cpu", record)(accumulators, gradients, 0.5)
    called = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert called.count(torch.ops.fusedacc.scale_accumulate_) == 1
    assert len(called) == 2  # the other is the product


def test_inductor(generator):
    needs("cpu")
    accumulators, gradients = random_lists([(torch.bfloat16, torch.float32)], [(64,)] * 3, generator)
    expected = copies(accumulators)
    functional.scale_accumulate_(expected, gradients, 0.3, overwrite=[True, False, True], backend="cpu")
    compiled("auto", "inductor")(accumulators, gradients, 0.3)
    assert all(map(torch.equal, accumulators, expected))


@pytest.mark.parametrize(
    ("backend", "size", "message"),
    [("cpu", 4, r"gradients\[0\].*shape"), ("triton", 3, r"cannot be traced by torch\.compile; allowed")],
)
def test_tracing_reports_wrong_shapes_and_triton(backend, size, message):
    needs(backend)
    with pytest.raises(Exception, match=message):
        compiled(backend)([torch.zeros(3)], [torch.ones(size)], 1.0)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_norm_in_a_full_graph(backend, norm_type, generator):
    needs(backend)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def half_norm(tensors):
        return functional.total_norm(tensors, norm_type, backend=backend) / 2

    tensors, _ = random_lists(PAIRS, [(5,), (3, 4)], generator)
    tensors[0].requires_grad_()
    result = half_norm(tensors)
    assert torch.equal(result, functional.total_norm(tensors, norm_type, backend=backend) / 2)
    assert not result.requires_grad
    if backend == "cpu":
        assert half_norm([]).item() == 0.0
