"""Judges updates in blocks, collects what is found, and forgets the updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass

from .findings import Findings, Problem, Row
from .number_ranges import NumberRanges
from .other_losses import are_left_over, counting_passes, describe_other_losses, find_other_losses
from .records import BackwardPass, History, Update
from .remedies import find_remedy
from .report_rows import describe_check, describe_weights
from .sums import judge_sums
from .verdicts import CHECKED_REST, Expectations, judge_update
from .wording import plural

#: After so many updates the older half is judged and forgotten, so that memory stays flat.
BLOCK = 512

#: What is said of passes that need not count.
EXCUSES = {
    "nonfinite": "dropped because of an inf or nan",
    "failed": "raised an exception and reached no update",
    "other": "in no update, and no micro-batches by their looks: a warm-up, or a gradient to look at",
}


@dataclass(frozen=True)
class Judge:
    """What the updates of a script are judged by.

    Attributes:
        steps: micro-batches of a full window on a rank, if they are to be checked.
        scale: what the shares of a window should add up to. None: 1, or a factor that the loss has of its
            own.
        ignore: kinds of problems that are not reported.
    """

    steps: int | None = None
    scale: float | None = None
    ignore: Container[str] = ()

    def judge(
        self, history: History, findings: Findings, updates: Sequence[Update], window_starts: Sequence[int]
    ) -> list[BackwardPass]:
        """Find problems in some updates and between them, and remove the updates from the history.

        Args:
            history: it may have more updates.
            findings: what is found is added.
            updates: the oldest updates of the history.
            window_starts: numbers of passes from which on optimizers may still use them. Empty: none may.

        Returns:
            Backward passes that are in no update.
        """
        _mark_counted(history, findings)
        for update in updates:
            _excuse(update, findings)
        known = ((each.place, each.loss.count) for each in history.passes)
        sizes = Counter((place, count) for place, count in known if count is not None)
        expectations = Expectations(self.steps, history.num_ranks, sizes)
        for update in updates:
            _find_left_over(update, history, findings)
            judge_update(update, expectations)
        judge_sums(updates, self.scale, history.num_ranks)
        for update in updates:
            self._collect(update, history, findings)
        findings.updates += len(updates)
        return _forget(history, findings, updates, window_starts)

    def _collect(self, update: Update, history: History, findings: Findings) -> None:
        listed = history.optimizers[update.optimizer]
        problems = [each for each in update.problems if each.kind not in self.ignore]
        for note in update.notes:
            history.add_note(note)
        kinds = sorted({each.kind for each in problems})
        verdict = "PROBLEM: " + ", ".join(kinds) if kinds else describe_check(update)
        row = Row(len(update.passes), *describe_weights(update), verdict)
        findings.rows.setdefault(listed.place, {}).setdefault(row, NumberRanges()).add(update.number)
        for each in problems:
            key = each.kind, each.cause, each.location, each.parameters
            remedy = find_remedy(
                each.kind, each.cause, update.site.library, history.num_ranks, update.passes[0].loss.unit
            )
            problem = findings.problems.setdefault(
                key, Problem(each.kind, each.location, each.call, remedy, each.factor)
            )
            problem.include(each, listed, update.number)
        if update.problems:
            findings.unmade |= update.unmade
        if not update.is_checked:
            findings.unchecked.add(update.number)
            return
        findings.checked += 1
        findings.rest[update.dtype] = max(update.rest, findings.rest.get(update.dtype, 0.0))
        findings.has_unknown_loss |= any(each.loss.kind == "unknown" for each in update.passes)
        findings.has_undivided_sum |= any(
            each.loss.kind == "sum" and each.loss.factor == 1 for each in update.passes
        )


def _mark_counted(history: History, findings: Findings) -> None:
    """Note which passes any update counts, and from which places."""
    for update in history.updates:
        place = history.optimizers[update.optimizer].place
        for each in counting_passes(update):
            each.is_counted = True
            each.used_at.setdefault(place, update.num_passes)
    findings.places |= {each.place for each in history.passes if each.is_counted}


def _find_left_over(update: Update, history: History, findings: Findings) -> None:
    """Find losses of another optimizer whose gradients are left over in an update."""
    if update.rest > CHECKED_REST:
        return
    place = history.optimizers[update.optimizer].place
    others = find_other_losses(update, place)
    if others and are_left_over(update, others, findings.first_places.get(place, ())):
        losses = describe_other_losses(others, place)
        update.left_over = others
        update.other_losses = f"{losses}, which also reaches the parameters of optimizer {place + 1}"
    elif others:
        history.add_note(
            f"optimizer {place + 1} also counts {describe_other_losses(others, place)}: if that is not "
            "meant, call its zero_grad() after that backward pass"
        )
    findings.first_places.setdefault(place, frozenset(each.place for each in counting_passes(update)))


def _excuse(update: Update, findings: Findings) -> None:
    """Excuse passes that do not look like micro-batches: a warm-up, or `grad` to look at a gradient."""
    for each in update.passes:
        looks_different = update.number == 1 or each.how == "grad" or each.has_other_inputs
        if findings.places and each.place not in findings.places and looks_different:
            each.excused = each.excused or "other"


def _forget(
    history: History, findings: Findings, updates: Sequence[Update], window_starts: Sequence[int]
) -> list[BackwardPass]:
    """Remove judged updates, and the passes that neither other updates nor optimizers need.

    Returns:
        The removed passes that are in no update, and should be.
    """
    done = {id(each) for each in updates}
    judged = {id(one) for each in updates for one in each.passes}
    history.updates = [each for each in history.updates if id(each) not in done]
    needed = {id(one): one.number for each in history.updates for one in each.passes}
    cut = min([*window_starts, *needed.values()], default=history.num_passes)
    if history.num_ranks > 1:  # numbers of different ranks cannot be compared
        cut = history.num_passes + 1
    old: list[BackwardPass] = []
    kept: list[BackwardPass] = []
    for each in history.passes:
        (old if each.number < cut and id(each) not in needed else kept).append(each)
    history.passes = kept
    history.judged_passes += len(old)
    findings.micro_batches += sum(each.how != "grad" or each.is_counted for each in old)
    findings.excused.update(each.excused for each in old if each.excused and not each.is_counted)
    return [
        each
        for each in old
        if each.how == "backward" and not (each.is_counted or each.excused or id(each) in judged)
    ]


def add_final_notes(history: History, findings: Findings, pending: int) -> None:
    """Add notes on what no verdict tells.

    Args:
        history: gets the notes.
        findings: of all updates.
        pending: micro-batches after the last update.
    """
    if len(findings.unchecked):
        numbers = findings.unchecked
        updates = "update" if len(numbers) == 1 else "updates"
        history.add_note(
            f"{updates} {numbers} not checked: the gradient is no sum of what autograd delivered"
        )
    for reason, text in EXCUSES.items():
        count = findings.excused[reason]
        if count:
            history.add_note(f"{plural(count, 'backward pass')} {text}")
    if pending:
        history.add_note(f"{plural(pending, 'micro-batch')} after the last update reached no update")
