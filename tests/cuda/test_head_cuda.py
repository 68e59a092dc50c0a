"""`linear_cross_entropy` on a GPU: its passes have the bits of the CPU, and its gradients match float64."""

import functools
import itertools

import pytest
import torch
from gpu import captured, needs, nothing_waits
from torch import Tensor, nn
from torch.nn import functional as F

import fusedacc
from fusedacc.kernels import selftest_checks, softmax
from fusedacc.nn.functional import linear_cross_entropy

pytestmark = pytest.mark.cuda
TOKENS, CLASSES, WIDTH = 37, 403, 24
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: What runs the passes on a GPU, with its dtypes. Triton's kernels have no float64.
PASSES = [
    *(("triton", dtype) for dtype in DTYPES if dtype != torch.float64),
    *(("eager", dtype) for dtype in DTYPES),
]


@pytest.mark.parametrize(("runs", "dtype"), PASSES, ids=str)
def test_passes_equal_the_cpu(runs, dtype, generator):
    """The gradients of Triton's kernels have the bits of the CPU's."""
    backend = needs(runs)
    compute = softmax.compute_dtype(dtype)
    assert softmax.select(torch.device("cuda"), dtype, backend)[0] == backend
    ours, cpu = softmax.passes_of(backend), softmax.passes_of("cpu")
    for classes, weighs, smooths in itertools.product((1, 40, 512, 1203, 9000), (False, True), (False, True)):
        logits = (torch.randn(5, classes, generator=generator) * 8).to(dtype)
        logits[4] = -torch.inf
        weights = torch.rand(classes, dtype=compute, generator=generator) if weighs else None
        target = torch.tensor([7, 6 + classes, -100, 7 + classes, 8])
        numbers = torch.rand(4, 5, dtype=compute, generator=generator)
        numbers[0] += logits.to(compute).logsumexp(1).nan_to_num(neginf=0)
        there = [None if each is None else each.cuda() for each in (logits, numbers, target, weights)]
        found = there[1][: 4 if smooths else 3].clone(), there[0].clone()
        wanted = numbers[: 4 if smooths else 3].clone(), logits.clone()
        with nothing_waits():
            ours[0](found[0], there[0], there[2], 7, there[3])
            ours[1](found[1], there[1], there[2], 7, there[3])
        cpu[0](wanted[0], logits, target, 7, weights), cpu[1](wanted[1], numbers, target, 7, weights)
        exact = {"rtol": 0, "atol": 0}
        torch.testing.assert_close(found[0].cpu(), wanted[0], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(found[1].cpu(), wanted[1], **({} if backend == "eager" else exact))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("asked", ["auto", "cuda", "triton"])
def test_triton_runs_the_passes_also_for_cuda(asked, dtype):
    """Its kernels have no float64."""
    name, reason = softmax.select(torch.device("cuda"), dtype, asked)
    assert name == ("eager" if dtype is torch.float64 else "triton")
    lacks_kernel = asked == "cuda" or (asked == "triton" and dtype is torch.float64)
    assert ("which has no kernel for slices of logits" in reason) == lacks_kernel


def test_the_operators_take_tensors_on_a_cpu_only():
    logits, numbers = torch.zeros(2, 3, device="cuda"), torch.zeros(4, 2, device="cuda")
    for operator in (torch.ops.fusedacc.softmax_statistics_, torch.ops.fusedacc.softmax_gradient_):
        gives_logits_first = operator is torch.ops.fusedacc.softmax_gradient_
        given = (logits, numbers) if gives_logits_first else (numbers, logits)
        with pytest.raises(RuntimeError, match="logits is on cuda:0; it must be on cpu"):
            operator(*given, torch.zeros(2, dtype=torch.int64, device="cuda"), 0)


@pytest.mark.parametrize("runs", ["triton", "eager"])
def test_the_self_test_finds_a_wrong_pass(runs):
    join, turn = softmax.passes_of(needs(runs))
    check = functools.partial(selftest_checks.softmax, device=torch.device("cuda"), operand=torch.bfloat16)
    assert check(join, turn) is None
    assert check(lambda *operands: None, turn) is not None
    assert check(join, lambda logits, factors, *others: turn(logits, factors * 1.1, *others)) is not None


def case(dtype: torch.dtype, generator, backend: str) -> tuple[Tensor, Tensor, Tensor, object]:
    """Return an input, a wrapped weight, targets (some of them ignored), and the optimizer."""
    model = nn.Linear(WIDTH, CLASSES, bias=False).cuda().to(dtype)
    optimizer = fusedacc.AccumulatingOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model=model, backend=backend
    )
    input = torch.randn(TOKENS, WIDTH, generator=generator).to("cuda", dtype).requires_grad_()
    target = torch.randint(CLASSES, (TOKENS,), generator=generator)
    target[::7] = -100
    return input, model.weight, target.cuda(), optimizer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_added_and_nothing_waits(dtype, backend, generator):
    input, weight, target, optimizer = case(dtype, generator, backend)
    linear_cross_entropy(input, weight, target).backward()
    input.grad = None
    with nothing_waits():
        loss = linear_cross_entropy(input, weight, target, label_smoothing=0.1, slice_size=96)
        loss.backward()
    operands = [each.detach().cpu().double().requires_grad_() for each in (input, weight)]
    logits, labels = F.linear(*operands), target.cpu()
    wanted = F.cross_entropy(logits, labels, label_smoothing=0.1)
    (wanted + F.cross_entropy(logits, labels)).backward()
    few = 2e-2 if dtype.itemsize == 2 else 1e-5
    torch.testing.assert_close(loss.detach().cpu().double(), wanted.detach(), rtol=few, atol=few)
    of_weight = weight.grad.cpu().double()
    most = float(operands[1].grad.abs().max())
    torch.testing.assert_close(of_weight, operands[1].grad, rtol=0, atol=few * most)
    assert "head" in optimizer.explain()


def test_captured_in_a_graph(backend, generator):
    input, weight, target, optimizer = case(torch.float32, generator, backend)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = linear_cross_entropy(input, weight, target)
        return torch.autograd.grad(loss, input)[0]

    graph, found = captured(step)
    for _ in range(2):
        with torch.no_grad():
            input.copy_(torch.randn(TOKENS, WIDTH, generator=generator))
        graph.replay()
        torch.cuda.synchronize()
        plain = input.detach().cpu().requires_grad_()
        F.cross_entropy(F.linear(plain, weight.detach().cpu()), target.cpu()).backward()
        torch.testing.assert_close(found.cpu(), plain.grad, rtol=1e-4, atol=1e-6)
