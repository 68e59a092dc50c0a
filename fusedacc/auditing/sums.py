"""Verdicts: whether the weights of an update add up to what they should.

A micro-batch's share is its weight times the factor of its loss. The shares of a window should add up to 1,
or to a factor in the loss, as in `0.5 * mse`. Backward passes that are called from different
places are losses of different kinds, with a sum each.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .records import Update
from .verdicts import shares
from .wording import TOLERANCE, are_steady, format_fraction, format_number, format_sites, is_close, plural

#: Tolerance of a sum over tokens: its divisor is a number of tokens, so small differences mean something.
SUM_TOLERANCE = 0.01
#: With these problems, the sum of an update's weights says nothing more.
TELL_ENOUGH = {"lost", "ranks", "stale"}


class Window(NamedTuple):
    """The micro-batches of one place in an update.

    Attributes:
        update: the update.
        positions: their positions in it.
        total: the sum of their shares.
        total_of_update: the sum of the shares of all places; None: unknown.
    """

    update: Update
    positions: list[int]
    total: float
    total_of_update: float | None


class Verdict(NamedTuple):
    """What is wrong with a sum."""

    kind: str
    text: str
    factor: float


def judge_sums(updates: Sequence[Update], scale: float | None, num_ranks: int) -> None:
    """Check the sums of several updates.

    Args:
        updates: the problems are added to them.
        scale: what the shares of a window should add up to. None: 1, or a factor that the loss has of its
            own.
        num_ranks: ranks whose micro-batches are put together.
    """
    by_place: dict[int, list[Window]] = {}
    for update in updates:
        kinds = {problem.kind for problem in update.problems}
        if update.is_checked and not update.is_vague and not kinds & TELL_ENOUGH:
            for place, window in _windows(update):
                by_place.setdefault(place, []).append(window)
    for windows in by_place.values():
        others = _Windows(windows, num_ranks)
        for window in windows:
            verdict = _Sum(window, others, scale).judge()
            if verdict is not None:
                kind, text, factor = verdict
                line = window.update.passes[window.positions[0]].line
                window.update.add_problem(kind, text, line, factor, text.partition(" ")[0])


def _windows(update: Update) -> list[tuple[int, Window]]:
    """Return the windows whose shares are all known, with their places."""
    groups: dict[int, list[int]] = {}
    for i, each in enumerate(update.passes):
        groups.setdefault(each.place, []).append(i)
    known = shares(update)
    all_known = [share for share in known if share is not None]
    total_of_update = sum(all_known) if len(all_known) == len(known) else None
    found = []
    for place, group in groups.items():
        own = [share for i in group if (share := known[i]) is not None]
        if len(own) == len(group):
            found.append((place, Window(update, group, sum(own), total_of_update)))
    return found


@dataclass
class _Windows:
    """All windows of one place.

    Attributes:
        windows: them.
        num_ranks: number of ranks.
    """

    windows: list[Window]
    num_ranks: int

    def __post_init__(self) -> None:
        lengths = [len(each.positions) for each in self.windows]
        #: Micro-batches of a full window.
        self.length = statistics.mode(lengths)
        self.has_lengths = len(set(lengths)) > 1
        self.full = [each.total for each in self.windows if len(each.positions) == self.length]
        self.totals = [each.total for each in self.windows]
        self.usual = statistics.median(self.full)
        losses = [each.update.passes[i].loss for each in self.windows for i in each.positions]
        self.factors = [loss.factor for loss in losses]


class _Sum:
    """The sum of one window, and what may be wrong with it. `judge` tries one cause after another."""

    def __init__(self, window: Window, others: _Windows, scale: float | None) -> None:
        self.total, self.others, self.scale = window.total, others, scale
        self.total_of_update = window.total_of_update
        self.target = 1.0 if scale is None else scale
        self.factor = self.total / self.target
        self.count = len(window.positions)
        self.ranks = others.num_ranks
        # FSDP2 writes the gradients of shards, so it is unknown whether other code has changed them since.
        self.is_touched = window.update.is_touched or window.update.is_sharded
        self.passes = [window.update.passes[i] for i in window.positions]
        self.losses = [each.loss for each in self.passes]
        self.kind = self.losses[0].kind
        self.tokens = sum(loss.count or 0.0 for loss in self.losses)

    def judge(self) -> Verdict | None:
        """Return what is wrong; None: nothing."""
        tolerance = SUM_TOLERANCE if self.kind == "sum" else TOLERANCE
        # Several tasks may take turns in a window, each with a line of its own.
        totals = [total for total in (self.total, self.total_of_update) if total is not None]
        if any(abs(total - self.target) <= tolerance * self.target for total in totals):
            return None
        losses = self._losses_per_micro_batch()
        if losses > 1 and is_close(self.total, self.target * losses):
            return None
        # Writes to p.grad.data are not seen, but then nothing in the loss explains why sums differ.
        may_be_touched = self.is_touched or are_steady(self.others.factors, 1e-6)
        if may_be_touched and len(self.others.full) > 1 and not are_steady(self.others.full):
            # The script clips by its own code, for example. Then a sum may be 1/k by chance.
            return self._loss_scale()
        return (
            self._loss_scale()
            or self._partial_window()
            or self._wrong_divisor()
            or self._per_sample()
            or self._multiple()
            or self._unlike_others()
        )

    def _losses_per_micro_batch(self) -> float:
        """Return how many losses a micro-batch has, if each has its own backward().

        All of them but the last are called with retain_graph=True.
        """
        last = sum(not each.keeps_graph for each in self.passes)
        return self.count / last if last else 1.0

    def _loss_scale(self) -> Verdict | None:
        scales = {each.scale for each in self.passes} - {1.0}
        fraction = format_fraction(self.total)
        if any(is_close(self.total, self.target * scale) for scale in scales):
            return Verdict(
                "scale", f"the loss scale {fraction} is not removed from the gradients", self.total
            )
        if any(is_close(self.total * scale, self.target) for scale in scales):
            text = f"the gradient is {fraction} of what it should be: the loss scale is removed twice"
            return Verdict("scale", text, self.total)
        return None

    def _partial_window(self) -> Verdict | None:
        """Find a window that is not full, but divides as if it were."""
        others, usual = self.others, self.others.usual
        if (
            self.count == others.length
            or is_close(usual, self.target * others.length)  # nothing divides
            or not are_steady(others.full)
            or is_close(self.total, usual)
            or not is_close(self.total / usual, self.count / others.length)
        ):
            return None
        text = (
            f"it holds {plural(self.count, 'micro-batch')} instead of {others.length} but divides by the "
            f"same number, so its gradient is {format_fraction(self.total / usual)} of what it should be"
        )
        return Verdict("scale", text, self.total / usual)

    def _wrong_divisor(self) -> Verdict | None:
        """Find a division by a whole number that is not the number of micro-batches."""
        length = self.others.length
        right = {self.count, self.count // self.ranks, length, length // self.ranks}
        for divisor in self.losses[0].divisors:
            is_whole = divisor > 1 and divisor == round(divisor)
            explains = is_close(self.total * divisor, self.target * self.count)
            if is_whole and divisor not in right and explains:
                text = (
                    f"the loss is divided by {divisor:g}, but an update holds "
                    f"{plural(self.count, 'micro-batch')}: {format_fraction(self.factor)} of their mean"
                )
                return Verdict("scale", text, self.factor)
        return None

    def _per_sample(self) -> Verdict | None:
        """Find windows in which each sample counts the same, whatever their number is."""
        if self.kind != "mean" or not self.tokens:
            return None
        rates = [
            window.total / sum(window.update.passes[i].loss.count or 0.0 for i in window.positions)
            for window in self.others.windows
        ]
        if len(rates) < 2 or not are_steady(rates, 0.001) or are_steady(self.others.totals):
            return None
        rate = format_fraction(self.total / self.tokens)
        text = f"every sample counts {rate}, however many samples an update holds"
        return Verdict("scale", text, self.factor)

    def _multiple(self) -> Verdict | None:
        """Find a division by the number of micro-batches or ranks that is missing, or made twice."""
        count, ranks, factor = self.count, self.ranks, self.factor
        times = self._possible_multiples()
        fraction = format_fraction(factor)
        is_of_ranks = ranks > 1 and is_close(factor, ranks) and ranks in times
        if is_of_ranks and (ranks != count // ranks or self._divisions()):
            text = f"the ranks' gradients are added, not averaged: {fraction} times their mean"
            return Verdict("ranks", text, factor)
        batches = plural(count, "micro-batch")
        if count > 1 and is_close(factor, count * count) and count * count in times:
            text = f"the gradient is {fraction} times the mean of {batches}: it is multiplied by their number"
            return Verdict("scale", text, factor)
        if any(is_close(self.total, self.target * multiple) for multiple in times):
            text = f"the gradient is {fraction} times the mean of {batches}: nothing divides by their number"
            return Verdict("scale", text, factor)
        if any(is_close(self.total * multiple, self.target) for multiple in times):
            by_ranks = is_close(self.total * ranks, self.target) and ranks > 1
            by = ", by the number of ranks too" if by_ranks else ""
            cleared = format_sites(each.cleared for each in self.passes[:-1])
            unless = f", or zero_grad() clears all but one at {cleared}" if cleared else ""
            text = f"the gradient is {fraction} of the mean of {batches}: something divides twice{by}{unless}"
            return Verdict("scale", text, factor)
        return None

    def _divisions(self) -> int:
        """Return how many constants of the loss divide by the micro-batches of all ranks, or of one."""
        loss = self.losses[0]
        constants = [*loss.factors, *(1 / divisor for divisor in loss.divisors if divisor)]
        return sum(is_close(x, 1 / self.count) or is_close(x, self.ranks / self.count) for x in constants)

    def _possible_multiples(self) -> set[int]:
        """Return by which numbers the sum may be wrong, if no factor of the loss's own explains it."""
        loss, count, ranks, total = self.losses[0], self.count, self.ranks, self.total
        if count == 1 or self._is_mean_of_sums():
            return set()
        if loss.parts > 1 and is_close(total * loss.parts, self.target):  # a mean over the parts of a loss
            return set()
        # A factor of the loss's own may look like a division by k: 0.5 * mse / 2, or mse * 2 / 2.
        is_own = any(is_close(x, total) for x in loss.factors)
        if is_own and self._divisions() > is_close(total, 1 / count):
            return set()
        if self.others.has_lengths and not self.is_touched and are_steady(self.others.totals):
            return set()
        return {count, count // ranks, ranks, count * count} - {0, 1}

    def _is_mean_of_sums(self) -> bool:
        """Return whether the loss is a sum that is divided by the number of micro-batches only.

        Then nothing says by how many samples or tokens it should be divided.
        """
        loss, length = self.losses[0], self.others.length
        factor = loss.factor / (loss.count or 1.0) if loss.is_divided_sum else loss.factor
        numbers = (self.count, self.count / self.ranks, length, length / self.ranks)
        is_sum = loss.kind == "sum" or loss.is_divided_sum
        return is_sum and loss.count != 1 and any(math.isclose(factor * x, 1, rel_tol=1e-6) for x in numbers)

    def _unlike_others(self) -> Verdict | None:
        """Compare a sum that has no simple cause with those of other updates."""
        total, usual, others = self.total, self.others.usual, self.others
        if self.scale is not None:
            text = f"the weights add up to {format_fraction(total)} instead of {format_fraction(self.target)}"
            return Verdict("scale", text, self.factor)
        is_sum = self.kind == "sum"
        if is_sum and not are_steady(others.factors, 0.002) and not are_steady(others.full, 0.002):
            times = format_number(1 / total)
            text = f"the losses are divided by {times} times the number of their samples or tokens"
            return Verdict("scale", text, self.factor)
        has_one_factor = are_steady(others.factors, 1e-6)
        is_even = are_steady(others.full) and has_one_factor
        if is_sum:  # divided by the tokens of each window, and maybe multiplied by a factor of its own
            is_divided = len(others.full) > 1 and are_steady(others.full) and not has_one_factor
            is_even = is_close(usual, self.target) or is_divided
        if is_even and not self.is_touched and not is_close(total, usual):
            sums = format_fraction(total), format_fraction(usual)
            text = f"the weights add up to {sums[0]}, in most other updates to {sums[1]}"
            return Verdict("scale", text, total / usual)
        return None
