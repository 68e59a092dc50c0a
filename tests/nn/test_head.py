"""`linear_cross_entropy` equals PyTorch's functions of all logits, and adds its gradients to accumulators."""

import copy
import itertools
import json
import sys

import forked
import memory
import pytest
import torch
from backends import cpu_backends
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fusedacc
from fusedacc.kernels import cpu_rules, softmax
from fusedacc.nn import cross_entropy, head
from fusedacc.nn.functional import linear_cross_entropy
from fusedacc.planner import plan
from fusedacc.traffic import TrafficMeter

CLASSES, WIDTH, TOKENS = 200, 24, 30
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def operands(dtype: torch.dtype, seed: int = 0, tokens: int = TOKENS) -> list[Tensor]:
    """Return an input, weight and bias that require gradients, and targets, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (tokens, WIDTH), (CLASSES, WIDTH), (CLASSES,)
    made = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    target = torch.randint(CLASSES, (tokens,), generator=generator)
    target[::7] = -100
    return [*made, target]


def exact(
    input: Tensor, weight: Tensor, target: Tensor, linear_bias=None, weight_of=None, **options
) -> Tensor:
    """Return the loss in float64. `weight_of` is the `weight` of cross_entropy."""
    bias = None if linear_bias is None else linear_bias.double()
    logits = F.linear(input.double(), weight.double(), bias)
    return F.cross_entropy(logits, target, None if weight_of is None else weight_of.double(), **options)


def gradients(loss: Tensor, *operands: Tensor) -> list[Tensor]:
    by = torch.linspace(1.0, 1.5, loss.numel(), dtype=loss.dtype).view(loss.shape)
    return [loss, *torch.autograd.grad(loss, operands, by)]


def assert_close(found: list[Tensor], wanted: list[Tensor], dtype: torch.dtype) -> None:
    few = {torch.float64: 1e-14, torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    for one, other in zip(found, wanted, strict=True):
        scale = float(other.detach().abs().max())
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=few * max(scale, 1e-30))


def prefer(product: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it multiply the logits in float32."""
    monkeypatch.setattr(cpu_rules, "onednn_multiplies_logits", lambda: product == "onednn")


@pytest.fixture(params=["blas", "onednn"])
def product(request, monkeypatch):
    """What multiplies the logits in float32, also those of small heads."""
    monkeypatch.setattr(softmax, "_ONEDNN_ROWS", 1)
    prefer(request.param, monkeypatch)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", cpu_backends())
def test_loss_and_gradients(dtype, backend, monkeypatch, product):
    """Compare all options with float64, in slices of all sizes. "auto" selects the backend."""
    if product == "onednn" and (dtype != torch.float32 or backend == "triton"):
        pytest.skip("the product does not depend on it")
    monkeypatch.setenv("FUSEDACC_BACKEND", backend)
    input, weight, bias, target = operands(dtype)
    class_weights = torch.rand(CLASSES) + 0.5
    for biased, weighs, reduction, ignored, smoothing, size in itertools.product(
        (False, True), (False, True), ("mean", "sum", "none"), (None, 3), (0.0, 0.2), (None, 7)
    ):
        thin = biased and weighs and smoothing and (reduction, ignored, size) == ("mean", 3, None)
        if backend == "triton" and not thin:
            continue  # Triton's interpreter is slow
        own = [input, weight, bias] if biased else [input, weight]
        given = {"reduction": reduction, "label_smoothing": smoothing}
        chosen = target if ignored is None else target.where(target >= 0, ignored)
        by_class = class_weights if weighs else None
        wanted = exact(*own[:2], chosen, *own[2:] or [None], by_class, ignore_index=ignored or -100, **given)
        loss = linear_cross_entropy(
            *own[:2],
            chosen,
            linear_bias=bias if biased else None,
            weight=by_class,
            ignore_index=ignored,
            slice_size=size,
            **given,
        )
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert_close(gradients(loss, *own), gradients(wanted, *own), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tokens_of_a_small_head(dtype):
    """The memory per token is larger than the weight in total."""
    input, weight, _, target = operands(dtype, tokens=2000)
    found = gradients(linear_cross_entropy(input, weight, target), input, weight)
    assert_close(found, gradients(exact(input, weight, target), input, weight), dtype)


def test_shapes_of_input_and_target():
    input, weight, _, target = operands(torch.float32)
    whole = linear_cross_entropy(input, weight, target, reduction="none")
    parts = linear_cross_entropy(input.view(5, 6, WIDTH), weight, target.view(5, 6), reduction="none")
    torch.testing.assert_close(parts, whole.view(5, 6), rtol=0, atol=0)
    torch.testing.assert_close(linear_cross_entropy(input[1], weight, target[1], reduction="none"), whole[1])
    bytes = target.clamp(min=0).to(torch.uint8)
    torch.testing.assert_close(
        linear_cross_entropy(input, weight, bytes), linear_cross_entropy(input, weight, bytes.long())
    )
    wide, labels = torch.randn(256, WIDTH), torch.tensor([3, 100, 255])
    found = linear_cross_entropy(input[:3], wide, labels.to(torch.uint8))
    wanted = linear_cross_entropy(input[:3], wide, labels)
    torch.testing.assert_close(found, wanted)
    with pytest.raises(IndexError, match="156"):
        linear_cross_entropy(input[:1], wide[:150], torch.tensor([156], dtype=torch.uint8))
    by_class = torch.rand(CLASSES, 2)[:, 0]
    apart = linear_cross_entropy(input[::2], weight, target[::2], weight=by_class, label_smoothing=0.1)
    wanted = exact(input[::2], weight, target[::2], None, by_class, label_smoothing=0.1)
    torch.testing.assert_close(apart.double(), wanted)


#: Targets and class weights whose mean is divided by 0, or whose weight of all classes is infinite.
UNUSUAL_WEIGHTS = {
    "no tokens": ([], None),
    "all ignored": ([3] * 6, None),
    "no tokens, weights": ([], [0.5] * CLASSES),
    "all ignored, weights": ([3] * 6, [0.5] * CLASSES),
    "weight 0": ([0, 1, 2] * 2, [0.0] * 4 + [0.5] * (CLASSES - 4)),
    "weight 0, some ignored": ([0, 1, 3] * 2, [0.0] * 4 + [0.5] * (CLASSES - 4)),
    "weight 0, the others negative": ([0, 1, 2] * 2, [0.0] * 4 + [-0.5] * (CLASSES - 4)),
    "weights all 0": ([0, 1, 3] * 2, [0.0] * CLASSES),
    "weights that cancel out": ([0, 1, 2], [1.0, 1.0, -2.0] + [0.5] * (CLASSES - 3)),
    "an infinite weight without a target": ([0, 1, 2] * 2, [0.5] * (CLASSES - 1) + [torch.inf]),
}


def product_of_infinity_is_nan(dtype: torch.dtype) -> bool:
    """Whether PyTorch's product has nan in place of infinity, as in bfloat16 on CPUs with AVX-512 only."""
    infinite = torch.full((CLASSES, 3), torch.inf, dtype=dtype)
    return bool((infinite @ torch.ones(3, 96, dtype=dtype)).isnan().any())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", [*cpu_backends(), "compiled"])
def test_unusual_class_weights(dtype, backend, monkeypatch):
    """The result is PyTorch's, nan and infinity included. With and without a wrapper."""
    slow = backend in ("triton", "compiled")
    few = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    run = linear_cross_entropy
    if backend == "compiled":
        torch.compiler.reset()
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    else:
        monkeypatch.setenv("FUSEDACC_BACKEND", backend)
    for case, reduction, smoothing, adds in itertools.product(
        UNUSUAL_WEIGHTS, ("mean", "sum", "none"), (0.0, 0.2, 1.0), (True, False)
    ):
        if "infinite" in case and smoothing:
            continue  # PyTorch's loss is infinite, and ours nan
        if slow and not (adds and reduction == "mean" and smoothing < 1 and "weights" not in case):
            continue
        weight, optimizer, input, _ = wrapped(dtype, width=96)
        if not adds:
            weight = weight.detach().clone().requires_grad_()
        targets, by_class = UNUSUAL_WEIGHTS[case]
        target, input = torch.tensor(targets, dtype=torch.int64), input[: len(targets)].clone()
        weights = None if by_class is None else torch.tensor(by_class)
        own = [input.requires_grad_(), weight, torch.randn(CLASSES).to(dtype).requires_grad_()]
        given = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": 3}
        wanted = gradients(exact(*own[:2], target, own[2], weights, **given), *own)
        loss = run(*own[:2], target, linear_bias=own[2], weight=weights, **given)
        loss.backward(torch.linspace(1.0, 1.5, loss.numel(), dtype=loss.dtype).view(loss.shape))
        for one, other in zip([loss, *(each.grad for each in own)], wanted, strict=True):
            if product_of_infinity_is_nan(dtype):
                other = other.masked_fill(other.isinf() & one.isnan(), torch.nan)
            scale = max(other.detach().nan_to_num(0, 0, 0).abs().flatten().tolist(), default=0.0)
            torch.testing.assert_close(
                one.double(),
                other.double(),
                rtol=0,
                atol=few * scale,
                equal_nan=True,
                msg=lambda said, where=(case, given, adds): f"{where}: {said}",
            )
        optimizer.close()


def test_nonfinite_logits():
    """With -inf in whole slices and a NaN in one, the result is PyTorch's."""
    input, weight, bias, target = operands(torch.float32)
    with torch.no_grad():
        bias[:32] = -torch.inf
        target[target < 32] = 50
    for value in (0.0, torch.nan):
        with torch.no_grad():
            bias[40] = value
        loss = linear_cross_entropy(input, weight, target, linear_bias=bias, slice_size=16)
        wanted = F.cross_entropy(F.linear(input, weight, bias), target)
        torch.testing.assert_close(
            gradients(loss, input, bias), gradients(wanted, input, bias), equal_nan=True, rtol=1e-5, atol=1e-7
        )


REFUSED = {
    "width": {"input": torch.zeros(TOKENS, WIDTH + 1)},
    "scalar": {"input": torch.zeros(())},
    "vector": {"linear_weight": torch.zeros(WIDTH)},
    "no class": {"linear_weight": torch.zeros(0, WIDTH)},
    "target": {"target": torch.zeros(TOKENS + 1, dtype=torch.int64)},
    "bias": {"linear_bias": torch.zeros(CLASSES + 1)},
    "weight": {"weight": torch.zeros(CLASSES, 1)},
    "reduction": {"reduction": "average"},
    "label_smoothing": {"label_smoothing": 1.5},
    "slice_size": {"slice_size": 0},
    "slice_size, a float": {"slice_size": 2.5},
    "ignore_index": {"target": torch.zeros(TOKENS, CLASSES), "ignore_index": 1},
    "classes as probabilities": {"target": torch.zeros(TOKENS, CLASSES, dtype=torch.int64)},
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_are_refused(case):
    input, weight, _, target = operands(torch.float32)
    given = {"input": input, "linear_weight": weight, "target": target} | REFUSED[case]
    with pytest.raises(ValueError, match=r"allowed|go with"):
        linear_cross_entropy(**given)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("which", range(3))
def test_dtypes_that_pytorch_does_not_mix(which, autocast):
    """Either the input, the weight or the bias is float64."""
    *own, target = operands(torch.float32)
    own[which] = own[which].double()
    with torch.autocast("cpu", enabled=autocast), pytest.raises(RuntimeError, match="same dtype"):
        linear_cross_entropy(*own[:2], target, linear_bias=own[2])


@pytest.mark.parametrize("wrong", [CLASSES, -1, -101])
def test_targets_out_of_range(wrong):
    input, weight, _, target = operands(torch.float32)
    target[4] = wrong
    with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
        linear_cross_entropy(input, weight, target)


def test_fallbacks_warn_once(recwarn):
    """PyTorch computes the loss for class probabilities and for weights with more dimensions."""
    cross_entropy._warn_once.cache_clear()
    input, weight, _, _ = operands(torch.float32)
    probable = torch.rand(TOKENS, CLASSES).softmax(1)
    for _ in range(2):
        loss = linear_cross_entropy(input, weight, probable)
        torch.testing.assert_close(loss, F.cross_entropy(F.linear(input, weight), probable))
        deep = weight.view(CLASSES // 4, 4, WIDTH)
        target = torch.randint(CLASSES // 4, (TOKENS, 4))
        loss = linear_cross_entropy(input, deep, target, reduction="none")
        logits = F.linear(input, weight).view(TOKENS, -1, 4)
        torch.testing.assert_close(loss, F.cross_entropy(logits, target, reduction="none"))
    assert len(recwarn) == 2


class Model(nn.Module):
    """A language model of one layer. `tied`: its head is its Embedding."""

    def __init__(self, tied: bool = False, fused: bool = True, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.fused, self.checkpoints = fused, checkpoints

    def loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        if self.fused:
            return linear_cross_entropy(hidden, self.head.weight, target)
        return F.cross_entropy(self.head(hidden).float(), target)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(self.embedding(tokens[:-1])))
        if self.checkpoints:
            return checkpoint(self.loss, hidden, tokens[1:], use_reentrant=False)
        return self.loss(hidden, tokens[1:])


TRAININGS = {
    "counted": {"steps": 3},
    "manual": {"steps": None},
    "tied": {"steps": 3, "tied": True},
    "checkpoints": {"steps": 3, "checkpoints": True},
    "weighted": {"steps": 3, "reduction": "weighted"},
    "bfloat16": {"steps": 3, "dtype": torch.bfloat16},
    "autocast": {"steps": 3, "autocast": True},
    "keep_casts": {"steps": 3, "autocast": True, "keep_casts": True},
    "scaler": {"steps": 3, "scaler": True},
    "stochastic": {"steps": 3, "accumulate_dtype": torch.bfloat16, "rounding": "stochastic"},
}


@pytest.mark.parametrize("case", TRAININGS)
def test_training(case):
    """Updates equal those of the model with logits.

    Sums are float32 sums of the gradients that its head would add.
    """
    options = dict(TRAININGS[case])
    steps, tied, checkpoints = (options.pop(name, None) for name in ("steps", "tied", "checkpoints"))
    dtype = options.pop("dtype", options.get("accumulate_dtype", torch.float32))
    autocast = options.pop("autocast", False)
    scaler = fusedacc.amp.GradScaler("cpu") if options.pop("scaler", False) else None
    narrow = autocast or dtype == torch.bfloat16
    ours = Model(bool(tied), True, bool(checkpoints)).to(dtype)
    twin = Model(bool(tied), False).double()
    inner, seed = torch.optim.SGD(ours.parameters(), 0.5), 0 if "rounding" in options else None
    optimizer = fusedacc.AccumulatingOptimizer(inner, steps, model=ours, seed=seed, **options)
    plain = torch.optim.SGD(twin.parameters(), 0.5)
    for update in range(2):
        lengths = [9 + 5 * index for index in range(3)]
        for index, length in enumerate(lengths):
            generator = torch.Generator().manual_seed(9 * update + index)
            tokens = torch.randint(CLASSES, (length,), generator=generator)
            weight = (length - 1) / sum(each - 1 for each in lengths) if "reduction" in options else 1 / 3
            (twin(tokens) * weight).backward()
            with (
                torch.autocast("cpu", enabled=autocast),
                optimizer.accumulate(weight=length - 1 if "reduction" in options else None),
            ):
                loss = ours(tokens) * (1 if steps else weight)
                (scaler.scale(loss) if scaler else loss).backward()
            if steps is not None:
                scaler.step(optimizer) if scaler else optimizer.step()
                scaler and scaler.update()
                optimizer.zero_grad()
        if steps is None:
            optimizer.step(), optimizer.zero_grad()
        plain.step(), plain.zero_grad()
    for one, other in zip(ours.parameters(), twin.parameters(), strict=True):
        few = 0.05 if narrow else 1e-5
        torch.testing.assert_close(one.double(), other, rtol=few, atol=few / 5)
    (row,) = [row.split() for row in optimizer.explain().splitlines() if "200x24" in row and "head" in row]
    path = "multi_tensor" if "rounding" in options else "head"
    assert row[2] == ("head+embedding" if tied else path)
    optimizer.close()
    assert head.head_of(ours.head.weight) is None


def wrapped(dtype: torch.dtype = torch.float32, classes: int = CLASSES, width: int = WIDTH):
    """Return a head's weight, its optimizer in a manual loop, and an input with targets."""
    torch.manual_seed(0)
    model = nn.Linear(width, classes, bias=False).to(dtype)
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), 0.1), model=model)
    return model.weight, optimizer, torch.randn(TOKENS, width).to(dtype), torch.randint(classes, (TOKENS,))


def test_autograd_grad_by_the_weight_adds_nothing():
    weight, _optimizer, input, target = wrapped()
    input.requires_grad_()
    loss = linear_cross_entropy(input, weight, target)
    found = torch.autograd.grad(loss, (input, weight))
    assert weight.grad is None
    assert_close(list(found), gradients(exact(input, weight, target), input, weight)[1:], torch.float32)


def test_create_graph_falls_back():
    """The gradient of a gradient penalty is that of PyTorch's functions."""
    weight, _optimizer, input, target = wrapped(torch.float64)
    twin = weight.detach().clone().requires_grad_()
    for own, function in ((weight, linear_cross_entropy), (twin, lambda *each: exact(*each))):
        given = input.clone().requires_grad_()
        loss = function(given, own, target)
        (gradient,) = torch.autograd.grad(loss, given, create_graph=True)
        (loss + gradient.pow(2).sum()).backward()
    torch.testing.assert_close(weight.grad, twin.grad)


def test_second_backward_and_frozen_weight():
    weight, _optimizer, input, target = wrapped()
    loss = linear_cross_entropy(input, weight, target)
    loss.backward(retain_graph=True), loss.backward()
    (wanted,) = gradients(exact(input, weight, target), weight)[1:]
    assert_close([weight.grad / 2], [wanted], torch.float32)
    before = weight.grad.clone()
    weight.requires_grad_(False)
    given = input.clone().requires_grad_()
    linear_cross_entropy(given, weight, target).backward()
    assert_close([given.grad], gradients(exact(given, weight, target), given)[1:], torch.float32)
    torch.testing.assert_close(weight.grad, before, rtol=0, atol=0)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="torch 2.13 has it")
@pytest.mark.parametrize("case", ["plain", "options", "out_features"])
def test_loss_modules(case):
    """In `model=`, loss modules allocate no logits unless PyTorch's chunks or K dimensions are requested."""
    given = {"bias": True, "label_smoothing": 0.1, "weight": torch.rand(CLASSES) + 0.5}
    if case == "options":
        given = {"options": nn.LinearCrossEntropyOptions()}
    shape = (TOKENS,)
    if case == "out_features":
        given, shape = {"out_features": (2,)}, (TOKENS, 2)
    loss = nn.LinearCrossEntropyLoss(WIDTH, CLASSES, **given)
    twin = copy.deepcopy(loss)
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(loss.parameters(), 0.1), model=loss)
    own = copy.deepcopy(loss), loss
    input, target = torch.randn(TOKENS, WIDTH), torch.randint(CLASSES, shape)
    for module in (*own, twin):
        assert ("forward" in module.__dict__) == (module is loss and case == "plain")
        module(input, target).backward()
        for one, other in zip(module.parameters(), loss.parameters(), strict=True):
            assert module is own[0] or one.grad is not None
            if module is twin:
                torch.testing.assert_close(one.grad, other.grad)
    assert ("head" in optimizer.explain()) == (case == "plain")
    optimizer.close()
    assert "forward" not in loss.__dict__


@pytest.mark.parametrize("mode", ["aot_eager", "inductor"])
def test_compiled(mode):
    """The model compiles to one graph without logits, and adds the weight's gradient to its sum."""
    torch.compiler.reset()
    weight, optimizer, input, target = wrapped(torch.float32, 8192, 32)
    bias = torch.randn(8192, requires_grad=True)
    input.requires_grad_()

    def loss() -> Tensor:
        return linear_cross_entropy(input, weight, target, linear_bias=bias, label_smoothing=0.1)

    run = torch.compile(loss, fullgraph=True, backend=mode)
    wanted = gradients(loss(), input, weight, bias)
    run().backward()
    for _ in range(2):  # two losses before their backwards
        pending = run(), run()
        pending[0].backward(), pending[1].backward()
    assert_close([weight.grad / 5, bias.grad / 5], wanted[2:], torch.float32)
    with optimizer.ignore():
        assert_close(gradients(run(), input, weight), wanted[:3], torch.float32)
    with pytest.raises(RuntimeError, match=r"asks for the gradient by"):
        torch.autograd.grad(run(), weight)
    before, alone = weight.grad.clone(), torch.autograd.grad(run(), input)
    assert_close(list(alone), wanted[1:2], torch.float32)
    torch.testing.assert_close(weight.grad, before, rtol=0, atol=0)
    assert memory.largest_allocation(lambda: run().backward()) < 4 * weight.numel()
    assert "head" in optimizer.explain()
    optimizer.close()
    weight.grad = None
    run().backward()
    assert_close([weight.grad], wanted[2:3], torch.float32)
    target[0] = 8192
    with pytest.raises(IndexError, match="Target 8192 is out of bounds"):
        run()


MEMORY = [
    (torch.float32, 64, 4096, 64, False),
    (torch.float32, 512, 8192, 64, False),
    (torch.bfloat16, 512, 8192, 64, False),
    (torch.float32, 512, 8192, 64, True),
    (torch.bfloat16, 256, 4096, 512, False),
    (torch.bfloat16, 128, 4096, 2048, False),
    (torch.float16, 64, 1024, 1024, False),
    (torch.float32, 64, 4096, 1024, True),
]


@pytest.mark.parametrize(("dtype", "tokens", "classes", "width", "autocast"), MEMORY)
@pytest.mark.parametrize("product", ["blas", "onednn"])
def test_temporary_memory(dtype, tokens, classes, width, autocast, product, monkeypatch):
    """Besides the input's gradient, at most a sixteenth of the logits or 1 MiB, and less than the weight."""
    prefer(product, monkeypatch)
    weight, _optimizer, _, _ = wrapped(dtype, classes, width)
    input, target = torch.randn(tokens, width).to(dtype), torch.randint(classes, (tokens,))
    input.requires_grad_()

    def run() -> None:
        with torch.autocast("cpu", enabled=autocast):
            loss = linear_cross_entropy(input, weight, target)
        loss.backward()

    run()
    input.grad = None
    # Autograd holds autocast's cast of the input, and its gradient before the cast.
    kept = input.numel() * (4 + 2 * 3 * autocast) if dtype == torch.float32 else 2 * input.numel()
    allowed = max(tokens * classes * 4 // 16, 2**20)
    copied = 2**16 if memory.has_amx() and dtype == torch.bfloat16 else 0
    assert memory.peak_of(run) <= min(allowed, weight.numel() * weight.itemsize) + kept + copied


def planned(model: Model, optimizer: torch.optim.Optimizer, tokens: Tensor, size: int, **options: bool):
    return plan(
        model, optimizer, tokens, global_batch_size=size, loss_fn=lambda model, batch: model(batch), **options
    )


def test_work_and_the_planned_peak(product):
    """Every operator has a rule and a formula, and fake tensors show the memory that a head needs."""
    model = Model()
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), 0.1), 2, model=model)
    tokens = torch.randint(CLASSES, (20,))
    with TrafficMeter() as meter, FlopCounterMode(display=False) as flops:
        model(tokens).backward()
    assert not meter.uncounted
    # Four products of the head and three of the layer, of all tokens but the last.
    assert flops.get_total_flops() == 2 * 19 * WIDTH * (4 * CLASSES + 3 * WIDTH)
    optimizer.discard()
    found = planned(model, optimizer, tokens, 64)
    assert found.measured_peak_bytes == pytest.approx(found.peak_bytes, rel=0.02)


@pytest.mark.parametrize("fused", [False, True])
def test_a_plan_names_the_logits(fused):
    model = Model(fused=fused)
    optimizer, tokens = torch.optim.SGD(model.parameters(), 0.1), torch.randint(CLASSES, (2001,))
    found = planned(model, optimizer, tokens, len(tokens), verify=False)
    logits = (found.micro_batch_size - 1) * CLASSES * 4
    assert found.logits_bytes == (0 if fused else 3 * logits)
    assert ("the head's logits take" in str(found)) == (not fused)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_tokens(dtype, monkeypatch, product):
    """If memory is too small for the sums of all tokens, the backward takes blocks of tokens."""
    weight, _optimizer, input, target = wrapped(dtype)
    given = input.clone().requires_grad_()
    monkeypatch.setattr(softmax, "block_sizes", lambda head, forward, in_place: softmax.BlockSizes(16, 48))
    linear_cross_entropy(given, weight, target).backward()
    wanted = gradients(exact(given, weight, target), given, weight)[1:]
    assert_close([given.grad, weight.grad], wanted, dtype)


def compare_passes(backend: str = "cpu") -> None:
    """Compare the statistics and the gradient of one slice with PyTorch operators, for any block size."""
    for dtype, classes in itertools.product(DTYPES, (1, 33, 512, 1200)):
        if softmax.select(torch.device("cpu"), dtype, backend)[0] != backend:
            continue
        compute = softmax.compute_dtype(dtype)
        logits, weights = (torch.randn(5, classes) * 5).to(dtype), torch.rand(classes, dtype=compute)
        target = torch.tensor([7, 8, -100, 7 + classes, 6 + classes])
        factors = torch.rand(4, 5, dtype=compute)
        factors[0] += logits.to(compute).logsumexp(1)
        few = {torch.bfloat16: 0.01, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
        wide = 1e-12 if compute == torch.float64 else 1e-5
        for by_class in (None, weights):
            found = [torch.zeros(4, 5, dtype=compute) for _ in range(2)]
            made = logits.clone(), logits.clone()
            for name, into, change in zip((backend, "eager"), found, made, strict=True):
                into[0] = -torch.inf
                join, turn = softmax.passes_of(name)
                join(into, logits, target, 7, by_class), turn(change, factors, target, 7, by_class)
            torch.testing.assert_close(*found, rtol=wide, atol=10 * wide)
            torch.testing.assert_close(*made, rtol=few, atol=few)


@pytest.mark.parametrize("backend", [name for name in cpu_backends() if name not in ("cpu", "eager")])
def test_the_passes_of_other_backends(backend):
    compare_passes(backend)


def test_the_native_passes_equal_pytorch_operators():
    """Test every instruction set of this CPU."""
    compare_passes()
    best = json.loads(torch.ops.fusedacc.build_info())["cpu_capability"]
    names = ("baseline", "avx2", "avx512", "avx512_bf16")
    for name in names[: names.index(best)]:
        program = f"import sys; sys.path[:0] = {sys.path!r}; import test_head; test_head.compare_passes()"
        result = forked.run(program, FUSEDACC_CPU_CAPABILITY=name)
        assert result.returncode == 0, result.stderr


def test_the_operators_check_their_arguments():
    own, operators = torch.zeros(3, 5), torch.ops.fusedacc
    good = [own, torch.zeros(5, 8), torch.zeros(5, dtype=torch.int64), 0, torch.zeros(8)]
    operators.softmax_statistics_(*good)
    for index, wrong in (
        (0, torch.zeros(2, 5)),
        (0, own.double()),
        (0, torch.zeros(5, 3).t()),
        (1, torch.zeros(5, 8, dtype=torch.int32)),
        (1, torch.zeros(8, 5).t()),
        (2, torch.zeros(4, dtype=torch.int64)),
        (2, torch.zeros(5, dtype=torch.int32)),
        (4, torch.zeros(7)),
        (4, torch.zeros(8).double()),
    ):
        with pytest.raises(RuntimeError, match="fusedacc: "):
            operators.softmax_statistics_(*good[:index], wrong, *good[index + 1 :])
    with pytest.raises(RuntimeError, match="factors"):
        operators.softmax_gradient_(good[1], own, *good[2:])
