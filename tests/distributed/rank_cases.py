"""Random training cases on several ranks: how a case trains, its micro-batches, and additional events."""

import itertools
import random
from dataclasses import asdict, dataclass, field

import adagrad
import torch
from ranks_setting import LOW

from fusedacc.accumulators.reduction import WEIGHING

INNER = (
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    (torch.optim.Adagrad, {"lr": 0.05}),
)
#: Parameters that may be frozen. Without the others, no loss would have a graph, or a reentrant checkpoint
#: would have no parameters that train.
MAY_FREEZE = ("up.weight", "up.bias", "norm.weight", "twice.weight", "twice.bias", "down.bias")
EPOCHS = 3


@dataclass(frozen=True)
class Loop:
    """How a case trains.

    Attributes:
        lengths: the number of micro-batches of the windows, repeated in order.
        overlaps: whether all micro-batches use the same parameters, and DDP may rely on it.
        scaled: whether a GradScaler scales the losses.
        by_hand: whether the loop clips between the last backward and `step()`.
        late: whether weights are set after the backward.
        held: the child whose parameters are added in a group after some epochs; "" for none.
        held_frozen: whether that child is frozen before it is added.
    """

    seed: int
    lengths: tuple[int, ...]
    counted: bool
    reduction: str
    kind: str
    overlaps: bool
    dtype: torch.dtype
    masters: bool
    wire: torch.dtype | None
    inner: int
    clip: float | None
    by_hand: bool
    skips: bool
    scaled: bool
    in_module: bool
    several: int
    late: bool
    how: str
    ends_in: str
    held: str
    held_frozen: bool
    added_after: int

    @property
    def weighs(self) -> bool:
        return self.reduction in WEIGHING

    @property
    def drops(self) -> bool:
        """Whether updates with non-finite gradients are skipped."""
        return self.skips or self.scaled

    @property
    def tolerance(self) -> float:
        if self.dtype is LOW or self.wire is not None:
            return 5e-2
        if self.dtype is torch.float64:
            return 1e-8
        return 2e-3 if self.inner else 2e-4

    def length(self, window: int) -> int:
        return self.lengths[window % len(self.lengths)]


@dataclass(frozen=True)
class MicroBatch:
    """One rank's micro-batch.

    Attributes:
        ignores: whether a backward inside `ignore()` comes "before" or "after" the micro-batch's own; "" for
            none.
    """

    number: int
    weight: float
    uses_extra: bool
    overflows: bool
    ignores: str


@dataclass
class Epoch:
    """The micro-batches of an epoch, and the events before them.

    Attributes:
        ranks: each rank's micro-batches.
        thrown: each rank's micro-batches of a window that is discarded before the epoch.
        fails: for each rank, whether the last micro-batch of the discarded window raises an exception.
        frozen: parameters that take no gradients.
    """

    ranks: list[list[MicroBatch]] = field(default_factory=list)
    thrown: list[list[MicroBatch]] = field(default_factory=list)
    fails: list[bool] = field(default_factory=list)
    frozen: set[str] = field(default_factory=set)


def random_loop(seed: int) -> Loop:
    rng = random.Random(seed)
    counted = rng.random() < 0.8
    lengths = tuple(rng.choices([1, 2, 3, 4], k=rng.choice([1, 1, 1, 2]) if counted else 1))
    dtype = rng.choice([torch.float32, torch.float32, LOW])
    # Other optimizers divide a gradient by its magnitude, which amplifies the rounding of tiny 16-bit
    # gradients.
    inner = 0 if dtype is LOW else rng.randrange(len(INNER))
    if inner and rng.random() < 0.5:
        dtype = torch.float64  # even float32 would amplify some rounding
    reduction = rng.choice(["mean", "mean", "sum", "weighted", "normalized"]) if counted else "sum"
    late = reduction == "normalized" and rng.random() < 0.3
    clip = rng.choice([None, None, 0.1, 10.0])
    grows = adagrad.GROWS or INNER[inner][0] is not torch.optim.Adagrad
    added = ["", "", "twice", "extra", "up"] if grows else [""]
    ends_in = "flush" if len(lengths) > 1 else rng.choice(["flush", "flush", "step"])
    return Loop(
        seed=seed,
        lengths=lengths,
        counted=counted,
        reduction=reduction,
        kind=rng.choice(["ddp", "ddp", "group"]),
        overlaps=rng.random() < 0.5,
        dtype=dtype,
        masters=dtype is LOW and rng.random() < 0.5,
        wire=LOW if inner == 0 and rng.random() < 0.2 else None,
        inner=inner,
        clip=clip,
        by_hand=clip is not None and ends_in == "step" and not late and rng.random() < 0.7,
        skips=rng.random() < 0.3,
        scaled=rng.random() < 0.25,
        in_module=rng.random() < 0.4,
        # The wrapper learns the number of backwards from a micro-batch that is not the window's last.
        several=rng.choice([1, 1, 2]) if min(lengths) > 1 else 1,
        late=late,
        how=rng.choice(["", "", "as usual", "reentrant"]),
        ends_in=ends_in,
        held=rng.choice(added),
        held_frozen=rng.random() < 0.5,
        added_after=rng.randrange(1, EPOCHS),
    )


def random_epochs(loop: Loop, ranks: int) -> list[Epoch]:
    """Return random epochs. Epochs that end in flush() have different lengths on different ranks."""
    rng, numbers = random.Random(loop.seed + 1), itertools.count()

    def batches(count: int) -> list[MicroBatch]:
        return [_random_batch(loop, rng, next(numbers)) for _ in range(count)]

    longest, epochs = max(loop.lengths), []
    for _ in range(EPOCHS):
        ragged = loop.counted and loop.ends_in == "flush"
        common, epoch = longest * rng.choice([1, 2]), Epoch()
        epoch.ranks = [batches(rng.randint(0, 2 * longest) if ragged else common) for _ in range(ranks)]
        if rng.random() < 0.3:
            _throw_away(loop, rng, epoch, batches)
        if rng.random() < 0.4:
            epoch.frozen = {name for name in MAY_FREEZE if rng.random() < 0.4}
        epochs.append(epoch)
    return epochs


def _throw_away(loop: Loop, rng: random.Random, epoch: Epoch, batches) -> None:
    """Add micro-batches of a window to discard. All ranks discard a reduced window at the same point."""
    least = min(loop.lengths)
    alike = not loop.counted or (len(loop.lengths) == 1 and rng.random() < 0.4)
    common = least if loop.counted else rng.randint(0, least)
    for rank in range(len(epoch.ranks)):
        epoch.thrown.append(batches(common if alike else rng.randint(0, least - 1)))
        epoch.fails.append(not alike and bool(epoch.thrown[rank]) and rng.random() < 0.3)


def _random_batch(loop: Loop, rng: random.Random, number: int) -> MicroBatch:
    weight = rng.choice([0.0, 1.0, 2.5, 7.0]) if loop.weighs else 1.0
    if loop.late:
        weight = max(weight, 0.5)  # a weight of 0 must be known before the backward
    return MicroBatch(
        number,
        weight,
        uses_extra=rng.random() < 0.2 and not loop.overlaps,
        overflows=loop.drops and weight > 0 and rng.random() < 0.1,
        ignores=rng.choice(["before", "after"]) if rng.random() < 0.1 else "",
    )


def traits(loop: Loop, ranks: int) -> dict[str, object]:
    """Return the options that distinguish a case from other cases."""
    epochs = random_epochs(loop, ranks)
    batches = [batch for epoch in epochs for each in (*epoch.ranks, *epoch.thrown) for batch in each]
    return asdict(loop) | {
        "seed": None,
        "lengths": (len(loop.lengths) > 1, min(loop.lengths) > 1),
        "thrown": any(epoch.thrown for epoch in epochs),
        "fails": any(any(epoch.fails) for epoch in epochs),
        "frozen": any(epoch.frozen for epoch in epochs),
        "uneven": any(len(set(map(len, epoch.ranks))) > 1 for epoch in epochs),
        "uses extra": any(batch.uses_extra for batch in batches),
        "overflows": any(batch.overflows for batch in batches),
        "ignores": any(batch.ignores for batch in batches),
        "weight of 0": any(not batch.weight for batch in batches),
    }
