"""Schedules of torch.distributed.pipelining for tests: stages, data, and the gradients of one process."""

import copy
import tempfile

import torch
from ranks_setting import assert_close
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

import fusedacc

#: The minimum number of stages per rank for each schedule.
STAGES = {
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
}
#: Also the schedules that are tested only with an attached optimizer. "csv" is loaded from a file.
ALL_STAGES = STAGES | {"ScheduleLoopedBFS": 2, "ScheduleDualPipeV": 2, "csv": 2}
#: Schedules in which a rank has the first and the last stage.
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
CHUNKS, WIDTH = 4, 6


def parts(count: int, dtype: torch.dtype = torch.float32) -> nn.ModuleList:
    torch.manual_seed(0)
    made = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(count))
    return nn.ModuleList(made).to(dtype)


def data(
    index: int, dtype: torch.dtype = torch.float32, rank: int = 0, chunks: int = CHUNKS
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * index + rank)
    x, y = torch.randn(2, 2 * chunks, WIDTH, generator=generator)
    return x.to(dtype), y


def loss_of(output: Tensor, wanted: Tensor) -> Tensor:
    return (output.to(torch.promote_types(output.dtype, torch.float32)) - wanted).pow(2).mean()


def scheduled(
    kind: str, net: nn.ModuleList, mine: tuple[int, ...] = (), group=None, chunks: int = CHUNKS, **options
):
    """Return a schedule of all parts of `net`, or of the parts `mine`."""
    device, numbers = torch.device("cpu"), mine or range(len(net))
    builder = {"dw_builder": options.pop("dw_builder")} if "dw_builder" in options else {}
    stages = [pipelining.PipelineStage(net[i], i, len(net), device, group=group, **builder) for i in numbers]
    for stage in stages:
        send_to_others(stage)
    options = {"loss_fn": loss_of} | options
    if kind != "csv":
        of_kind = getattr(schedules, kind)
        return of_kind(stages if ALL_STAGES[kind] > 1 else stages[0], chunks, **options)
    model = schedules.ScheduleInterleavedZeroBubble(stages, chunks, **options)
    loaded = schedules._PipelineScheduleRuntime(stages, chunks, **options)
    with tempfile.TemporaryDirectory() as folder:
        model._dump_csv(f"{folder}/order.csv", format="compute_only")
        loaded._load_csv(f"{folder}/order.csv")
    return loaded


def send_to_others(stage) -> None:
    """Let no stage send to its own rank. torch 2.10 and 2.11 do in their first step, and gloo refuses it."""
    first_operations = getattr(stage, "_get_init_p2p_neighbors_ops", list)
    stage._get_init_p2p_neighbors_ops = lambda: [
        each for each in first_operations() if each.group_peer != stage.group_rank
    ]


def stages_of(schedule) -> list:
    return schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]


def run_schedule(
    schedule, index: int, dtype: torch.dtype = torch.float32, rank: int = 0, chunks: int = CHUNKS
) -> None:
    """Run one step with a batch of data: inputs for the first stage, and targets for the last."""
    x, y = data(index, dtype, rank, chunks)
    stages = stages_of(schedule)
    inputs = [x] if any(stage.is_first for stage in stages) else []
    schedule.step(*inputs, target=y if any(stage.is_last for stage in stages) else None)


def wrap(net: nn.Module, steps: int | None, **options) -> fusedacc.AccumulatingOptimizer:
    return fusedacc.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.5), steps, **options)


def one_process(
    net: nn.ModuleList, indices, ranks: int = 1, compute: torch.dtype | None = None, chunks: int = CHUNKS
) -> list[Tensor]:
    """Return the mean over these `schedule.step()`s in float64. Inputs are first rounded to `compute`."""
    twin, dtype = copy.deepcopy(net).double().requires_grad_(True), next(net.parameters()).dtype
    parameters = list(twin.parameters())
    sums = [torch.zeros_like(p) for p in parameters]
    for index in indices:
        for rank in range(ranks):
            x, y = data(index, compute or dtype, rank, chunks)
            x = x.double()
            for part in twin:
                x = part(x)
            for total, gradient in zip(sums, torch.autograd.grad(loss_of(x, y), parameters), strict=True):
                total += gradient / (len(indices) * ranks)
    return sums


def mine_of(kind: str, rank: int, ranks: int) -> tuple[int, ...]:
    """Return the stages of a rank."""
    if ALL_STAGES[kind] == 1:
        return (rank,)
    return (rank, 2 * ranks - 1 - rank) if kind in V_SHAPED else (rank, rank + ranks)


def assert_gradients(net: nn.Module, wanted: list[Tensor], what: object = "") -> None:
    for p, gradient in zip(net.parameters(), wanted, strict=True):
        assert p.grad is not None, what
        assert_close(p.grad, gradient, 1e-5 if p.dtype is torch.float32 else 3e-2, what)
