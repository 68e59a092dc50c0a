"""The update alone: stock's unscale, clip and step, against one number applied where gradients are read.

Modes "clip", "unscale and clip": from the last backward to the end of the update, with float32 parameters and
AdamW(fused=True). The gradients' norm is above the limit, so clipping scales. Mode "total_norm": the norm of
a list, beside torch's and beside reads of the same bytes.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

import fusedacc
from fusedacc.commands.timing import cpu_timer, device_seconds, timer_for
from fusedacc.functional import total_norm
from fusedacc.traffic import TrafficMeter

from .. import harness, records
from ..contestants.loops import share_moments
from ..harness import STOCK, WRAPPED, measure

LIMIT = 1e-3
SIZES = {"quick": (4, 64), "short": (16, 1772), "full": (16, 1772)}  # 16 of 1772 x 1772: 50.2 M
ROUNDS = {"quick": 3, "short": 9, "full": 31}
SCALE = 2.0**10
#: Seconds by which the host is ahead of a GPU.
AHEAD = 1e-3
#: Goals by mode: the least speed relative to stock.
GOALS = {"clip": 1.15, "unscale and clip": 1.3}
#: The most bytes per parameter.
MOST = {WRAPPED: (12.0, "limit", 0.001)}


class Update:
    """One way to update. `ready()` provides gradients, `run()` is timed.

    All ways share the weights and moments. `scaled`: whether losses are scaled.
    """

    def __init__(
        self, name: str, weights: list[Tensor], moments: list[tuple], gradients: list[Tensor], scaled: bool
    ) -> None:
        self.name = name
        self.gradients = gradients
        self.parameters = [nn.Parameter(weight) for weight in weights]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.parameters, lr=1e-6, fused=True)
        share_moments(self.optimizer, moments)
        kind = torch.amp.GradScaler if name == STOCK else fusedacc.amp.GradScaler
        how = {"init_scale": SCALE, "growth_interval": 10**9, "enabled": scaled}
        self.scaler = kind(weights[0].device.type, **how)
        if name != STOCK:
            self.optimizer = fusedacc.AccumulatingOptimizer(self.optimizer, max_grad_norm=LIMIT)

    def ready(self) -> None:
        self.scaler.scale(torch.ones((), device=self.parameters[0].device))
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient.clone()

    def run(self) -> None:
        if self.name == STOCK:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, LIMIT)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def close(self) -> None:
        self.optimizer.zero_grad()


def timed(run: Callable[[], object], calls: int) -> float:
    """Return the seconds of one `run` of a way, after making it ready."""
    way: Update = run.__self__  # `run` is a bound method
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
    for mode, goal in GOALS.items():
        case = records.Case("update", "AdamW(fused=True)", mode, shapes, "float32")
        variants = []
        per_parameter = {}
        for name in (STOCK, WRAPPED):
            way = Update(name, weights, moments, gradients, mode != "clip")
            for _ in range(2):
                way.ready()
                with TrafficMeter(way.parameters) as meter, meter.phase("update"):
                    way.run()
                way.close()
            moved = meter.as_dict()["by_kind"]
            per_parameter[name] = (moved.get("gradients", 0) + moved.get("other", 0)) / elements
            goals = (records.Goal(STOCK, goal),) if name == WRAPPED else ()
            variants.append(records.Variant(name, way.run, meter.total_bytes, goals, meter.calls))
        results.add(records.value_rows(case, "bytes: gradients", "B/param", per_parameter, MOST))
        results.add(measure(case, variants, ROUNDS[effort], timer=timed))


def norms(results: records.Results, effort: str) -> None:
    """Compare the norm with torch's, and with the fastest reductions of the same bytes."""
    count, side = SIZES[effort]
    least = {"read: sum": 0.9, "read: amax": 0.9, "torch get_total_norm": 0.0}
    goals = tuple(records.Goal(*goal) for goal in least.items())
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [torch.randn(side, side, device=results.device).to(dtype) for _ in range(count)]
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        case = records.Case("update", "list", "total_norm", f"{count} of {side} x {side}", str(dtype)[6:])
        of_torch = (flat.sum, flat.amax, functools.partial(nn.utils.get_total_norm, tensors))
        variants = [
            records.Variant(name, run, flat.nbytes) for name, run in zip(least, of_torch, strict=True)
        ]
        ours = functools.partial(total_norm, tensors)
        variants.append(records.Variant("fusedacc total_norm", ours, flat.nbytes, goals))
        calls = 1 if effort == "quick" else 3
        results.add(measure(case, variants, ROUNDS[effort], calls, timer=timer_for(results.device)))


def figures(results: records.Results, effort: str) -> None:
    for part in (updates, norms):
        results.attempt(records.Case("update", part.__name__), ["all"], part, results, effort)


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
