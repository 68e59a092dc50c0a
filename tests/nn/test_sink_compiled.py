"""Sinks and `linear` inside torch.compile: one graph, and the gradients of eager mode."""

import gc

import pytest
import torch
from sink_functions import Grouped, Model, Product, Scaled, Written, loss_of, twin_of
from torch import nn

import fusedacc
from fusedacc.kernels import native_module
from fusedacc.nn.functional import linear

pytestmark = [
    pytest.mark.skipif(not native_module.loaded(), reason="sinks need the native engine"),
    pytest.mark.usefixtures("fresh_compiler"),
]


def wrap(model, steps=None, **options):
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return fusedacc.AccumulatingOptimizer(inner, steps, **options)


class Adding(Model):
    """A model without `write`, which breaks the graph, and without experts: torch traces their products in
    bfloat16 only.
    """

    def __init__(self):
        super().__init__(grouped=False)

    def block(self, x):
        if self.of_torch:
            return super().block(x)
        return x + Product.apply(torch.tanh(Product.apply(x, self.up)), self.down)


def assert_close(model, twin, scale: float = 1.0) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad.double(),
            theirs.grad * scale,
            rtol=1e-4,
            atol=1e-5,
            msg=lambda text, n=name: f"{n}: {text}",
        )


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_one_graph_has_the_gradients_of_pytorch(backend):
    model = Adding()
    optimizer = wrap(model, 3)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for window in range(2):
        twin = twin_of(model)
        for seed in range(3):
            loss_of(compiled, 10 * window + seed).backward()
            loss_of(twin, 10 * window + seed).backward()
            if seed < 2:
                assert all(param.grad is None for param in model.parameters())
                optimizer.step()
        assert_close(model, twin, 1 / 3)
        optimizer.step()
        optimizer.zero_grad()
    shown = optimizer.explain()
    assert shown.count(" sink ") == 4
    assert "compiled" in shown


def test_a_graph_serves_later_wrappers_and_follows_close(monkeypatch):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    model = Adding()
    compiled = torch.compile(model, fullgraph=True, backend=counter)

    def check(has_wrapper: bool) -> None:
        model.zero_grad()
        twin = twin_of(model)
        loss_of(compiled).backward()
        loss_of(twin).backward()
        if has_wrapper:
            assert all(param.grad is None for param in model.parameters())
        else:
            assert_close(model, twin)

    check(has_wrapper=False)
    optimizer = wrap(model, 2)
    check(has_wrapper=True)
    frames = counter.frame_count
    optimizer.close()
    model.zero_grad()
    check(has_wrapper=False)
    optimizer = wrap(model, 2)
    check(has_wrapper=True)
    del optimizer
    gc.collect()
    check(has_wrapper=False)
    assert counter.frame_count == frames == 2


def test_hooks_ignore_and_frozen_parameters():
    model = Adding()
    optimizer = wrap(model, 4, reduction="sum")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    twin = twin_of(model)

    def both(seed: int) -> None:
        loss_of(compiled, seed).backward()
        loss_of(twin, seed).backward()

    both(0)
    optimizer.step()
    handles = [net.up.register_hook(lambda gradient: gradient * 2) for net in (model, twin)]
    both(1)
    optimizer.step()
    for handle in handles:
        handle.remove()
    with optimizer.ignore():
        loss_of(compiled, 2).backward()
    for net in (model, twin):
        net.down.requires_grad_(False)
    both(3)
    optimizer.step()
    for net in (model, twin):
        net.down.requires_grad_(True)
    both(4)
    assert_close(model, twin)


def test_autograd_grad_by_the_weight_is_refused():
    model = Adding()
    _optimizer = wrap(model, 2)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"autograd.grad\(\) asks for the gradient"):
        torch.autograd.grad(loss_of(compiled), [model.up])


def test_write_breaks_the_graph_and_is_right():
    model = Model(grouped=False)
    optimizer = wrap(model, 2)
    twin = twin_of(model)
    compiled = torch.compile(model, backend="aot_eager")
    for seed in range(2):
        loss_of(compiled, seed).backward()
        loss_of(twin, seed).backward()
        if seed == 0:
            assert all(param.grad is None for param in model.parameters())
            optimizer.step()
    assert_close(model, twin, 1 / 2)
    weight = nn.Parameter(torch.randn(6, 4))
    written = torch.compile(lambda x: Written.apply(x, weight).sum(), backend="eager", fullgraph=True)
    _other = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        written(torch.randn(5, 4))


def test_wrong_shapes_raise():
    class Wrong(Scaled):
        @staticmethod
        def backward(ctx, grad):
            _x, weight = ctx.saved_tensors
            fusedacc.sink(weight).add(grad)
            return grad * weight, None

    weight = nn.Parameter(torch.randn(4))
    _optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0))
    function = torch.compile(lambda x: Wrong.apply(x, weight).sum(), backend="aot_eager")
    with pytest.raises((ValueError, RuntimeError), match=r"gradient has shape \(3, 4\)"):
        function(torch.randn(3, 4)).backward()


def test_shapes_that_change_need_no_graph_each():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    model = Adding()
    _optimizer = wrap(model)
    twin = twin_of(model)
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    for count in (5, 6, 7, 9):
        loss_of(compiled, count, count).backward()
        loss_of(twin, count, count).backward()
    assert_close(model, twin)
    assert counter.frame_count == 1


def test_a_compiled_step_with_its_backward():
    model = Adding()
    optimizer = wrap(model, 3)
    twin = twin_of(model)

    def step(seed: int) -> None:
        loss_of(model, seed).backward()

    compiled = torch.compile(step, backend="aot_eager")
    for seed in range(3):
        compiled(seed)
        loss_of(twin, seed).backward()
        if seed < 2:
            optimizer.step()
    assert_close(model, twin, 1 / 3)


def test_grouped_products_in_bfloat16():
    weight = nn.Parameter(torch.randn(3, 8, 8).bfloat16())
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 2, reduction="sum")
    offs = torch.tensor([2, 2, 6], dtype=torch.int32)
    function = torch.compile(
        lambda x: (Grouped.apply(x, weight, offs) * 2).float().exp().sum(), fullgraph=True
    )
    wanted = torch.zeros(3, 8, 8)
    for seed in range(2):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)).bfloat16().requires_grad_()
        function(x / 9).backward()
        for expert, (start, end) in enumerate([(0, 2), (2, 2), (2, 6)]):
            rows = x.detach().float()[start:end] / 9
            output = rows @ weight.detach()[expert].float().t()
            wanted[expert] += (2 * (2 * output).exp()).t() @ rows
        optimizer.step()
    torch.testing.assert_close(weight.grad.float(), wanted, rtol=0.02, atol=0.05)


@pytest.mark.usefixtures("small_layers_too")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_linear_in_one_graph(backend):
    weight = nn.Parameter(torch.randn(6, 4))
    bias = nn.Parameter(torch.randn(6))
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight, bias], lr=1.0), 3, reduction="sum")
    function = torch.compile(
        lambda x: torch.sin(linear(x, weight, bias)).sum(), backend=backend, fullgraph=True
    )
    twins = [param.detach().double().requires_grad_() for param in (weight, bias)]
    for seed in range(3):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        function(x).backward()
        torch.sin(nn.functional.linear(x.double(), *twins)).sum().backward()
        if seed < 2:
            assert weight.grad is None
            optimizer.step()
    for ours, theirs in zip((weight, bias), twins, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)
    assert " gemm " in optimizer.explain()
    assert "compiled" in optimizer.explain()
