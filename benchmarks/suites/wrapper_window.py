"""A window of 8 micro-batches with 300 small parameters: what the wrapper costs per parameter.

One graph is as cheap as possible: one node whose backward makes all gradients in one call, so that taking and
adding gradients is most of the time. The other is a stack of small Linear layers.

--limits: after how many MiB of gradients is a launch best, on a GPU? Each way has another
`fusedacc.accumulators.engine.LAUNCH_BYTES`; parameters are those of GPT-2 in bfloat16. Rows of benchmark
"bucket".
"""

import dataclasses
from collections.abc import Sequence
from unittest import mock

import torch
from torch import Tensor, nn

from fusedacc.accumulators import engine
from fusedacc.commands.timing import Run, cpu_timer, synchronize, timer_for

from .. import harness
from ..contestants import loops, model_shapes
from ..harness import BF16, F32, measure
from ..records import Case, Goal, Results, Variant, counted_variant

STEPS = 8
#: By the column `dtypes`.
DTYPES = {"float32": F32, "bfloat16 into float32": BF16}
#: Stock's loops by dtype; and the least speed of fusedacc relative to each.
_NARROW = {"grad_dtype=float32": loops.GradDtype, "mixed add_ in a hook": loops.MixedAdd}
COMPETITORS = {F32: {"stock loop": loops.Loop}, BF16: {f"stock loop, {how}": _NARROW[how] for how in _NARROW}}
AT_LEAST = {F32: 1 / 1.05, BF16: 1.0}


class Bare(nn.Module):
    """Parameters of these shapes behind one node, whose backward makes all gradients by one foreach call."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self) -> Tensor:
        if not hasattr(self, "gradients"):
            self.gradients = [torch.randn_like(weight) for weight in self.weights]
            self.listed = list(self.weights)
        return loops.Handed.apply(self.scaled, *self.listed)

    def scaled(self, scale: Tensor) -> Sequence[Tensor]:
        # On a GPU the host must not wait for the number.
        factor = scale.item() if scale.device.type == "cpu" else scale.to(self.gradients[0].dtype)
        return torch._foreach_mul(self.gradients, factor)


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


@dataclasses.dataclass
class Parameters(loops.Task):
    """A graph of these shapes, updated by SGD."""

    kind: type[nn.Module]
    shapes: Sequence[tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device
    steps: int = STEPS

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.kind(self.shapes).to(self.device, self.dtype)

    def loss(self, model: nn.Module) -> Tensor:
        return model()

    def optimizer(self, parameters: list[nn.Parameter], fused: bool | None) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-6, foreach=True)

    def window(self, kind: type[loops.Loop]) -> Run:
        loop = kind(self)
        return lambda: loop.window([()] * STEPS)


def figures(results: Results, effort: str) -> None:
    count, rounds = {"quick": (10, 3), "short": (300, 41), "full": (300, 201)}[effort]
    shapes = f"{count} parameters of at most 16 x 16"

    def to_the_end(run: Run, calls: int) -> float:
        """Include the GPU's time. With tensors as small as these it waits for the host."""
        return cpu_timer(lambda: (run(), synchronize(results.device)), calls)

    for kind, graph in ((Bare, "one cheap node"), (Layers, "Linear layers")):
        for dtypes, dtype in DTYPES.items():
            case = Case("wrapper_window", f"window of {STEPS}, {graph}", "window", shapes, dtypes)
            task = Parameters(kind, [(16, 16)] * count, dtype, results.device)
            variants = [Variant(name, task.window(loop)) for name, loop in COMPETITORS[dtype].items()]
            goals = tuple(Goal(variant.name, AT_LEAST[dtype]) for variant in variants)

            def ours(task: Parameters = task) -> Run:
                run = task.window(loops.Wrapped)
                run()
                return run

            run = results.attempt(case, ["fusedacc"], ours)
            variants += [Variant("fusedacc", run, goals=goals)] if run else []
            results.add(measure(case, variants, rounds, timer=to_the_end))


def limits(results: Results, effort: str, mebibytes: Sequence[int]) -> None:
    parameters = model_shapes.load("gpt2", effort == "quick")
    case = Case("bucket", "gpt2", "window", model_shapes.describe(parameters, parameters), "bfloat16")
    device = results.device
    variants = []
    task = Parameters(Bare, model_shapes.shapes(parameters), BF16, device)
    for size in mebibytes:
        with mock.patch.object(engine, "LAUNCH_BYTES", size * 2**20):  # an engine reads it once
            run = task.window(loops.Wrapped)
        run()
        variants.append(counted_variant(f"{size} MiB", run))
    rounds = {"quick": 3, "short": 11, "full": 31}[effort]
    results.add(measure(case, variants, rounds, timer=timer_for(device)))


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--limits", help="comma-separated MiB")
    options = parser.parse_args()
    if options.limits:
        harness.run(limits, options, mebibytes=[int(size) for size in options.limits.split(",")])
    else:
        harness.run(figures, options)


if __name__ == "__main__":
    main()
