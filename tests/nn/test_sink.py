"""`fusedacc.sink`: autograd functions outside fusedacc add to the sums, with PyTorch's gradients."""

import copy
import threading

import pytest
import torch
from loops import Failure, fail, with_backward
from sink_functions import Model, Product, Rows, Scaled, Written, count_sinks, loss_of, twin_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedacc
from fusedacc.kernels import native_module

pytestmark = pytest.mark.skipif(not native_module.loaded(), reason="sinks need the native engine")

#: The largest difference from float64, in units of the largest element, by the model's dtype.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.05, torch.float16: 0.01}


def wrap(model, steps=None, lr: float = 0.1, **options):
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    return fusedacc.AccumulatingOptimizer(inner, steps, **options)


def assert_close(model, twin, scale: float = 1.0, tolerance: float | None = None) -> None:
    """Compare the gradients with those of a twin in float64, times `scale`."""
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is None:
            continue
        wanted = theirs.grad * scale
        error = (ours.grad.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)
        assert error < (tolerance or TOLERANCE[ours.dtype]), (name, error.item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_counted_window_has_the_mean_of_pytorchs_gradients(monkeypatch, dtype):
    found = count_sinks(monkeypatch)
    model = Model(grouped=dtype is not torch.float64).to(dtype)
    optimizer = wrap(model, 3)
    for window in range(2):
        twin = twin_of(model)
        for seed in range(3):
            loss_of(model, 10 * window + seed).backward()
            loss_of(twin, 10 * window + seed).backward()
            if seed < 2:
                assert all(param.grad is None for param in model.parameters())
                optimizer.step()
        assert_close(model, twin, 1 / 3)
        optimizer.step()
        optimizer.zero_grad()
    assert found
    assert all(found)
    assert " sink " in optimizer.explain()


@pytest.mark.parametrize("steps", [2, None])
@pytest.mark.parametrize("function", [Product, Written])
def test_a_module_of_model_and_a_sink_share_a_weight(function, steps):
    layer = nn.Linear(4, 6)
    inner = torch.optim.SGD(layer.parameters(), lr=1.0)
    optimizer = fusedacc.AccumulatingOptimizer(inner, steps, reduction="sum", model=layer)
    wanted = torch.zeros(6, 4, dtype=torch.float64)
    for micro_batch in range(2):
        x = torch.randn(5, 4)
        left, right = torch.randn(5, 6), torch.randn(5, 6)
        ((layer(x) * left) + (function.apply(x, layer.weight) * right)).sum().backward()
        wanted += (left + right).double().t() @ x.double()
        if steps and micro_batch == 0:
            assert layer.weight.grad is None
            optimizer.step()
    torch.testing.assert_close(layer.weight.grad.double(), wanted, rtol=1e-5, atol=1e-5)
    assert " sink+gemm " in optimizer.explain()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_manual_loop_shows_the_sum_at_any_time(dtype):
    model = Model().to(dtype)
    optimizer = wrap(model)
    for window in range(2):
        twin = twin_of(model)
        for seed in range(3):
            loss_of(model, 10 * window + seed).backward()
            loss_of(twin, 10 * window + seed).backward()
            assert_close(model, twin)
        optimizer.step()
        optimizer.zero_grad(set_to_none=window == 0)


OPTIONS = {
    "weighted": {"reduction": "weighted"},
    "normalized": {"reduction": "normalized"},
    "clipped": {"max_grad_norm": 0.1},
    "skip_nonfinite": {"skip_nonfinite": True},
    "masters": {"master_weights": True},
    "16-bit sums": {"accumulate_dtype": torch.bfloat16},
    "stochastic": {"accumulate_dtype": torch.bfloat16, "rounding": "stochastic", "seed": 1},
    "eager": {"backend": "eager"},
}


@pytest.mark.parametrize(
    ("option", "on_device"),
    [*((option, False) for option in OPTIONS), ("weighted", True), ("normalized", True)],
)
def test_options_of_the_wrapper_apply_to_sinks(monkeypatch, option, on_device):
    found = count_sinks(monkeypatch)
    given = OPTIONS[option]
    weighs = given.get("reduction")
    model = Model().bfloat16()
    optimizer = wrap(model, 3, **given)
    twin = twin_of(model)
    weights = [4, 7, 5]
    for seed, count in enumerate(weights):
        weight = torch.tensor(float(count)) if on_device else count
        kind = "sum" if weighs == "normalized" else "mean"
        with optimizer.accumulate(weight=weight if weighs else None):
            loss_of(model, seed, count, kind).backward()
            optimizer.step()
        factor = (1 if kind == "sum" else count) / sum(weights) if weighs else 1 / 3
        (factor * loss_of(twin, seed, count, kind)).backward()
    if "max_grad_norm" in given:
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    assert_close(model, twin, tolerance=0.1 if "accumulate_dtype" in given else None)
    assert any(found) != (option == "stochastic")


@pytest.mark.parametrize("function", [Product, Written])
def test_a_hook_that_only_looks_sees_the_gradient(function):
    weight = nn.Parameter(torch.randn(6, 4))
    _optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0))
    x = torch.randn(5, 4)
    function.apply(x, weight).sum().backward()  # from here on the parameter has a path
    seen = []

    def look(gradient):
        seen.append(gradient.clone())

    look.only_looks = True
    weight.register_hook(look)
    function.apply(x, weight).sum().backward()
    (gradient,) = seen
    torch.testing.assert_close(gradient, torch.ones(6, 5) @ x)
    torch.testing.assert_close(weight.grad, 2 * torch.ones(6, 5) @ x)


def test_operands_may_change_although_a_schedule_postpones_products():
    weight = nn.Parameter(torch.randn(6, 4))
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0))
    optimizer._capture.postponed = []
    x = torch.randn(5, 4)
    Product.apply(x, weight).sum().backward()
    assert not optimizer._capture.postponed
    optimizer._capture.postponed = None
    torch.testing.assert_close(weight.grad, torch.ones(6, 5) @ x)


def test_a_write_changes_the_version_of_p_grad():
    """Autograd then refuses a graph that has saved the former p.grad."""
    weight = nn.Parameter(torch.randn(6, 4))
    _optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0))

    class Hidden(Written):
        @staticmethod
        def backward(ctx, grad):
            with fusedacc.sink(ctx.saved_tensors[1]).write() as (accumulator, _scale, beta):
                values = accumulator.numpy()  # a kernel's write, of which PyTorch knows nothing
                values[:] = (values if beta else 0.0) + 1.0
            return None, None

    x = torch.randn(5, 4)
    Hidden.apply(x, weight).sum().backward()
    factor = torch.ones(6, 4, requires_grad=True)
    product = (factor * weight.grad).sum()
    Hidden.apply(x, weight).sum().backward()
    assert torch.equal(weight.grad, torch.full((6, 4), 2.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_weight_zero_adds_nothing_even_if_the_gradient_is_nan():
    model = Model()
    optimizer = wrap(model, 2, reduction="weighted")
    twin = twin_of(model)
    with optimizer.accumulate(weight=3):
        loss_of(model).backward()
        optimizer.step()
    with optimizer.accumulate(weight=0):
        (loss_of(model, 1) * torch.nan).backward()
        optimizer.step()
    loss_of(twin).backward()
    assert_close(model, twin)


def two_backwards_of_one_graph(net) -> None:
    loss = loss_of(net)
    loss.backward(retain_graph=True)
    loss.backward()


def frozen_and_trained_again(net) -> None:
    for trained in (False, True):
        net.up.requires_grad_(trained)
        loss_of(net).backward()


def frozen_between_forward_and_backward(net) -> None:
    loss = loss_of(net)
    net.up.requires_grad_(False)
    loss.backward()
    net.up.requires_grad_(True)
    loss_of(net, 1).backward()


def hooked(net) -> None:
    handle = net.up.register_hook(lambda gradient: gradient * 2)
    loss_of(net).backward()
    handle.remove()
    loss_of(net, 1).backward()


def post_accumulate_hooked(net) -> None:
    handle = net.up.register_post_accumulate_grad_hook(lambda param: None)
    loss_of(net).backward()
    handle.remove()
    loss_of(net, 1).backward()


def a_gradient_first(net) -> None:
    torch.autograd.grad(loss_of(net), list(net.parameters()))
    loss_of(net, 1).backward()


def a_nested_gradient(net) -> None:
    def backward(gradient):
        with torch.enable_grad():
            loss = loss_of(net, 5)
        (of_up,) = torch.autograd.grad(loss, [net.up])
        return gradient * (1 + of_up.sum().detach().to(gradient.dtype))

    (with_backward(net.gain.double().sum(), backward) + loss_of(net, 6)).backward()


def a_nested_backward(net) -> None:
    def backward(gradient):
        with torch.enable_grad():
            loss_of(net, 5).backward()
        return gradient

    (with_backward(net.gain.double().sum(), backward) + loss_of(net, 6)).backward()


def plain_and_sink(net) -> None:
    """Use `up` in a function without a sink too."""
    (loss_of(net) + net.up.double().square().sum()).backward()


def anomaly(net) -> None:
    with torch.autograd.detect_anomaly(check_nan=False):
        loss_of(net).backward()


USES = {
    "three backwards": lambda net: [loss_of(net, seed).backward() for seed in range(3)],
    "two graphs at once": lambda net: (loss_of(net, 1) + loss_of(net, 2)).backward(),
    "two backwards of one graph": two_backwards_of_one_graph,
    "frozen and trained again": frozen_and_trained_again,
    "frozen between forward and backward": frozen_between_forward_and_backward,
    "hooked": hooked,
    "post-accumulate hooked": post_accumulate_hooked,
    "autograd.grad first": a_gradient_first,
    "nested autograd.grad": a_nested_gradient,
    "nested backward": a_nested_backward,
    "plain use too": plain_and_sink,
    "some inputs": lambda net: loss_of(net).backward(inputs=[net.up, net.gain]),
    "retained graph": lambda net: loss_of(net).backward(retain_graph=True),
    "anomaly detection": anomaly,
}


@pytest.mark.parametrize("steps", [None, 1])
@pytest.mark.parametrize("use", USES)
def test_gradients_equal_plain_pytorchs(use, steps):
    model = Model()
    _optimizer = wrap(model, steps, reduction="sum")
    twin = twin_of(model)
    for net in (model, twin):
        USES[use](net)
    assert_close(model, twin)


@pytest.mark.parametrize("use", USES)
def test_gradients_equal_plain_pytorchs_in_the_last_micro_batch(use):
    model = Model()
    optimizer = wrap(model, 2, reduction="sum")
    twin = twin_of(model)
    for net in (model, twin):
        loss_of(net, 30).backward()
        if net is model:
            optimizer.step()
        USES[use](net)
    assert_close(model, twin)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_has_sinks(monkeypatch, reentrant):
    found = count_sinks(monkeypatch)
    model = Model()
    optimizer = wrap(model, 2)
    twin = twin_of(model)
    plain_block = model.block
    model.block = lambda x: checkpoint(plain_block, x, use_reentrant=reentrant)
    for seed in range(2):
        loss_of(model, seed).backward()
        loss_of(twin, seed).backward()
        if seed == 0:
            optimizer.step()
    assert_close(model, twin, 1 / 2)
    assert all(found)


def test_second_derivatives_are_pytorchs(monkeypatch):
    found = count_sinks(monkeypatch)
    model = Model(grouped=False)
    _optimizer = wrap(model)
    twin = twin_of(model)
    for net in (model, twin):
        x = torch.linspace(-1, 1, 24).view(3, 8).to(net.up.dtype).requires_grad_()
        weights = [net.up, net.gain]
        output = Scaled.apply(torch.tanh(Product.apply(x, net.up).sum(1, keepdim=True)), net.gain)
        slopes = torch.autograd.grad(output.sum(), weights, create_graph=True)
        sum(slope.square().sum() for slope in slopes).backward()
    assert_close(model, twin)
    assert not all(found)


def test_autograd_grad_returns_the_gradient_and_adds_nothing():
    model = Model()
    _optimizer = wrap(model)
    twin = twin_of(model)
    loss_of(model).backward()
    loss_of(twin).backward()
    ours = torch.autograd.grad(loss_of(model, 1), [model.up, model.down])
    theirs = torch.autograd.grad(loss_of(twin, 1), [twin.up, twin.down])
    for got, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)
    assert_close(model, twin)


class Transformable(torch.autograd.Function):
    """`Product` for transforms of torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight):
        return x @ weight.t()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    backward = Product.backward


@pytest.mark.parametrize("steps", [None, 100])
def test_several_threads_add_at_the_same_time(steps):
    model = Model()
    _optimizer = wrap(model, steps, reduction="sum")
    twin = twin_of(model)
    losses = [[loss_of(model, 10 * thread + index) for index in range(10)] for thread in range(3)]

    def run(of_thread):
        for loss in of_thread:
            loss.backward()

    threads = [threading.Thread(target=run, args=(each,)) for each in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for thread in range(3):
        for index in range(10):
            loss_of(twin, 10 * thread + index).backward()
    if steps:
        _optimizer._capture.add_pending(_optimizer._slots)
        for slot, theirs in zip(_optimizer._slots, twin.parameters(), strict=True):
            found = slot.accumulator.double() * slot.beta
            error = (found - theirs.grad).abs().max() / theirs.grad.abs().max()
            assert error < 1e-4
    else:
        assert_close(model, twin, tolerance=1e-4)


def test_transforms_of_torch_func_have_no_sinks(monkeypatch):
    found = count_sinks(monkeypatch)
    weight = nn.Parameter(torch.randn(6, 4))
    _optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0))
    x = torch.randn(3, 5, 4)
    of_first = torch.func.grad(lambda weight: Transformable.apply(x[0], weight).sum())(weight)
    torch.testing.assert_close(of_first, torch.ones(6, 5) @ x[0])
    assert weight.grad is None
    torch.vmap(lambda rows: Transformable.apply(rows, weight))(x).sum().backward()
    torch.testing.assert_close(weight.grad, torch.ones(6, 15) @ x.flatten(0, 1))
    assert len(found) == 2
    assert not any(found)


def test_ignored_backwards_do_not_count():
    model = Model()
    optimizer = wrap(model, 2)
    twin = twin_of(model)
    loss_of(model).backward()
    optimizer.step()
    with optimizer.ignore():
        loss_of(model, 1).backward()
    loss_of(model, 2).backward()
    for seed in (0, 2):
        loss_of(twin, seed).backward()
    assert_close(model, twin, 1 / 2)


def test_flush_and_discard():
    model = Model()
    optimizer = wrap(model, 4)
    start = copy.deepcopy(model.state_dict())
    loss_of(model).backward()
    optimizer.step()
    optimizer.discard()
    twin = twin_of(model)
    for seed in (1, 2):
        loss_of(model, seed).backward()
        optimizer.step()
        (loss_of(twin, seed) / 2).backward()
    optimizer.flush()
    for name, theirs in twin.named_parameters():
        wanted = start[name].double() - 0.1 * theirs.grad
        torch.testing.assert_close(model.get_parameter(name).double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("steps", [3, None])
def test_a_checkpoint_in_a_window_holds_what_sinks_have_added(steps):
    model = Model()
    optimizer = wrap(model, steps)
    loss_of(model).backward()
    if steps:
        optimizer.step()
    other = Model()
    resumed = wrap(other, steps)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    for net, wrapper in ((model, optimizer), (other, resumed)):
        for seed in (1, 2):
            loss_of(net, seed).backward()
            if steps:
                wrapper.step()
        wrapper.flush() if not steps else None
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("function", [Product, Written])
@pytest.mark.parametrize("layout", ["transposed", "view", "adopted"])
def test_layouts_of_parameters_and_of_sums(function, layout):
    torch.manual_seed(3)
    values = torch.randn(6, 4)
    if layout == "transposed":
        weight = nn.Parameter(values.t().contiguous().t())
    elif layout == "view":
        weight = nn.Parameter(torch.randn(8, 9)[1:7, 2:6])
    else:
        weight = nn.Parameter(values.clone())
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0))
    wanted = torch.zeros(6, 4, dtype=torch.float64)
    if layout == "adopted":
        weight.grad = torch.randn(12, 8)[::2, ::2]
        wanted += weight.grad
    for seed in range(2):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        output = function.apply(x, weight)
        gradient = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed + 9))
        output.backward(gradient)
        wanted += gradient.double().t() @ x.detach().double()
        torch.testing.assert_close(weight.grad.double(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(x.grad.double(), gradient.double() @ weight.detach().double())
    optimizer.close()


def test_a_gradient_that_is_wider_than_the_parameter_is_not_rounded_to_its_dtype():
    weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 4)
    fine = torch.tensor([1 + 2**-12, 3.0, -1e-3])

    class Fine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            ctx.save_for_backward(weight)
            return weight.sum()

        @staticmethod
        def backward(ctx, grad):
            fusedacc.sink(ctx.saved_tensors[0]).add(fine)

    for _ in range(3):
        Fine.apply(weight).backward()
        optimizer.step()
    (sum_of_three,) = [slot.accumulator * slot.beta for slot in optimizer._slots]
    torch.testing.assert_close(sum_of_three, fine * 3 / 4, rtol=1e-6, atol=0)


def test_a_sum_that_is_no_kernels_is_added_to_too():
    """In a manual loop the user may put a tensor of another dtype or a sparse one into p.grad."""
    for strange in (torch.ones(6, 4, dtype=torch.float64), torch.eye(6)[:, :4].to_sparse()):
        for function in (Product, Written):
            weight = nn.Parameter(torch.randn(6, 4))
            weight.grad_dtype = None
            _optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0))
            weight.grad = strange.clone()
            x = torch.randn(5, 4)
            function.apply(x, weight).backward(torch.ones(5, 6))
            wanted = strange.to_dense().double() + torch.ones(6, 5).double() @ x.double()
            torch.testing.assert_close(weight.grad.to_dense().double(), wanted, rtol=1e-5, atol=1e-5)


def test_an_operand_that_shares_memory_with_the_sum():
    weight = nn.Parameter(torch.randn(4, 4))
    _optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0))
    weight.grad = torch.randn(4, 4)
    x = weight.grad
    before = x.clone()
    gradient = torch.randn(4, 4)
    Product.apply(x, weight).backward(gradient)
    torch.testing.assert_close(weight.grad, before + gradient.t() @ before)


@pytest.mark.parametrize("caught", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_an_exception_in_write_taints_the_window(first, caught):
    weight = nn.Parameter(torch.randn(6, 4))
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 4)
    x = torch.randn(5, 4)
    if not first:
        Product.apply(x, weight).sum().backward()
        optimizer.step()

    class Failing(Written):
        @staticmethod
        def backward(ctx, grad):
            try:
                with fusedacc.sink(ctx.saved_tensors[1]).write() as (accumulator, _scale, _beta):
                    accumulator.fill_(7.0)
                    fail()
            except Failure:
                if not caught:
                    raise
            return None, None

    if caught:
        Failing.apply(x, weight).sum().backward()
    else:
        with pytest.raises(Failure):
            Failing.apply(x, weight).sum().backward()
    with pytest.raises(RuntimeError, match="interrupted a backward"):
        optimizer.step()
    optimizer.discard()
    Product.apply(x, weight).sum().backward()
    optimizer.step()
    optimizer.flush()
    torch.testing.assert_close(weight.grad, torch.ones(6, 5) @ x)


def test_no_sinks_without_a_wrapper_or_after_close(monkeypatch):
    found = count_sinks(monkeypatch)
    model = Model()
    loss_of(model).backward()
    optimizer = wrap(model)
    optimizer.close()
    loss_of(model).backward()
    optimizer = wrap(model)
    del optimizer
    loss_of(model).backward()
    assert not any(found)


def test_a_parameter_that_leaves_the_optimizer_has_no_sink():
    weight, other = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6, 4))
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 2)
    optimizer.param_groups[0]["params"] = [other]
    optimizer.zero_grad()
    x = torch.randn(5, 4)
    for each in (weight, other):
        Product.apply(x, each).sum().backward()
    assert weight.grad is not None
    assert other.grad is None
    optimizer.add_param_group({"params": [weight]})


def test_a_tensor_that_is_not_the_parameter_has_no_sink(monkeypatch):
    """A cast or a detached alias gets the gradient from PyTorch, and the parameter too."""
    found = count_sinks(monkeypatch)
    weight = nn.Parameter(torch.randn(6, 4))
    _optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0))
    x = torch.randn(5, 4)
    for read in (lambda: weight.double().float(), lambda: weight.t().t(), lambda: weight[:]):
        weight.grad = None
        Product.apply(x, read()).sum().backward()
        torch.testing.assert_close(weight.grad, torch.ones(6, 5) @ x)
    alias = weight.detach().requires_grad_()
    Product.apply(x, alias).sum().backward()
    torch.testing.assert_close(alias.grad, torch.ones(6, 5) @ x)
    assert not any(found)


def test_a_parameter_that_the_function_did_not_get_has_no_sink():
    weight = nn.Parameter(torch.randn(6, 4))
    _optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0))
    answers = []

    def backward(gradient):
        answers.append(fusedacc.sink(weight))
        return gradient

    x = torch.randn(5, 4, requires_grad=True)
    (with_backward(x, backward) @ weight.t()).sum().backward()
    assert answers == [None]
    assert fusedacc.sink(weight) is None


def test_embeddings_of_several_dimensions_and_repeated_rows():
    weight = nn.Parameter(torch.randn(11, 3))
    _optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0))
    indices = torch.tensor([[1, 1, 7], [0, 1, 10]], dtype=torch.int32)
    gradient = torch.randn(2, 3, 3)
    Rows.apply(indices, weight).backward(gradient)
    wanted = torch.zeros(11, 3).index_add_(0, indices.flatten(), gradient.flatten(0, 1))
    torch.testing.assert_close(weight.grad, wanted)


def test_no_tokens_add_zeros():
    weight = nn.Parameter(torch.randn(6, 4))
    _optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0))
    Product.apply(torch.empty(0, 4), weight).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(6, 4))


def test_moved_and_cast_parameters():
    model = Model()
    optimizer = wrap(model, 2)
    for dtype in (torch.bfloat16, torch.float32):
        model.to(dtype)
        optimizer.zero_grad()
        twin = twin_of(model)
        for seed in range(2):
            loss_of(model, seed).backward()
            loss_of(twin, seed).backward()
            if seed == 0:
                optimizer.step()
        assert_close(model, twin, 1 / 2)
        optimizer.step()
        optimizer.zero_grad()


def test_copies_of_a_model_have_plain_parameters():
    model = Model()
    optimizer = wrap(model)
    loss_of(model).backward()
    copied = copy.deepcopy(model)
    copied.zero_grad()
    twin = twin_of(copied)
    loss_of(copied, 1).backward()
    loss_of(twin, 1).backward()
    assert_close(copied, twin)
    optimizer.close()
    assert not any(param.__dict__ for param in model.parameters())
