"""What an audit records: backward passes, updates, and their history until they are judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .amounts import Amount
from .call_sites import CallSite, describe_calls
from .loss import Loss
from .sketch_sets import SketchSet

#: Kinds of problems. They are part of the JSON's schema.
KINDS = ("lost", "double", "scale", "uneven", "stale", "ranks", "parameters", "count")

#: What runs a backward pass, by `BackwardPass.how`.
FUNCTIONS = {"backward": "backward()", "grad": "torch.autograd.grad()", "other": "a backward pass"}

#: Checks of an update that other problems, equal gradients or unusual losses may make impossible.
EVENNESS, SUM = "whether micro-batches count the same", "what the weights add up to"

#: Different notes that are kept.
MAX_NOTES = 100


@dataclass(eq=False)
class BackwardPass:
    """One backward pass, which is a micro-batch unless other facts speak against it.

    Attributes:
        number: counts all passes of this process from 0.
        how: "backward", "grad" (`torch.autograd.grad`), or "other" (the engine was called in another way).
        loss: what the loss's graph says.
        site: the call of `backward()`. Losses of one place are of one kind.
        sketches: of its gradients, by the leaf's number, until no optimizer can use the pass any more.
        repeats: number of an earlier pass of the same loss.
        runs: how often the loss went through backward() in one window. The sketches are those of one run.
        contains: numbers of earlier passes whose losses are part of this one.
        keeps_graph: whether `retain_graph=True` was given: another loss of the same micro-batch may follow.
        has_other_inputs: whether the graph has a leaf that is no parameter, as in adversarial training.
        evaluating: optimizers whose model was in evaluation mode.
        versions: `Optimizers.versions()` after it.
        dtype: the gradients' least precise dtype.
        rank: the rank that ran it.
        leaves: the bits of the leaves that got a gradient.
        num_hooked: leaves whose gradient hooks of the script have changed.
        is_finite: whether no gradient has an inf or nan.
        scale: loss scale of a GradScaler. It is a tensor until an update takes place.
        cleared: the call of `zero_grad()` that cleared gradients after this pass.
        clipped: the line that clipped gradients after this pass.
        is_counted: whether an update counts it.
        used_at: by the place of an optimizer whose update counts it: how many passes had run at that update.
        excused: why it need not count: "nonfinite" (dropped), "used" (by other code), "failed" (it raised an
            exception), "other" (no micro-batch).
        is_listed: whether rank 0 has put it into its history.
    """

    number: int
    how: Literal["backward", "grad", "other"]
    loss: Loss
    site: CallSite
    sketches: SketchSet
    repeats: int | None = None
    runs: int = 1
    contains: tuple[int, ...] = ()
    keeps_graph: bool = False
    has_other_inputs: bool = False
    evaluating: frozenset[int] = frozenset()
    versions: dict[int, int] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    rank: int = 0
    leaves: int = 0
    num_hooked: int = 0
    is_finite: bool = True
    scale: Any = 1.0
    cleared: CallSite | None = None
    clipped: str = ""
    is_counted: bool = False
    used_at: dict[int, int] = field(default_factory=dict)
    excused: str = ""
    is_listed: bool = False

    @property
    def place(self) -> int:
        """The number of the call of `backward()`."""
        return self.site.place

    @property
    def call(self) -> str:
        """The call, such as "backward() at train.py:139". Empty if only libraries are on the stack."""
        return self.site.describe(FUNCTIONS[self.how])


class ProblemOfUpdate(NamedTuple):
    """Something wrong in one update.

    Attributes:
        kind: one of `KINDS`.
        cause: a cause that `remedies.py` knows.
        text: what is wrong. "{name}" stands for an amount, or for `parameters`.
        amounts: numbers that may differ in other updates with the same problem.
        location: the line of the script.
        call: what the line calls, such as "step() at train.py:139".
        factor: by how much; None: there is no one number.
        parameters: the names of those that it is about; empty: of all.
    """

    kind: str
    cause: str
    text: str
    amounts: dict[str, Amount]
    location: str
    call: str
    factor: float | None
    parameters: str


@dataclass(eq=False)
class Outlier:
    """A parameter whose gradient has other weights than the rest.

    Attributes:
        parameter: its index in the update.
        ratio: its weights relative to the rest; None: it is no multiple.
        weights: its weights of the passes relative to the rest; empty: unknown.
        stale_weight: its weight of the last update's gradient.
    """

    parameter: int
    ratio: float | None
    weights: list[float] = field(default_factory=list)
    stale_weight: float = 0.0


@dataclass(eq=False)
class Equations:
    """The sketches of an update, for least squares. Row r belongs to parameter `owners[r]`.

    Attributes:
        passes: float64 [rows, passes]: sketches of the gradients that each pass has delivered.
        used: float64 [rows]: sketches of the gradients that the optimizer has used.
        stale: float64 [rows]: the same of the last update.
        owners: int64 [rows].
        decay: float64 [rows]: sketches of the parameters, if other code may have added weight decay to
            gradients.
    """

    passes: Tensor
    used: Tensor
    stale: Tensor
    owners: Tensor
    decay: Tensor | None = None


@dataclass(eq=False)
class Update:
    """One update of an optimizer: which gradients it has used, and what they consist of.

    Attributes:
        optimizer: the optimizer's number.
        passes: the backward passes of its window.
        site: the call of `step()`.
        dtype: the least precise dtype of gradients and sums.
        is_sharded: whether the gradients are shards, as with FSDP2.
        clipped: the factor of `clip_grad_norm_`.
        misses_passes: whether sketches of passes of its window were freed.
        is_touched: whether unknown code has changed the gradients after the last backward pass.
        evaluating: passes in evaluation mode, if others were not.
        moved: passes after which other code has changed the parameters, before another pass.
        is_restored: whether the optimizer was, or may have been, loaded or copied in this window, so that its
            sums may have gradients that no pass of this process has delivered.
        number: counts the optimizer's updates from 1.
        num_passes: how many passes had run before it.
        shapes, names: of the parameters.
        equations: the sketches; None once weights are known.
        weights, errors: weight of each pass, and its standard error.
        unit: a weight of usual size.
        is_kept: whether p.grad of some parameters was not cleared since the last update.
        stale_weight: weight of the gradient of the last update.
        stale_parameters: those that may have it; empty: all.
        late_weight: largest weight of a pass that the last update has lost.
        rest: the part of the gradient that is no sum of those of passes, relative to its norm.
        rest_if_fair: the same with equal weights.
        rest_if_others_fair: the same with equal weights, except for those that are 0.
        outliers: parameters with other weights.
        apart: largest relative distance between the gradients of two ranks.
        is_checked: whether the weights say anything.
        lost: positions of passes that do not count.
        is_vague: whether sums of weights say nothing, because of another problem.
        left_over: passes that are losses of another optimizer, whose gradients nothing has cleared.
        other_losses: what they are, in words.
        unmade: the checks that were not made: `EVENNESS`, `SUM`.
        problems: what is wrong.
        notes: what else is to be said.
    """

    optimizer: int
    passes: list[BackwardPass]
    site: CallSite
    dtype: torch.dtype = torch.float32
    is_sharded: bool = False
    clipped: float = 1.0
    misses_passes: bool = False
    is_touched: bool = False
    is_restored: bool = False
    evaluating: frozenset[int] = frozenset()
    moved: frozenset[int] = frozenset()
    number: int = 0
    num_passes: int = 0
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    equations: Equations | None = None
    weights: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    unit: float = 0.0
    is_kept: bool = False
    stale_weight: float = 0.0
    stale_parameters: list[str] = field(default_factory=list)
    late_weight: float = 0.0
    rest: float = 1.0
    rest_if_fair: float = 1.0
    rest_if_others_fair: float = 1.0
    outliers: list[Outlier] = field(default_factory=list)
    apart: float = 0.0
    is_checked: bool = False
    lost: list[int] = field(default_factory=list)
    is_vague: bool = False
    left_over: list[BackwardPass] = field(default_factory=list)
    other_losses: str = ""
    unmade: set[str] = field(default_factory=set)
    problems: list[ProblemOfUpdate] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_problem(
        self,
        kind: str,
        cause: str,
        text: str,
        *,
        at: BackwardPass | None = None,
        cleared: Sequence[CallSite] = (),
        call: str = "",
        factor: float | None = None,
        parameters: str = "",
        amounts: dict[str, Amount] | None = None,
    ) -> None:
        """Add a problem.

        Args:
            kind: one of `KINDS`.
            cause: a cause that `remedies.py` knows.
            text: what is wrong, with "{name}" for each amount and for `parameters`.
            at: the backward pass that has the problem. Without it, the problem is at `step()`.
            cleared: the calls of `zero_grad()` before `step()` that have cleared gradients.
            call: where to look, if that is no single call. The location is still the line of `step()`.
            factor: by how much.
            parameters: the names of those that it is about.
            amounts: numbers in the text that may differ from update to update.
        """
        location, step = self.site.line, self.site.describe("step()")
        lines = sorted(site.line for site in cleared if site.line)
        if at is not None and at.site.line:
            location, call = at.site.line, at.call
        elif lines:
            location, call = lines[0], f"{describe_calls(cleared, 'zero_grad()')}, before {step}"
        call = call or step
        self.problems.append(
            ProblemOfUpdate(kind, cause, text, amounts or {}, location, call, factor, parameters)
        )


class ListedOptimizer(NamedTuple):
    """What the report says of an optimizer.

    Attributes:
        place: counts the report's optimizers from 0.
        name: its class.
        made: where it was made, such as "made at train.py:12"; empty: unknown.
    """

    place: int
    name: str
    made: str = ""

    def __str__(self) -> str:
        return f"{self.name}, {self.made}" if self.made else self.name


class History:
    """Passes and updates that are not judged yet, and counts of all.

    Attributes:
        passes: passes that are not judged, in order.
        judged_passes: number of passes that are.
        updates: updates that are not judged.
        window_starts: by optimizer: number of the first pass of its window.
        update_counts: by optimizer: number of its updates.
        optimizers: those that have made updates.
        owned_by_any: the bits of the leaves that any optimizer has ever had.
        rank: of this process.
        num_ranks: ranks whose micro-batches are put together.
        notes: notes of the report, without repetitions.
        failed: whether the audit could not go on.
    """

    def __init__(self) -> None:
        self.passes: list[BackwardPass] = []
        self.judged_passes = 0
        self.updates: list[Update] = []
        self.window_starts: Counter[int] = Counter()
        self.update_counts: Counter[int] = Counter()
        self.optimizers: dict[int, ListedOptimizer] = {}
        self.owned_by_any = 0
        self.rank = 0
        self.num_ranks = 1
        self.notes: dict[str, None] = {}
        self.failed = False

    def add_note(self, text: str) -> None:
        """Add a note to the report, if it is new."""
        if len(self.notes) < MAX_NOTES:
            self.notes[text] = None

    @property
    def num_passes(self) -> int:
        """Number of passes so far."""
        return self.judged_passes + len(self.passes)

    @property
    def num_updates(self) -> int:
        """Number of updates so far."""
        return sum(self.update_counts.values())

    def passes_since(self, number: int) -> list[BackwardPass]:
        """Return the passes from this number on."""
        return self.passes[max(0, number - self.judged_passes) :]

    def window(self, optimizer: int) -> list[BackwardPass]:
        """Return the passes of an optimizer's window."""
        return self.passes_since(self.window_starts[optimizer])

    def drop_passes_before(self, number: int) -> list[BackwardPass]:
        """Remove passes below this number, and return them."""
        count = max(0, number - self.judged_passes)
        old, self.passes = self.passes[:count], self.passes[count:]
        self.judged_passes += len(old)
        return old
