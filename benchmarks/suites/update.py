"""The update alone: unscale, clip and step of stock, against one number applied where gradients are read.

    python -m benchmarks.suites.update [--quick] [--device cuda]

float32 parameters, AdamW(fused=True); gradients are put in place before the clock starts, and their norm is
above the limit, so that clipping scales. Rows of benchmark "update":

mode "clip", "unscale and clip": metric "time", what stands between the last backward and the end of the
    update; metric "bytes: gradients", what a TrafficMeter counts there of gradients, in B/param.
mode "total_norm": metric "time", the norm of a list beside torch's own and beside reads of the same bytes.

"private_gradients" is a counted loop, whose last additions have left the norm; it is otherwise as "fusedacc".
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import fusedacc
from fusedacc.commands.measuring import records
from fusedacc.commands.measuring.timing import cpu_timer, device_seconds, timer_for
from fusedacc.functional import total_norm
from fusedacc.traffic import TrafficMeter

from .. import harness
from ..contestants.loops import share_moments
from ..harness import measure

LIMIT = 1e-3
SIZES = {"quick": (4, 64), "short": (16, 1772), "full": (16, 1772)}  # 16 of 1772 x 1772: 50.2 M
ROUNDS = {"quick": 3, "short": 9, "full": 31}
SCALE = 2.0**10
#: Seconds by which the host is ahead of a GPU.
AHEAD = 1e-3


class UpdateVariant:
    """Stock's way. `ready()` puts gradients in place, `run()` is what is timed.

    Weights and moments are shared by all variants. `scaled`: whether losses are scaled.
    """

    name = "stock"
    scaler_kind = torch.amp.GradScaler

    def __init__(
        self,
        weights: list[Tensor],
        moments: list[tuple[Tensor, Tensor]],
        gradients: list[Tensor],
        scaled: bool,
    ) -> None:
        self.parameters, self.gradients = [nn.Parameter(weight) for weight in weights], gradients
        inner = torch.optim.AdamW(self.parameters, lr=1e-6, fused=True)
        share_moments(inner, moments)
        how = {"init_scale": SCALE, "growth_interval": 10**9, "enabled": scaled}
        self.scaler = self.scaler_kind(weights[0].device.type, **how)
        self.optimizer = self.wrap(inner)

    def wrap(self, inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return inner

    def ready(self) -> None:
        self.scaler.scale(torch.ones((), device=self.parameters[0].device))
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient.clone()

    def run(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.parameters, LIMIT)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def close(self) -> None:
        self.optimizer.zero_grad()


class Ours(UpdateVariant):
    name, scaler_kind = "fusedacc", fusedacc.amp.GradScaler

    def wrap(self, inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return fusedacc.AccumulatingOptimizer(inner, max_grad_norm=LIMIT)

    def run(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Private(Ours):
    name = "fusedacc private_gradients"

    def wrap(self, inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return fusedacc.AccumulatingOptimizer(inner, 2, max_grad_norm=LIMIT, private_gradients=True)

    def ready(self) -> None:
        for micro_batch in range(2):
            loss = Provided.apply(self, *self.parameters)
            self.scaler.scale(loss).backward()
            if micro_batch == 0:
                self.run()


class Provided(torch.autograd.Function):
    """A scalar whose backward hands every parameter its gradient."""

    @staticmethod
    def forward(ctx, way: UpdateVariant, *parameters: Tensor) -> Tensor:
        ctx.way = way
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, *(gradient.clone() for gradient in ctx.way.gradients)


def timed(run: Callable[[], object], calls: int) -> float:
    """Seconds of one `run` of a way, made ready before."""
    # `run` is a bound method, which the type of a callable does not say.
    way: UpdateVariant = run.__self__  # type: ignore[attr-defined]
    way.ready()
    on_gpu = way.parameters[0].device.type == "cuda"
    seconds = device_seconds(run, 1, AHEAD) if on_gpu else cpu_timer(run, 1)
    way.close()
    return seconds


def updates(results: records.Results, effort: str) -> None:
    count, side = SIZES[effort]
    device = results.device
    weights = [torch.full((side, side), 0.01, device=device) for _ in range(count)]
    moments = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in weights]
    gradients = [torch.randn(side, side, device=device) for _ in range(count)]
    elements = sum(weight.numel() for weight in weights)
    shapes = f"{count} of {side} x {side}: {elements} parameters"
    goals = {
        "clip": {"fusedacc": 1.15, Private.name: 1.15},
        "unscale and clip": {"fusedacc": 1.3, Private.name: 1.5},
    }
    most = {"fusedacc": 12.0, Private.name: 8.0}
    for mode, wanted in goals.items():
        case = records.Case("update", "AdamW(fused=True)", mode, shapes, "float32")
        variants = []
        for kind in (UpdateVariant, Ours, Private):
            way = kind(weights, moments, gradients, mode != "clip")
            for _ in range(2):
                way.ready()
                with TrafficMeter(way.parameters) as meter, meter.phase("update"):
                    way.run()
                way.close()
            moved = meter.as_dict()["by_kind"]
            # Private gradients are in no p.grad that they could be known by; all else is a few scalars.
            counted = (moved.get("gradients", 0) + moved.get("other", 0)) / elements
            held = records.at_most(most[way.name], counted, tolerance=0.001) if way.name in most else {}
            results.add(
                [
                    records.row(
                        case, way.name, metric="bytes: gradients", unit="B/param", median=counted, **held
                    )
                ]
            )
            goal = (records.Goal("stock", wanted[way.name]),) if way.name in wanted else ()
            variants.append(records.Variant(way.name, way.run, meter.total_bytes, goal, meter.calls))
        results.add(measure(case, variants, ROUNDS[effort], timer=timed))


def norms(results: records.Results, effort: str) -> None:
    """The norm against torch's own, and against the fastest reductions of the same bytes."""
    count, side = SIZES[effort]
    calls = 1 if effort == "quick" else 3
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [torch.randn(side, side, device=results.device).to(dtype) for _ in range(count)]
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        size = flat.nbytes
        case = records.Case("update", "list", "total_norm", f"{count} of {side} x {side}", str(dtype)[6:])
        variants = [
            records.Variant("read: sum", flat.sum, size),
            records.Variant("read: amax", flat.amax, size),
            records.Variant("torch get_total_norm", lambda t=tensors: nn.utils.get_total_norm(t), size),
            records.Variant(
                "fusedacc total_norm",
                lambda t=tensors: total_norm(t),
                size,
                (
                    records.Goal("read: sum", 0.9),
                    records.Goal("read: amax", 0.9),
                    records.Goal("torch get_total_norm"),
                ),
            ),
        ]
        results.add(measure(case, variants, ROUNDS[effort], calls, timer=timer_for(results.device)))


def figures(results: records.Results, effort: str) -> None:
    for part in (updates, norms):
        try:
            part(results, effort)
        except RuntimeError as error:  # out of memory, say
            results.add(
                [records.cannot_run(records.Case("update", part.__name__), "all", records.first_line(error))]
            )


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
