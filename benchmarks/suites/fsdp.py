"""A window of FSDP2 on two ranks with deferred synchronisation: fusedacc with `model=` against plain FSDP2.

"kept" keeps the parameters unsharded between the
micro-batches of a window (`set_reshard_after_backward(False)`, `reshard_after_forward=False`); "resharded" is
FSDP2's default. The time is the CPU time of both ranks. The peak is the first rank's: the bytes of all
tensors that are alive when a window begins, and what the window allocates. It is the least of three, because
the profiler misses what gloo's threads free. Gradient bytes do not include FSDP2's collectives. The error is
that of a Linear's accumulated gradient, relative to float64, with operands that bfloat16 holds exactly.

A peak cannot be less than the shards, the unsharded parameters and the float32 sums: 10 bytes per parameter
in float32, and 8 with bfloat16 compute. So there is no goal for the peak where plain FSDP2 sums in bfloat16.
"""

import dataclasses
import functools
import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fusedacc
from fusedacc.commands.timing import Run, take_turns
from fusedacc.kernels.checks import ORDINARY_TYPES
from fusedacc.planner.allocations import recorded_peak
from fusedacc.traffic import TrafficMeter

from .. import harness, records
from ..harness import progress
from .data_parallel import RANKS, UNTIMED, cpu_seconds, on_ranks

#: Micro-batches per window, and the tokens of each in the measurement of errors.
K, TOKENS_OF_ERROR = 4, 16
LOW = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Policy:
    """Dtypes, and the goals: the most CPU time and peak ("kept") as multiples of plain FSDP2's."""

    shards: torch.dtype = torch.float32
    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    time: float = 1.05
    peak: float = 0.85


POLICIES = {
    "float32": Policy(time=0.97, peak=0.80),
    "bfloat16 compute, float32 wire": Policy(param=LOW, reduce=torch.float32),
    "bfloat16 compute and wire": Policy(param=LOW, reduce=LOW, peak=0.0),
    "float32 compute, bfloat16 wire": Policy(reduce=LOW, peak=0.0),
    "bfloat16 shards": Policy(shards=LOW, peak=0.0),
    "bfloat16 shards, float32 wire": Policy(shards=LOW, reduce=torch.float32),
}
#: By name: whether the gradients are fusedacc's, and whether parameters stay unsharded in a window.
WAYS = {
    "PyTorch, kept": (False, True),
    "PyTorch, resharded": (False, False),
    "model=, kept": (True, True),
    "model=, resharded": (True, False),
}


@dataclasses.dataclass(frozen=True)
class Size:
    width: int = 384
    blocks: int = 3
    tokens: int = 24

    @property
    def parameters(self) -> int:
        return self.blocks * (8 * self.width**2 + 7 * self.width) + self.width**2 + self.width


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Window:
    def __init__(self, size: Size, policy: Policy, way: str) -> None:
        ours, self._keeps = WAYS[way]
        torch.manual_seed(0)
        layers = [*(Block(size.width) for _ in range(size.blocks)), nn.Linear(size.width, size.width)]
        model = nn.Sequential(*layers).to(policy.shards)
        options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (RANKS,))}
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=policy.param, reduce_dtype=policy.reduce)
        options["reshard_after_forward"] = not self._keeps
        for layer in layers[:-1]:
            fully_shard(layer, **options)
        self._model = fully_shard(model, **options)
        self._optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
        self._scale = 1.0 if ours else 1 / K
        if ours:
            self._optimizer = fusedacc.AccumulatingOptimizer(self._optimizer, K, model=model)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self._x = torch.randn(size.tokens, size.width, generator=generator).to(policy.shards)

    def __call__(self) -> None:
        for index in range(K):
            last = index == K - 1
            self._model.set_requires_gradient_sync(last)
            self._model.set_reshard_after_backward(last or not self._keeps)
            (self._model(self._x).float().pow(2).mean() * self._scale).backward()
            if last or self._scale == 1.0:
                self._optimizer.step()
                self._optimizer.zero_grad()

    def close(self) -> None:
        if self._scale == 1.0:
            self._optimizer.close()


def measure_rank(size: Size, policy: Policy, rounds: int) -> dict[str, dict[str, Any]]:
    """Return the seconds of each round, the bytes at the peak and the gradient bytes, each by way."""
    windows = {way: Window(size, policy, way) for way in WAYS}
    seconds = take_turns(dict[str, Run](windows), range(-UNTIMED, rounds), cpu_seconds)
    moved = {way: _gradient_bytes(window) for way, window in windows.items()}
    for window in windows.values():
        window.close()
    del window
    windows.clear()
    gc.collect()
    peaks = {way: _peak(functools.partial(Window, size, policy, way)) for way in WAYS}
    errors = {way: _error(size, policy, way) for way in WAYS if way.endswith("kept")}
    return {"seconds": seconds, "bytes": moved, "peaks": peaks, "errors": errors}


def _error(size: Size, policy: Policy, way: str) -> float:
    """Return the relative error of a window's gradient of one weight, before the update."""
    ours, _ = WAYS[way]
    generator = torch.Generator().manual_seed(dist.get_rank())
    shapes = (TOKENS_OF_ERROR, size.width), (TOKENS_OF_ERROR, 4 * size.width)
    given = [[torch.randn(shape, generator=generator).to(LOW) for shape in shapes] for _ in range(K)]
    wanted = sum(weights.double().T @ x.double() for x, weights in given)
    dist.all_reduce(wanted)
    model = nn.Linear(size.width, 4 * size.width, bias=False).to(policy.shards)
    settings = MixedPrecisionPolicy(param_dtype=policy.param, reduce_dtype=policy.reduce)
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)), mp_policy=settings)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
    if ours:
        optimizer = fusedacc.AccumulatingOptimizer(optimizer, K, reduction="sum", model=model)
    for index, (x, weights) in enumerate(given):
        model.set_requires_gradient_sync(index == K - 1)
        (model(x.to(policy.param or policy.shards)).float() * weights).sum().backward()
        if ours and index < K - 1:
            optimizer.step()
    found = model.weight.grad.full_tensor().double() * RANKS  # FSDP2 averages
    if ours:
        optimizer.close()
    return ((found - wanted).norm() / wanted.norm()).item()


def _gradient_bytes(window: Run) -> int:
    """Return what `TrafficMeter` counts for gradients before the update."""
    with TrafficMeter() as meter:
        window()
    other = [name for name in meter.uncounted if not name.startswith(("c10d.", "fsdp."))]
    if other:
        raise RuntimeError(f"uncounted: {', '.join(other)}")
    counts = meter.counts()
    return sum(
        cell.total
        for place, cell in counts.cells.items()
        if place.phase == "accumulate" or (place.phase, place.kind) == ("backward", "gradients")
    )


def _peak(make: Callable[[], Window]) -> int:
    """Return the bytes of live tensors at the peak of the third window."""
    window = make()
    window()
    window()
    found = []
    for _ in range(3):
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) in ORDINARY_TYPES]
        storages = [each.untyped_storage() for each in tensors]
        held = sum({each.data_ptr(): each.nbytes() for each in storages if each.data_ptr()}.values())
        del tensors, storages
        found.append(held + recorded_peak(lambda _: window(), torch.device("cpu"), "all").bytes)
    window.close()
    return min(found)


def figures(results: records.Results, effort: str) -> None:
    size, rounds = {"quick": (Size(32, 2, 8), 3), "short": (Size(), 21), "full": (Size(), 61)}[effort]
    for name in progress(POLICIES, "FSDP2", "policy"):
        policy = POLICIES[name]
        shapes = f"{size.parameters / 1e6:.2f} M parameters; {RANKS} processes of one thread, gloo; "
        shapes += f"{K} x {size.tokens} tokens"
        case = records.Case("fsdp", f"{RANKS} ranks, width {size.width}", f"window k={K}", shapes, name)
        found = on_ranks(results, case, list(WAYS), measure_rank, size, policy, rounds)
        if not found:
            continue
        ours = [way for way in WAYS if WAYS[way][0]]
        goals = {way: [records.Goal(way.replace("model=", "PyTorch"), 1 / policy.time)] for way in ours}
        results.add(records.timed_rows(case, found["seconds"], goals, "CPU time of both ranks"))
        stock = "PyTorch, kept"
        sent_low = policy.reduce is LOW or (policy.shards is LOW and policy.reduce is None)
        share = 0.8 if sent_low else 0.65  # FSDP2 rounds to the wire's dtype, and adds in it
        low = LOW in (policy.shards, policy.reduce)
        limits = {"model=, kept": (share * found["errors"][stock], f"{share} x {stock}")} if low else {}
        results.add(records.value_rows(case, "gradient error", "", found["errors"], limits))
        peaks = {way: value / size.parameters for way, value in found["peaks"].items()}
        moved = {way: value / size.parameters for way, value in found["bytes"].items()}
        allowed = {"kept": policy.peak, "resharded": 1.0} if policy.peak else {}
        limits = {
            f"model=, {which}": (limit * peaks[f"PyTorch, {which}"], f"{limit:g} x PyTorch, {which}")
            for which, limit in allowed.items()
        }
        results.add(records.value_rows(case, "peak memory", "B/param", peaks, limits))
        results.add(records.value_rows(case, "gradient bytes", "B/param", moved))


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
