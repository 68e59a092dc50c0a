"""Losses that go through backward() twice, or that are part of a later loss."""

from __future__ import annotations

from collections import Counter

import torch

from .amounts import Amount
from .records import SUM, BackwardPass, Update
from .wording import format_count


def find_repetitions(update: Update) -> dict[int, BackwardPass]:
    """Find losses that go through backward() twice, and count their runs.

    Returns:
        By a pass's number: the first pass of the same loss.
    """
    originals = {each.number: each for each in update.passes}
    for each in update.passes:
        original = None if each.repeats is None else originals.get(each.repeats)
        if original is not None and all(
            torch.allclose(each.sketches[leaf], original.sketches[leaf]) for leaf in each.sketches
        ):
            original.runs += 1
            originals[each.number], each.excused = original, "used"
    contained = Counter(
        originals[number].number for each in update.passes for number in each.contains if number in originals
    )
    if contained:
        number, count = contained.most_common(1)[0]
        times = float(count + 1)
        text = "a loss that went through backward() is part of a later loss, so it counts up to {times.most} "
        text += "times"
        amounts = {"times": Amount.of(format_count, times)}
        update.add_problem("double", "part", text, at=originals[number], factor=times, amounts=amounts)
        update.unmade.add(SUM)
    return originals
