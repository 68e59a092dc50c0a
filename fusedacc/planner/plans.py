"""`plan`: find the micro-batch that fits in memory, the number of micro-batches, and where memory goes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ..kernels.local_parts import is_distributed
from ..optimizer import AccumulatingOptimizer
from . import budget as amounts
from .allocations import ACTIVATIONS, KINDS, LIBRARIES, Peak
from .budget import available, check_int, format_bytes, parse_bytes
from .prediction import Batch, BatchDims, DataDependentError, LossFunction, Predictor, parts_of

#: Share of the free memory that a plan does not use, if no budget is given.
RESERVE = 0.05
#: A plan names the logits if they take more than this share of the peak.
LOGITS_SHARE = 0.05
#: How certain a figure is: computed from shapes, measured in a run, or neither.
EXACT = "exact"
MEASURED = "measured"
ESTIMATED = "estimated"


class Unsharded(NamedTuple):
    """Bytes of the unsharded sums of FSDP2 with `model=`, and of the gradients that one reduction sends."""

    sums: int
    gradients: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The result of `plan`. `str()` returns a table."""

    #: The largest number of samples that fits in one forward and backward.
    micro_batch_size: int
    #: Micro-batches per update on each rank.
    gradient_accumulation_steps: int
    global_batch_size: int
    world_size: int
    #: Bytes that training may add to the process.
    memory_budget: int
    #: Predicted bytes at the peak.
    peak_bytes: int
    #: Measured bytes at the peak of a real update; None if none was run.
    measured_peak_bytes: int | None
    #: Why no update was run; empty if one was.
    not_measured: str
    #: `peak_bytes` by kind (`fusedacc.planner.KINDS`).
    bytes_by_kind: Mapping[str, int]
    #: Bytes of `peak_bytes` that a cross-entropy without logits would not need.
    logits_bytes: int
    #: Bytes of memory traffic per update, and the part that accumulates gradients.
    bytes_per_update: int
    accumulation_bytes_per_update: int
    #: Predicted peak in bytes of each micro-batch size that was tried.
    tried: Mapping[int, int]
    #: For each figure: "exact", "measured" or "estimated".
    certainty: Mapping[str, str]
    _arguments: Mapping[str, Any] = dataclasses.field(repr=False, compare=False)
    _batch: Batch = dataclasses.field(repr=False, compare=False)
    _of: Callable[[int], Plan] = dataclasses.field(repr=False, compare=False)
    #: Micro-batches whose activations are in memory at once.
    in_flight: int
    _unsharded: Unsharded = dataclasses.field(repr=False, compare=False)

    @property
    def headroom_bytes(self) -> int:
        """Bytes of the budget that the peak leaves free."""
        return self.memory_budget - self.peak_bytes

    @property
    def samples_per_rank(self) -> int:
        """Samples per update on each rank, rounded up; ranks may differ by one."""
        return math.ceil(self.global_batch_size / self.world_size)

    @property
    def micro_batch_sizes(self) -> list[int]:
        """Samples in each micro-batch of an update; the last one may be smaller."""
        return parts_of(self.samples_per_rank, self.micro_batch_size)

    @property
    def ragged(self) -> bool:
        """Whether the micro-batches of an update have unequal numbers of samples."""
        return self.samples_per_rank * self.world_size != self.global_batch_size or (
            self.samples_per_rank % self.micro_batch_size != 0
        )

    def split(self, batch: Any) -> Iterator[tuple[int, Any]]:
        """Split one rank's batch into micro-batches.

        The batch has the layout of `sample_batch`; the parts are views of it. Pass the number of samples as
        the weight: `with optimizer.accumulate(weight=samples)`.

        Returns:
            An iterator over (number of samples, micro-batch).
        """
        return self._batch.split(batch, self.micro_batch_size)

    def dividing(self) -> Plan:
        """Return the plan with the largest micro-batch that divides each rank's samples evenly.

        Raises:
            ValueError: the global batch is not divisible by the number of ranks.
        """
        if self.global_batch_size % self.world_size:
            raise ValueError(
                f"global_batch_size={self.global_batch_size} is not divisible by world_size={self.world_size}"
            )
        sizes = range(self.micro_batch_size, 0, -1)
        return self._of(next(size for size in sizes if self.samples_per_rank % size == 0))

    def wrapper_arguments(self) -> dict[str, Any]:
        """Return keyword arguments for `AccumulatingOptimizer(optimizer, **plan.wrapper_arguments())`.

        They are the arguments of the wrapper given to `plan`, or the defaults, with this plan's number of
        steps. If micro-batches have unequal sizes, the reduction is "weighted", so that the mean over samples
        is exact: pass each micro-batch's number of samples as its weight (see `split`).

        With `in_flight` above 1, `gradient_accumulation_steps` is 1, because one `schedule.step()` is one
        micro-batch for the wrapper. Give the plan's number of steps to the schedule as `n_microbatches`.
        """
        given = dict(self._arguments)
        given["gradient_accumulation_steps"] = self.gradient_accumulation_steps if self.in_flight == 1 else 1
        if self.ragged and given.get("reduction", "mean") == "mean":
            given["reduction"] = "weighted"
        return given

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain numbers."""
        values = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
        return plain | {"headroom_bytes": self.headroom_bytes, "ragged": self.ragged}

    def __str__(self) -> str:
        steps = self.gradient_accumulation_steps
        last = self.micro_batch_sizes[-1]
        times = f"{self.micro_batch_size} x {steps}"
        if self.world_size > 1:
            times += f" x {self.world_size} ranks"
        ragged = f", the last micro-batch of {last}" if last != self.micro_batch_size else ""

        def line(name: str, size: int, whole: int = self.memory_budget, certainty: str = "") -> str:
            share = f"{size / max(1, whole):>6.1%}"
            return f"{name:<28}{format_bytes(size):>12}  {share}  {certainty}".rstrip()

        lines = [
            f"micro_batch_size={self.micro_batch_size}, gradient_accumulation_steps={steps}: "
            f"{times} for a batch of {self.global_batch_size}{ragged}",
            "",
            f"{'at the peak':<28}{'bytes':>12}  {'share':>6}",
        ]
        for kind in (*KINDS, LIBRARIES):
            lines.append(line(kind, self.bytes_by_kind[kind], self.peak_bytes, self.certainty.get(kind, "")))
        lines.append(line("peak, predicted", self.peak_bytes, certainty=self.certainty["peak_bytes"]))
        if self.measured_peak_bytes is None:
            lines.append(f"{'peak, measured':<28}{'none':>12}  {self.not_measured}")
        else:
            lines.append(line("peak, measured", self.measured_peak_bytes, certainty="measured"))
        lines += [line("budget", self.memory_budget), line("headroom", self.headroom_bytes)]
        if self.logits_bytes > LOGITS_SHARE * self.peak_bytes:
            lines.append(
                f"the head's logits take {format_bytes(self.logits_bytes)} of the peak; `fuse_head` or "
                "`linear_cross_entropy` would save them (docs/head.md)"
            )
        share = self.accumulation_bytes_per_update / max(1, self.bytes_per_update)
        moved = f"{format_bytes(self.bytes_per_update)}, {share:.0%} of it to accumulate gradients"
        if self.wrapper_arguments().get("model") is not None:
            moved += ", without what weight-gradient products add directly"
        lines += ["", f"an update moves {moved}"]
        if self.in_flight > 1:
            lines.append(
                f"the activations of {self.in_flight} micro-batches are in memory at once; an update has "
                f"{steps} of the schedule's micro-batches"
            )
        if self.world_size > 1:
            lines += self._over_ranks()
        lines.append("shares of kinds refer to the peak, the other shares to the budget")
        if self.bytes_by_kind[LIBRARIES]:
            lines.append(
                "only live memory is counted; the C library may keep more CPU memory (docs/memory.md)"
            )
        return "\n".join(lines)

    def _over_ranks(self) -> list[str]:
        """Return the lines about ranks: what the plan assumes, and what FSDP2 would change."""
        ranks = self.world_size
        steps = self.gradient_accumulation_steps
        sums, gradients = self._unsharded
        parameters = self.bytes_by_kind["parameters"]
        unsharded = parameters + self.bytes_by_kind["optimizer"]
        shard = math.ceil(unsharded / ranks)
        peak = self.peak_bytes - unsharded + shard + parameters + math.ceil(sums / ranks)
        lines = [
            f"assumed: each of the {ranks} ranks holds all parameters and optimizer state of this module; "
            "DistributedDataParallel's buckets are not counted",
            f"FSDP2 over these ranks would keep {format_bytes(shard)} of parameters and state instead of "
            f"{format_bytes(unsharded)}, and gather up to {format_bytes(parameters)} of parameters",
        ]
        if steps > 1:
            lines.append(
                f"FSDP2 with deferred synchronisation and model= keeps {format_bytes(sums)} of unsharded "
                f"sums on each rank, which reduces {format_bytes(gradients)} of gradients per update, not "
                f"{format_bytes(steps * gradients)}; its peak is about {format_bytes(peak)} and the buffers "
                "of one fully_shard() group"
            )
        return lines


def plan(
    model: nn.Module,
    optimizer: Optimizer,
    sample_batch: Any,
    *,
    global_batch_size: int,
    memory_budget: int | str | None = None,
    world_size: int = 1,
    loss_fn: LossFunction | None = None,
    verify: bool = True,
    device: torch.device | str | None = None,
    batch_dims: BatchDims = 0,
    in_flight: int = 1,
    progress: Callable[[int], None] | None = None,
) -> Plan:
    """Find the largest micro-batch that fits, by running the training step on fake tensors.

    Fake tensors allocate no memory. The prediction includes the gradient sums, the optimizer state that the
    first update creates, master weights, buckets and temporaries. `plan` changes nothing that it is given,
    and restores random states, also after an error.

    Args:
        model: the model as it will train (dtypes, activation checkpointing, frozen parameters, train or eval
            mode); it may be on the meta device. For FSDP2: the model before `fully_shard()`. For a pipeline:
            the module of one stage, with its inputs as `sample_batch` and any loss of its outputs.
        optimizer: the `AccumulatingOptimizer` as it will train, or a bare optimizer for the plain loop. The
            plan replaces the wrapper's `gradient_accumulation_steps` if the wrapper counts them.
        sample_batch: one real batch: a tensor, or nested tuples, lists and dicts of tensors.
        global_batch_size: samples per update, over all ranks.
        memory_budget: bytes that training may add to a process that has torch loaded, or text such as
            "24GiB". Parameters and the libraries' scratch memory count; the interpreter and the libraries do
            not. None: the free memory of the device less 5 %, plus what the model already takes.
        world_size: number of data-parallel ranks; each one holds the whole model.
        loss_fn: `loss_fn(model, batch)` returns the loss, a 0-dim tensor. Use autocast and activation
            checkpointing inside it. None: `model(**batch).loss`, as in Transformers.
        verify: run a real update of the chosen size on a copy and measure its peak, if the device is
            available and has memory for both.
        device: where training will run. None: where the parameters are; the CPU for a model on the meta
            device. A GPU need not be available: fake CPU tensors take its place.
        batch_dims: the dimension that counts samples: an int for all tensors, or a dict by name for those
            that differ (`{"mask": 1}`), with None for a tensor that has no such dimension.
        in_flight: micro-batches whose activations are in memory at once. For a stage of a pipeline: all
            micro-batches of the schedule in GPipe, and at most the number of stages that follow, itself
            included, in 1F1B. A micro-batch is then one of the schedule's, and an update has at least
            `in_flight` of them.
        progress: called with each size before it is run.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value, the number of samples in the batch is
            ambiguous, or a single sample exceeds the budget.
        DataDependentError: the model depends on values in its tensors (on a GPU, use
            `find_micro_batch_size`).

    Errors that the model raises get a note with the micro-batch size.
    """
    _check(model, optimizer, global_batch_size, world_size)
    check_int("in_flight", in_flight, 1)
    batch = Batch(sample_batch, batch_dims)
    place = place_of(model, device)
    if memory_budget is None:
        on_device = [t for t in (*model.parameters(), *model.buffers()) if t.device.type == place.type]
        budget = int((1 - RESERVE) * available(place)) + sum(tensor.nbytes for tensor in on_device)
    else:
        budget = parse_bytes(memory_budget, "memory_budget")
    predictor = Predictor(model, optimizer, batch, loss_fn, place, progress, in_flight)
    recipe = predictor.recipe
    per_rank = math.ceil(global_batch_size / world_size)
    if in_flight > per_rank:
        raise ValueError(
            f"in_flight={in_flight} is more than the {per_rank} samples of a rank; allowed: at most one "
            "micro-batch per sample"
        )
    most = per_rank // in_flight

    def peak(size: int) -> Peak:
        return predictor.peak(size, math.ceil(per_rank / size))

    with ThreadPoolExecutor(1) as background:  # it waits for another process
        measuring = background.submit(amounts.scratch_bytes) if place.type == "cpu" else None
        least = _least(peak, most)
    scratch = 0 if measuring is None else measuring.result()
    try:
        chosen = largest(lambda size: peak(size).bytes + scratch, most, budget, least)
    except TooSmallError as error:
        raise ValueError(_too_small(error, peak(least), scratch, optimizer)) from None
    arguments = dict(recipe.arguments or {})
    if recipe.takes_model:
        arguments["model"] = model

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sums = (parameter.numel() * max(parameter.itemsize, torch.float32.itemsize) for parameter in trained)
    unsharded = Unsharded(sum(sums), sum(parameter.nbytes for parameter in trained))

    def of(size: int) -> Plan:
        predicted = peak(size)
        steps = math.ceil(per_rank / size)
        measured: int | None = None
        why = "verify=False"
        if verify:
            measured, why = predictor.measured_peak(size, steps)
        if measured is not None:
            measured += scratch
        moved, accumulation = predictor.traffic(size, steps)
        kinds = {kind: predicted.by_kind.get(kind, 0) for kind in KINDS} | {LIBRARIES: scratch}
        certainty = {
            "micro_batch_size": ESTIMATED,
            "peak_bytes": ESTIMATED,
            "measured_peak_bytes": MEASURED,
            "bytes_per_update": ESTIMATED if predictor.uncounted else EXACT,
            **dict.fromkeys(("parameters", "accumulators", "gradients", "optimizer"), EXACT),
            "activations": EXACT if predictor.runs_there else ESTIMATED,
            "temporaries": ESTIMATED,
            LIBRARIES: MEASURED if place.type == "cpu" else ESTIMATED,
        }
        return Plan(
            micro_batch_size=size,
            gradient_accumulation_steps=steps,
            global_batch_size=global_batch_size,
            world_size=world_size,
            memory_budget=budget,
            peak_bytes=predicted.bytes + scratch,
            measured_peak_bytes=measured,
            not_measured=why,
            bytes_by_kind=MappingProxyType(kinds),
            logits_bytes=predicted.logits,
            bytes_per_update=moved,
            accumulation_bytes_per_update=accumulation,
            tried=MappingProxyType(
                {tried_size: peak_bytes + scratch for tried_size, peak_bytes in predictor.tried.items()}
            ),
            certainty=MappingProxyType(certainty),
            in_flight=in_flight,
            _arguments=MappingProxyType(arguments),
            _batch=batch,
            _of=of,
            _unsharded=unsharded,
        )

    return of(chosen)


def _check(model: Any, optimizer: Any, global_batch_size: Any, world_size: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    check_int("global_batch_size", global_batch_size, 1)
    check_int("world_size", world_size, 1)
    if global_batch_size < world_size:
        raise ValueError(
            f"global_batch_size={global_batch_size} is less than world_size={world_size}: some ranks would "
            "have no sample; allowed: at least one sample per rank"
        )
    for name, parameter in model.named_parameters():
        if is_distributed(parameter):
            raise ValueError(
                f"model has parameter {name!r}, a DTensor, and a plan is made for the whole model or for one "
                "stage of a pipeline; allowed: the model before fully_shard() or parallelize_module()"
            )
    of_model = {id(parameter) for parameter in model.parameters()}
    if not any(
        id(parameter) in of_model for group in optimizer.param_groups for parameter in group["params"]
    ):
        raise ValueError("optimizer has none of the model's parameters, so it would not train the model")


def _least(peak: Callable[[int], Peak], most: int) -> int:
    """Return the smallest size that runs: 2 for models that refuse a single sample, as batch norm may."""
    try:
        peak(1)
    except DataDependentError:
        raise
    except Exception:
        if most == 1:
            raise
        with contextlib.suppress(Exception):
            peak(2)
            return 2
        raise
    return 1


def place_of(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Return `device`, or by default the model's device, which is the CPU for a model on meta."""
    if device is not None:
        return torch.device(device)
    first = next(model.parameters()).device
    return torch.device("cpu") if first.type == "meta" else first


def _too_small(error: TooSmallError, peak: Peak, scratch: int, optimizer: Optimizer) -> str:
    """Return the error message for a budget that a single sample exceeds, with possible remedies."""
    by_kind = [f"{kind} {format_bytes(size)}" for kind, size in peak.by_kind.items() if size]
    missing = error.cost - error.budget
    activations = peak.by_kind.get(ACTIVATIONS, 0)
    cures = ["activation checkpointing"] if activations > missing else []
    if isinstance(optimizer, AccumulatingOptimizer):
        if optimizer._masters is not None:
            cures.append("no master_weights")
        if any(slot.accumulate_dtype.itemsize > 2 for slot in optimizer._slots):
            cures.append('accumulate_dtype=torch.bfloat16 with rounding="stochastic"')
    unsharded = activations + scratch
    ranks = 2
    while ranks < 1024 and (error.cost - unsharded) / ranks + unsharded > error.budget:
        ranks *= 2
    if ranks < 1024:
        cures.append(f"sharding model and optimizer over {ranks} ranks")
    return (
        f"memory_budget={format_bytes(error.budget)} is {format_bytes(missing)} less than one sample "
        f"takes ({format_bytes(error.cost)}: {', '.join(by_kind)}); what may help: "
        f"{', '.join(cures) or 'a smaller model'}"
    )


class TooSmallError(ValueError):
    """A single sample costs more than the budget."""

    def __init__(self, cost: int, budget: int) -> None:
        super().__init__(f"one sample costs {cost} of {budget}")
        self.cost = cost
        self.budget = budget


def largest(cost: Callable[[int], int], most: int, budget: int, least: int = 1) -> int:
    """Return the largest of `least` ... `most` whose cost is at most `budget`; TooSmallError if none is.

    Costs grow nearly linearly, so each guess interpolates between the largest size that fits and the smallest
    that does not. Every third guess is the middle instead, in case the costs are not linear.
    """
    fitting = least
    fitting_cost = cost(fitting)
    if fitting_cost > budget:
        raise TooSmallError(fitting_cost, budget)
    if most == least:
        return least
    too_large = most
    too_large_cost = cost(too_large)
    if too_large_cost <= budget:
        return most
    guesses = 0
    while too_large - fitting > 1:
        by_interpolation = (budget - fitting_cost) / max(1, too_large_cost - fitting_cost)
        share = 1 / 2 if guesses % 3 == 2 else by_interpolation
        guess = fitting + int(share * (too_large - fitting))
        guess = min(max(guess, fitting + 1), too_large - 1)
        guesses += 1
        guess_cost = cost(guess)
        if guess_cost <= budget:
            fitting = guess
            fitting_cost = guess_cost
        else:
            too_large = guess
            too_large_cost = guess_cost
    return fitting
