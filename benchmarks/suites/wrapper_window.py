"""A whole window of 8 micro-batches with 300 small parameters: what the wrapper costs per parameter.

The graph is as cheap as one can be: one node, whose backward makes all gradients in one call, so that what is
timed is how gradients are taken and added. A stack of small Linear layers beside it is the ordinary case.

    python -m benchmarks.suites.wrapper_window [--quick | --full] [--backend cpu]
    python -m benchmarks.suites.wrapper_window --limits 1,16,32 [--model gpt2]

With --limits: from how many MiB on a gradient is best added at once, on a GPU: bfloat16 parameters of a
model's list, each way with a limit of `fusedacc.autograd.python_hooks`. Rows of benchmark "at_once".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest import mock

import torch
from torch import Tensor, nn

import fusedacc
from fusedacc.autograd import python_hooks
from fusedacc.commands.measuring.records import Case, Goal, Results, Row, Variant, cannot_run, first_line
from fusedacc.commands.measuring.timing import cpu_timer, timer_for
from fusedacc.kernels.registry import NAMES

from .. import harness
from ..contestants import model_shapes
from ..contestants.loops import HookSums, sum_in, window
from ..harness import chosen, counted, measure

STEPS = 8
F32, BF16 = torch.float32, torch.bfloat16


class OneNode(torch.autograd.Function):
    """Returns a scalar; its backward hands every parameter a fresh gradient, all made by one foreach call."""

    @staticmethod
    def forward(ctx, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), dtype=torch.float32, device=gradients[0].device)

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        on_cpu = grad_output.device.type == "cpu"  # elsewhere the host must not wait for the number
        factor = grad_output.item() if on_cpu else grad_output.to(ctx.gradients[0].dtype)
        return None, *torch._foreach_mul(ctx.gradients, factor)


class Bare(nn.Module):
    """Parameters of these shapes behind one node."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self) -> Tensor:
        if not hasattr(self, "gradients"):
            self.gradients = [torch.randn_like(weight) for weight in self.weights]
            self.listed = list(self.weights)
        return OneNode.apply(self.gradients, *self.listed)


class Layers(nn.Module):
    """As many parameters in half as many Linear layers of width 16, on a batch of 8."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(len(shapes) // 2)))

    def forward(self) -> Tensor:
        if not hasattr(self, "inputs"):
            weight = self.layers[0].weight
            self.inputs = torch.randn(8, 16, dtype=weight.dtype, device=weight.device)
        return self.layers(self.inputs).float().square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-6, foreach=True)


def stock(model: nn.Module) -> Callable[[], None]:
    """Plain torch; sums have the parameters' dtype."""
    return window(sgd(model), lambda index: model(), STEPS)


def stock_grad_dtype(model: nn.Module) -> Callable[[], None]:
    """bfloat16 parameters, float32 sums kept by autograd, cast at the update."""
    parameters, optimizer = list(model.parameters()), sgd(model)
    optimizer.register_step_pre_hook(lambda *_: sum_in(parameters, BF16))
    run = window(optimizer, lambda index: model(), STEPS)

    def window_in_float32() -> None:
        sum_in(parameters, F32)
        run()

    return window_in_float32


def stock_mixed_add(model: nn.Module) -> Callable[[], None]:
    """bfloat16 parameters, float32 sums in a buffer that a hook adds each gradient to, cast at the update."""
    parameters, optimizer = list(model.parameters()), sgd(model)
    hook_sums = HookSums(parameters, [torch.zeros_like(parameter, dtype=F32) for parameter in parameters])

    def cast(*_: object) -> None:
        hook_sums.finish()
        for parameter, total in zip(parameters, hook_sums.sums, strict=True):
            parameter.grad = total.to(BF16)

    optimizer.register_step_pre_hook(cast)
    return window(optimizer, lambda index: model(), STEPS)


def wrapped(model: nn.Module, backend: str) -> Callable[[], None]:
    optimizer = fusedacc.AccumulatingOptimizer(sgd(model), STEPS, backend=backend)
    return window(optimizer, lambda index: model(), STEPS)


def figures(results: Results, effort: str, backend: str = "auto") -> None:
    """The goals: at most 1.05 times the stock loop's time for float32, no slower for bfloat16."""
    count, rounds = {"quick": (10, 3), "short": (300, 41), "full": (300, 201)}[effort]
    for kind, graph in ((Bare, "one cheap node"), (Layers, "Linear layers")):
        for dtype, dtypes in ((F32, "float32"), (BF16, "bfloat16 into float32")):
            shapes = f"{count} parameters of at most 16 x 16"
            case = Case("wrapper_window", f"window of {STEPS}, {graph}", "window", shapes, dtypes)

            def model(kind: type[nn.Module] = kind, dtype: torch.dtype = dtype) -> nn.Module:
                torch.manual_seed(0)
                return kind([(16, 16)] * count).to(results.device, dtype)

            results.add(one_case(case, model, backend, rounds))


def one_case(case: Case, model: Callable[[], nn.Module], backend: str, rounds: int) -> list[Row]:
    """The rows of one graph and dtype; `model` makes a new one."""
    plain = case.dtypes == "float32"
    if plain:
        variants = [Variant("stock loop", stock(model()))]
    else:
        variants = [
            Variant("stock loop, grad_dtype=float32", stock_grad_dtype(model())),
            Variant("stock loop, mixed add_ in a hook", stock_mixed_add(model())),
        ]
    at_least = 1 / 1.05 if plain else 1.0
    goals = tuple(Goal(variant.name, at_least) for variant in variants)
    failed = []
    try:
        ours = Variant("fusedacc", wrapped(model(), backend), goals=goals)
        ours.run()
        variants.append(ours)
    except Exception as error:
        failed.append(cannot_run(case, "fusedacc", first_line(error)))
    return measure(case, variants, rounds, timer=to_the_end) + failed


def to_the_end(window: Callable[[], object], calls: int) -> float:
    """Seconds until a GPU is done too: with tensors as small as these it waits for the host."""

    def run() -> None:
        window()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    return cpu_timer(run, calls)


def limits(results: Results, effort: str, mebibytes: Sequence[int], model: str = "gpt2") -> None:
    parameters = model_shapes.load(model)
    if effort == "quick":
        parameters = model_shapes.tiny(parameters)
    case = Case("at_once", model, "window", model_shapes.describe(parameters, parameters), "bfloat16")
    device, variants = results.device, []
    for size in mebibytes:
        bare = Bare(model_shapes.shapes(parameters)).to(device, BF16)
        with mock.patch.dict(python_hooks.LARGE_BYTES, {device.type: size * 2**20}):  # hooks read it once
            run = wrapped(bare, "auto")
        run()
        meter = counted(run)
        variants.append(Variant(f"from {size} MiB", run, meter.total_bytes, (), meter.calls))
    rounds = {"quick": 3, "short": 11, "full": 31}[effort]
    results.add(measure(case, variants, rounds, timer=timer_for(device)))


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--limits", help="comma-separated MiB")
    parser.add_argument("--model", default="gpt2", choices=model_shapes.NAMES, help="of --limits")
    parser.add_argument("--backend", default="auto", help=f"auto or one of {', '.join(NAMES)} (%(default)s)")
    options = parser.parse_args()
    if options.limits:
        mebibytes = [int(size) for size in options.limits.split(",")]
        harness.run(limits, options, mebibytes=mebibytes, model=options.model)
        return
    (backend,) = chosen(options.backend, ("auto", *NAMES), "backend")
    harness.run(figures, options, backend=backend)


if __name__ == "__main__":
    main()
