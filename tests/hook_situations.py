"""Situations in which gradients arrive, to compare the native engine, no engine and plain PyTorch.

A situation is a function of a `Run`. Through the `Run` it makes its optimizer, runs micro-batches and records
the values to compare.
"""

import contextlib
import copy
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from loops import LOW, failing
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedacc
from fusedacc.accumulators.reduction import WEIGHING
from fusedacc.traffic import TrafficMeter


@dataclass(frozen=True)
class Loop:
    """A loop with windows of four micro-batches."""

    dtype: torch.dtype
    counted: bool
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def weighs(self) -> bool:
        return self.options.get("reduction") in WEIGHING


STOCHASTIC = {"accumulate_dtype": LOW, "rounding": "stochastic", "seed": 5}
LOOPS = {
    "float32": Loop(torch.float32, True),
    "float32-sum": Loop(torch.float32, True, {"reduction": "sum"}),
    "bfloat16": Loop(LOW, True),
    "bfloat16-weighted": Loop(LOW, True, {"reduction": "weighted", "max_grad_norm": 0.5}),
    "float32-normalized": Loop(torch.float32, True, {"reduction": "normalized"}),
    "float32-clipped": Loop(torch.float32, True, {"max_grad_norm": 0.5, "skip_nonfinite": True}),
    "masters": Loop(LOW, True, {"master_weights": True, "max_grad_norm": 0.5}),
    "stochastic": Loop(LOW, True, {"max_grad_norm": 0.5, **STOCHASTIC}),
    "stochastic-weighted": Loop(torch.float32, True, {"reduction": "weighted", **STOCHASTIC}),
    "manual-float64": Loop(torch.float64, False),
    "manual-float32": Loop(torch.float32, False),
    "manual-bfloat16": Loop(LOW, False),
    "manual-mean": Loop(torch.float32, False, {"reduction": "mean"}),
    "manual-weighted": Loop(torch.float32, False, {"reduction": "weighted", "max_grad_norm": 0.5}),
    "manual-stochastic": Loop(LOW, False, STOCHASTIC),
    "manual-stochastic-mean": Loop(torch.float32, False, {"reduction": "mean", **STOCHASTIC}),
}


class Run:
    """One run of a situation.

    Attributes:
        stock: whether to run plain PyTorch, without a wrapper.
        seen: the values to compare.
    """

    def __init__(self, loop: Loop, stock: bool = False) -> None:
        self.loop, self.stock = loop, stock
        self.seen: list[Any] = []
        self.opt: Any = None
        self.params: list[nn.Parameter] = []
        self._micro_batches = 0

    def wrap(self, params: nn.Module | Iterable[nn.Parameter]) -> Any:
        """Make the optimizer. It uses momentum, so that a lost update affects many later updates."""
        module = isinstance(params, nn.Module)
        self.params = list(params.parameters() if module else params)  # type: ignore[union-attr]
        inner = torch.optim.SGD(self.params, lr=0.125, momentum=0.5)
        steps = 4 if self.loop.counted else None
        self.opt = inner
        if not self.stock:
            self.opt = fusedacc.AccumulatingOptimizer(inner, steps, **self.loop.options)
        return self.opt

    def see(self, *values: Any) -> None:
        """Record copies of values."""
        for value in values:
            self.seen.append(value.detach().clone() if isinstance(value, Tensor) else copy.copy(value))

    def look(self) -> None:
        """Record gradients, parameters and the wrapper's state."""
        self.see(*(p.grad for p in self.params), *(p.data for p in self.params))
        if not self.stock:
            opt = self.opt
            self.see(opt.micro_step, opt.num_updates, opt.num_skipped, opt.grad_norm)

    def backward(self, *losses: Tensor, **options: Any) -> None:
        """Run the backwards of one micro-batch."""
        with self.micro_batch():
            for loss in losses:
                loss.backward(**options)

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Return a context for the backwards of one micro-batch. It ends the micro-batch as the loop does."""
        with self.context():
            yield
        self.look()
        if self.loop.counted or self._micro_batches % 4 == 0:
            self.opt.step()
            self.look()
            self.opt.zero_grad()

    def context(self) -> contextlib.AbstractContextManager[None]:
        """Return `accumulate()` with the next weight if the loop uses it, else an empty context."""
        self._micro_batches += 1
        weight = float(1 + self._micro_batches % 2) if self.loop.weighs else None
        plain = self.loop.counted or self.stock or not self.loop.options
        return contextlib.nullcontext() if plain and weight is None else self.opt.accumulate(weight=weight)

    def input(self, *shape: int) -> Tensor:
        seed = self._micro_batches
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.loop.dtype)

    def network(self, *sizes: int) -> nn.Sequential:
        torch.manual_seed(1)
        sizes = sizes or (6, 8, 5, 3)
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
        return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh()))).to(self.loop.dtype)

    def wrapped(self, *sizes: int) -> nn.Sequential:
        """Make a network and its optimizer."""
        model = self.network(*sizes)
        self.wrap(model)
        return model

    def parameters(self, *shapes: tuple[int, ...]) -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(2)
        return [nn.Parameter(torch.randn(shape, generator=generator).to(self.loop.dtype)) for shape in shapes]

    def train(self, loss: Callable[[], Tensor], micro_batches: int = 6) -> None:
        for _ in range(micro_batches):
            self.backward(loss())

    def train_on(self, model: nn.Module, micro_batches: int = 6) -> None:
        self.train(lambda: loss_of(self, model), micro_batches)


def loss_of(run: Run, model: nn.Module) -> Tensor:
    return model(run.input(4, 6)).square().sum()


SITUATIONS: dict[str, Callable[[Run], None]] = {}
#: The loops in which each situation makes sense.
WHERE: dict[str, Callable[[Loop], bool]] = {}
#: The situations in which plain PyTorch, run in the same way, gives the same gradients.
AS_STOCK: set[str] = set()


def situation(
    as_stock: bool = True, where: Callable[[Loop], bool] = lambda loop: True, name: str = ""
) -> Callable:
    """Register a situation for the loops for which `where` is true, by `name` or the function's name."""

    def register(function: Callable[[Run], None]) -> Callable[[Run], None]:
        key = name or function.__name__
        SITUATIONS[key], WHERE[key] = function, where
        AS_STOCK.update([key] if as_stock else [])
        return function

    return register


# Plain training


@situation()
def linear_layers(run: Run) -> None:
    run.train_on(run.wrapped(), 9)


@situation()
def shapes_of_all_kinds(run: Run) -> None:
    """Use 0-dim, empty, transposed and one-element parameters, and expanded and permuted gradients."""
    a, b, c, d, e = run.parameters((), (0, 3), (5, 4), (1,), (3, 4, 2))
    c.data = c.data.t()
    e.data = e.data.permute(2, 0, 1)
    run.wrap([a, b, c, d, e])

    def loss() -> Tensor:
        x = run.input(4, 5)
        expanded = a + d.sum() + b.sum() + e.sum()
        return expanded * (c * x).sum() + (c.t() @ x).sum() + (e.permute(1, 2, 0) * 2).square().sum()

    run.train(loss)


@situation()
def several_buckets(run: Run) -> None:
    """Use a bucket of 4 MB and gradients of 0.3 MB."""
    params = run.parameters(*[(280, 280)] * 5, (700, 700))
    run.wrap(params)
    run.train(lambda: sum((p * p.detach().sin()).sum() for p in params), 4)


# Checkpointing


@situation()
def reentrant_checkpoint(run: Run) -> None:
    model = run.wrapped(6, 6, 6, 6)

    def loss() -> Tensor:
        x = run.input(4, 6).requires_grad_()
        hidden = checkpoint(model[:4], model[0](x), use_reentrant=True)
        return model[2:](hidden).square().sum()

    run.train(loss)


# Unusual gradients


class Returns(torch.autograd.Function):
    """Returns a sum of parameters. `make` computes their gradients from a new tensor and that of the sum."""

    @staticmethod
    def forward(ctx: Any, make: Callable[..., Any], *params: Tensor) -> Tensor:
        ctx.make, ctx.params = make, params
        return sum(p.sum() for p in params)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, *ctx.make(torch.full_like(ctx.params[0], 3.0) * gradient, gradient, *ctx.params)


def returning(make: Callable[..., Any]) -> Callable[[Run], None]:
    """Return a situation in which a custom backward returns the gradients of two of four parameters."""

    def training(run: Run) -> None:
        first, second, plain, last = params = run.parameters((3, 4), (3, 4), (3, 4), (2,))
        run.wrap(params)
        run.train(lambda: Returns.apply(make, first, second) + (plain * run.input(3, 4)).sum() + last.sum())

    return training


class Tagged(Tensor):
    pass


RETURNED = {
    "the_same_tensor_twice": lambda new, gradient, a, b: (new, new),
    "two_views_of_one_tensor": lambda new, gradient, a, b: tuple(torch.stack([new, new])),
    "one_memory_for_both": lambda new, gradient, a, b: (new.view(4, 3).view(3, 4), new.detach()),
    "views_of_tensors_that_share_memory": lambda new, gradient, a, b: tuple(
        torch.empty(0, dtype=a.dtype).set_(new).view(4, 3).view(3, 4) for _ in range(2)
    ),
    "strides_of_all_kinds": lambda new, gradient, a, b: (
        gradient.expand(3, 4),
        (torch.ones(4, 6, dtype=a.dtype) * gradient)[:, ::2].t(),
    ),
    "own_parameter": lambda new, gradient, a, b: (b.detach(), a),
    "with_a_graph": torch.enable_grad()(lambda new, *_: (new.requires_grad_() * 3, new.exp())),
    "lazily_negated": lambda new, gradient, a, b: (torch._neg_view(new), torch._neg_view(b.detach().clone())),
    "none_for_one": lambda new, gradient, a, b: (None, new),
    "a_subclass": lambda new, gradient, a, b: (new.as_subclass(Tagged), torch.ones_like(b)),
    "a_sparse_gradient": lambda new, gradient, a, b: (new.to_sparse(), torch.ones_like(b)),
}
#: Plain PyTorch adds to shared memory twice, and p.grad may become the parameter itself.
UNLIKE_STOCK = {"one_memory_for_both", "views_of_tensors_that_share_memory", "own_parameter"}
UNLIKE_STOCK |= {"a_subclass", "a_sparse_gradient"}
for name, make in RETURNED.items():
    situation(as_stock=name not in UNLIKE_STOCK, name=name)(returning(make))


@situation(as_stock=False)
def sparse_and_dense_in_turns(run: Run) -> None:
    table, other = params = run.parameters((7, 3), (3,))
    run.wrap(params)
    rows = torch.tensor([1, 5, 1])
    for number in range(8):
        looked_up = nn.functional.embedding(rows, table, sparse=number % 3 == 1)
        run.backward((looked_up * other).sum() + (table.square().sum() if number % 3 == 2 else 0.0))


# Hooks of the user


@situation()
def tensor_hooks(run: Run) -> None:
    model = run.network()
    handle = model[0].weight.register_hook(lambda gradient: gradient * 2)
    run.wrap(model)
    run.train_on(model, 2)
    model[2].weight.register_hook(lambda gradient: run.see(gradient))
    handle.remove()
    run.train_on(model, 4)


@situation(as_stock=False)
def post_accumulate_hooks_come_and_go(run: Run) -> None:
    model = run.wrapped()
    run.train_on(model, 1)
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda p: run.see(p.grad))
    run.train_on(model, 3)
    handle.remove()
    run.train_on(model, 5)


def node_of(param: nn.Parameter) -> Any:
    return torch.autograd.graph.get_gradient_edge(param).node


@situation()
def a_hook_on_the_node_before_ours(run: Run) -> None:
    model = run.network()
    node = node_of(model[0].weight)
    node.register_prehook(lambda gradients: (gradients[0] * 2,))
    run.wrap(model)
    run.train_on(model)


@situation(as_stock=False)
def hooks_on_the_node_after_ours(run: Run) -> None:
    model = run.wrapped()
    node = node_of(model[0].weight)
    handle = node.register_prehook(lambda gradients: run.see(gradients[0]))
    node.register_hook(lambda gradients, inputs: run.see(len(gradients)))
    run.train_on(model, 2)
    handle.remove()
    run.train_on(model, 4)


@situation(as_stock=False)
def a_hook_changes_p_grad_during_backward(run: Run) -> None:
    model = run.wrapped()
    first, second = model[0].weight, model[0].bias
    put = torch.full_like(second, 0.5)

    def change(gradient: Tensor) -> None:
        first.grad = None
        second.grad = put.clone()

    model[2].weight.register_hook(change)
    run.train_on(model)


# Other ways to request gradients


@situation()
def autograd_grad_in_between(run: Run) -> None:
    model = run.wrapped()
    for _ in range(6):
        with run.micro_batch():
            loss = loss_of(run, model)
            run.see(*torch.autograd.grad(loss, [model[0].weight, model[2].bias], retain_graph=True))
            loss.backward()


@situation(as_stock=False)
def create_graph_in_between(run: Run) -> None:
    model = run.wrapped()
    for number in range(6):
        run.backward(loss_of(run, model), create_graph=number == 1)


@situation()
def anomaly_detection(run: Run) -> None:
    model = run.wrapped()
    with torch.autograd.detect_anomaly(check_nan=True):
        run.train_on(model)


@situation(as_stock=False)
def a_traffic_meter(run: Run) -> None:
    model = run.wrapped()
    run.train_on(model, 2)
    with TrafficMeter(model) as meter:
        run.train_on(model, 3)
    phases = meter.as_dict()["by_phase"]
    run.see({name: phase["total_bytes"] for name, phase in phases.items()})
    run.train_on(model, 4)


@situation()
def a_compiled_model(run: Run) -> None:
    model = run.wrapped()
    compiled = torch.compile(model, backend="aot_eager")
    run.train(lambda: loss_of(run, compiled), 3)


@situation(as_stock=False)
def compiled_autograd(run: Run) -> None:
    model = run.network(6, 3)  # tracing every node is slow
    run.wrap(model)
    run.train_on(model, 1)
    compiler = torch.compile(backend="eager", dynamic=False)
    with run.micro_batch(), torch._dynamo.compiled_autograd._enable(compiler):
        loss_of(run, model).backward()
    run.train_on(model, 3)


# Windows with errors or other interruptions


@situation()
def frozen_between_forward_and_backward(run: Run) -> None:
    model = run.wrapped()
    for number in range(6):
        loss = loss_of(run, model)
        model[2].weight.requires_grad_(number % 2 == 0)
        run.backward(loss)
        model[2].weight.requires_grad_(True)


@situation(as_stock=False)
def ignored_backwards(run: Run) -> None:
    model = run.wrapped()
    for number in range(6):
        run.backward(loss_of(run, model))
        if number % 2:
            with run.opt.ignore():
                loss_of(run, model).backward()
            run.look()


@situation(as_stock=False)
def discarded_during_backward(run: Run) -> None:
    model = run.wrapped()
    run.train_on(model, 1)
    handle = model[2].weight.register_hook(lambda gradient: run.opt.discard())
    with run.context():
        loss_of(run, model).backward()
    handle.remove()
    run.opt.discard()
    run.train_on(model, 6)


@situation(as_stock=False)
def interrupted(run: Run) -> None:
    """Raise in the backward of the last layer but one, then discard the accumulators."""
    model = run.wrapped()
    run.train_on(model, 1)
    with failing(model[0].weight), run.context():
        loss_of(run, model).backward()
    run.opt.discard()
    run.train_on(model, 6)


@situation()
def threads(run: Run) -> None:
    """Run graphs that share parameters in one thread each. Values are integers, so order does not matter."""
    a, b, c = params = [nn.Parameter(p.detach().round()) for p in run.parameters((3, 4), (5,), (2, 2))]
    run.wrap(params)

    def work(number: int) -> None:
        loss = (a * number).sum() + (b * 2).sum() + (c.t().sum() * number if number else 0)
        gate.wait()
        loss.backward()

    gate = threading.Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(6):
            with run.micro_batch():
                list(pool.map(work, range(4)))


# Changes to parameters and wrappers


@situation(as_stock=False, where=lambda loop: loop.weighs)
def tensors_as_weights(run: Run) -> None:
    model = run.wrapped()
    for number in range(6):
        with run.opt.accumulate(weight=torch.tensor(1.0 + number % 3)):
            loss_of(run, model).backward()
        run.look()
        if run.loop.counted or number == 5:
            run.opt.step(), run.opt.zero_grad()


@situation(as_stock=False)
def not_finite(run: Run) -> None:
    model = run.wrapped()
    run.train_on(model, 1)
    run.backward(loss_of(run, model) * float("inf"))
    run.train_on(model, 4)


@situation(as_stock=False, where=lambda loop: not loop.counted)
def gradients_put_by_hand(run: Run) -> None:
    """Assign p.grad between micro-batches: another layout, an inference tensor, a referenced tensor."""
    model = run.wrapped()
    weight = model[0].weight
    with torch.inference_mode():
        untracked = torch.ones_like(weight)
    flat = torch.ones(2, *weight.shape, dtype=weight.dtype)
    for put in (torch.ones_like(weight.t()).t(), flat[1], untracked):
        run.train_on(model, 1)
        weight.grad = put.clone() if put is untracked and run.loop.weighs else put
        run.train_on(model, 2)
    run.see(flat)


@situation(as_stock=False, where=lambda loop: loop.dtype == LOW and not loop.counted)
def sums_of_a_dtype_that_no_kernel_pairs(run: Run) -> None:
    """Use p.grad of any dtype on a bfloat16 parameter, because the wrapper allows float32 there."""
    model = run.wrapped()
    for dtype in (torch.float64, torch.float16, torch.float32):
        run.train_on(model, 1)
        model[0].weight.grad = torch.ones_like(model[0].weight, dtype=dtype)
        run.train_on(model, 2)
