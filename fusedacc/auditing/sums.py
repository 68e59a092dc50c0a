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
from itertools import pairwise
from typing import NamedTuple

from .amounts import Amount
from .call_sites import describe_calls
from .records import SUM, Update
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
    """What is wrong with a sum: the arguments of `Update.add_problem`."""

    kind: str
    cause: str
    text: str
    factor: float
    amounts: dict[str, Amount]


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
        if update.is_vague or kinds & TELL_ENOUGH:
            update.unmade.add(SUM)
        elif update.is_checked:
            found = _windows(update)
            if len(found) < len({each.place for each in update.passes}):
                update.unmade.add(SUM)
            if not _go_on_elsewhere([window for _, window in found], scale):
                for place, window in found:
                    by_place.setdefault(place, []).append(window)
    for windows in by_place.values():
        others = _Windows(windows, num_ranks)
        for window in windows:
            total = _Sum(window, others, scale)
            verdict = total.judge()
            if total.is_unknown:
                window.update.unmade.add(SUM)
            if verdict is not None:
                kind, cause, text, factor, amounts = verdict
                first = window.update.passes[window.positions[0]]
                window.update.add_problem(kind, cause, text, at=first, factor=factor, amounts=amounts)


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


def _go_on_elsewhere(windows: Sequence[Window], scale: float | None) -> bool:
    """Return whether one window was begun at one place and ended at others, as after a restart.

    Losses of several kinds take turns instead.
    """
    in_turn = all(first.positions[-1] < later.positions[0] for first, later in pairwise(windows))
    total = sum(window.total for window in windows)
    return len(windows) > 1 and in_turn and is_close(total, 1.0 if scale is None else scale)


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
    """The sum of one window, and what may be wrong with it. `judge` tries one cause after another.

    Attributes:
        is_unknown: whether nothing tells what the sum should be.
    """

    def __init__(self, window: Window, others: _Windows, scale: float | None) -> None:
        self.total, self.others, self.scale = window.total, others, scale
        self.is_unknown = False
        self.total_of_update = window.total_of_update
        self.target = 1.0 if scale is None else scale
        self.factor = self.total / self.target
        self.count = len(window.positions)
        self.ranks = others.num_ranks
        # FSDP2 writes the gradients of shards, so it is unknown whether other code has changed them since.
        self.is_touched = window.update.is_touched or window.update.is_sharded
        self.is_all = len(window.positions) == len(window.update.passes)
        self.passes = [window.update.passes[i] for i in window.positions]
        self.losses = [each.loss for each in self.passes]
        self.kind = self.losses[0].kind
        self.tokens = sum(loss.count or 0.0 for loss in self.losses)

    def judge(self) -> Verdict | None:
        """Return what is wrong; None: nothing."""
        tolerance = SUM_TOLERANCE if self.kind == "sum" else TOLERANCE
        # Tasks with different lines may take turns in a window.
        totals = [total for total in (self.total, self.total_of_update) if total is not None]
        if any(abs(total - self.target) <= tolerance * self.target for total in totals):
            return None
        losses = self._losses_per_micro_batch()
        if losses > 1 and any(
            is_close(self.total, self.target * losses * factor) for factor in (1.0, self.losses[0].factor)
        ):
            return None
        # Writes to p.grad.data are not seen, but then nothing in the loss explains why sums differ.
        may_be_touched = self.is_touched or are_steady(self.others.factors, 1e-6)
        if may_be_touched and len(self.others.full) > 1 and not are_steady(self.others.full):
            # The script clips by its own code, for example. Then a sum may be 1/k by chance.
            verdict = self._loss_scale()
            self.is_unknown = verdict is None
            return verdict
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
        if any(is_close(self.total, self.target * scale) for scale in scales):
            text = "the loss scale is not removed: the gradient is {fraction.as_factor} what it should be"
            return _scale("loss scale", text, self.total)
        if any(is_close(self.total * scale, self.target) for scale in scales):
            text = "the gradient is {fraction.as_factor} what it should be: the loss scale is removed twice"
            return _scale("loss scale twice", text, self.total)
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
        # If full windows are wrong too, only the ratio to them is certain.
        standard = "what it should be" if is_close(usual, self.target) else "the usual one"
        text = (
            f"the update holds {self._micro_batches()} instead of {others.length}, but each loss is divided "
            f"as in the other updates, so the gradient is {{fraction.as_factor}} {standard}"
        )
        cause = "not full" if self.count < others.length else "left over"
        return _scale(cause, text, self.total / usual)

    def _wrong_divisor(self) -> Verdict | None:
        """Find a division by a whole number that is not the number of micro-batches."""
        length = self.others.length
        right = {self.count, self.count // self.ranks, length, length // self.ranks}
        for divisor in self.losses[0].divisors:
            is_whole = divisor > 1 and divisor == round(divisor)
            explains = is_close(self.total * divisor, self.target * self.count)
            if is_whole and divisor not in right and explains:
                text = (
                    f"each loss is divided by {divisor:g}, but the update holds {self._micro_batches()}, so "
                    "the gradient is {fraction.as_factor} what it should be"
                )
                return _scale("divisor", text, self.factor)
        return None

    def _per_sample(self) -> Verdict | None:
        """Find windows in which each label or value counts the same, whatever their number is."""
        if self.kind != "mean" or not self.tokens or is_close(self.factor, self.count):
            return None
        rates = [
            window.total / sum(window.update.passes[i].loss.count or 0.0 for i in window.positions)
            for window in self.others.windows
        ]
        if len(rates) < 2 or not are_steady(rates, 0.001) or are_steady(self.others.totals):
            return None
        unit = self.losses[0].unit
        text = (
            f"each {unit} counts {{rate}}, however many {unit}s the update holds, so the gradient is "
            "{fraction.as_factor} what it should be"
        )
        return _scale("samples", text, self.factor, rate=self.total / self.tokens)

    def _multiple(self) -> Verdict | None:
        """Find a division by the number of micro-batches or ranks that is missing, or made twice."""
        count, ranks, factor = self.count, self.ranks, self.factor
        times = self._possible_multiples()
        is_of_ranks = ranks > 1 and is_close(factor, ranks) and ranks in times
        if is_of_ranks and (ranks != count // ranks or self._divisions()):
            text = (
                "the ranks' gradients are added, not averaged, so the gradient is {fraction} times their mean"
            )
            return _scale("added", text, factor)._replace(kind="ranks")
        batches = self._micro_batches()
        if count > 1 and is_close(factor, count * count) and count * count in times:
            text = (
                f"the gradient is {{fraction}} times the mean of {batches}: it is multiplied by their number "
                "instead of divided"
            )
            return _scale("multiplied", text, factor)
        if count > 1 and is_close(factor, self._own_factor() * count):
            factor, times = float(count), {count}
        if any(is_close(factor, multiple) for multiple in times):
            text = (
                f"the gradient is {{fraction}} times the mean of {batches}: nothing divides by their number"
            )
            return _scale("not divided", text, factor)
        if times and is_close(self.total, self.others.usual):  # the same division as in full windows
            times = times | {self.others.length}
        if any(is_close(self.total * multiple, self.target) for multiple in times):
            by_ranks = is_close(self.total * ranks, self.target) and ranks > 1
            by = ", by the number of ranks too" if by_ranks else ""
            sites = [each.cleared for each in self.passes[:-1] if each.cleared]
            cleared = describe_calls(sites, "zero_grad()")
            unless = f", or {cleared} clears all but one" if cleared else ""
            text = (
                f"the gradient is {{fraction}} of the mean of {batches}: something divides twice{by}{unless}"
            )
            cause = "divided by ranks" if by_ranks else "divided or cleared" if cleared else "divided twice"
            return _scale(cause, text, factor)
        return None

    def _micro_batches(self) -> str:
        """Write the number of micro-batches, how many each rank has, and whether the update has others."""
        text = plural(self.count, "micro-batch")
        if not self.is_all and self.passes[0].site.line:
            return f"{text} (those of {format_sites([self.passes[0].site.line])})"
        if self.ranks > 1 and self.count % self.ranks == 0:
            text += f" ({self.count // self.ranks} on each of {self.ranks} ranks)"
        return text

    def _divisions(self) -> int:
        """Return how many constants of the loss divide by the micro-batches of all ranks, or of one."""
        loss = self.losses[0]
        constants = [*loss.factors, *(1 / divisor for divisor in loss.divisors if divisor)]
        return sum(is_close(x, 1 / self.count) or is_close(x, self.ranks / self.count) for x in constants)

    def _own_factor(self) -> float:
        """Return the factor of a mean that nothing else divides: 1/2 in (a + b) / 2. 0: none, or unsure.

        It is no division by the number of micro-batches, because the sum would not exceed 1 then.
        """
        loss = self.losses[0]
        is_steady = are_steady(self.others.factors, 1e-6) and not self.others.has_lengths
        if self.kind != "mean" or loss.divisors or self.is_touched or not is_steady or self._divisions():
            return 0.0
        is_share = self.total > self.target and not loss.is_divided_sum  # a factor above 1 may undo a mean
        return loss.factor if is_share and loss.factor < 1 else 0.0

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
        # A sum over several outputs may be k or k^2 times a mean by chance.
        is_multiplied = self.is_touched or any(is_close(x, count) for x in loss.factors)
        multiples = {count, count // ranks, ranks, count * count if is_multiplied else 0}
        if self.kind == "sum" and self._divisions() and not self.is_touched:
            return set()
        return multiples - {0, 1}

    def _is_mean_of_sums(self) -> bool:
        """Return whether the loss is a sum that is divided by the number of micro-batches only.

        Then nothing says by how many labels or values it should be divided.
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
            text = f"the weights add up to {{total}} instead of {format_fraction(self.target)}"
            return _scale("expected", text, self.factor, total=total)
        is_sum = self.kind == "sum"
        if is_sum and not are_steady(others.factors, 0.002) and not are_steady(others.full, 0.002):
            text = (
                f"the losses are divided by {{times}} times the number of their {self.losses[0].unit}s, so "
                "the gradient is {fraction.as_factor} what it should be"
            )
            verdict = _scale("tokens", text, self.factor)
            verdict.amounts["times"] = Amount.of(format_number, 1 / total)
            return verdict
        has_one_factor = are_steady(others.factors, 1e-6)
        is_even = are_steady(others.full) and has_one_factor
        if is_sum:  # divided by the tokens of each window; the loss may also have a factor
            is_divided = len(others.full) > 1 and are_steady(others.full) and not has_one_factor
            is_even = is_close(usual, self.target) or is_divided
        if is_even and not self.is_touched and not is_close(total, usual):
            text = "the weights add up to {total}, in most other updates to {usual}"
            return _scale("unlike others", text, total / usual, total=total, usual=usual)
        return None


def _scale(cause: str, text: str, factor: float, **fractions: float) -> Verdict:
    """Return a verdict whose text may name the factor as "{fraction}", and other fractions."""
    fractions["fraction"] = factor
    amounts = {name: Amount.of(format_fraction, value) for name, value in fractions.items()}
    return Verdict("scale", cause, text, factor, amounts)
