"""How the report's table describes the weights of an update."""

from __future__ import annotations

import statistics

from .records import Update
from .verdicts import shares
from .wording import differ, format_fraction, is_close

#: Weights, and sums of different losses, that a row shows one by one.
SHOWN, SHOWN_SUMS = 8, 3
#: Stands for weights and sums that could not be determined.
UNKNOWN = "unknown"
#: Follows the weights and the sum if the gradient of the previous update counts too.
PREVIOUS = " + the previous update"


def describe_weights(update: Update) -> tuple[str, str]:
    """Return the weights of an update's micro-batches, and their sum, in words."""
    if not update.is_checked:
        return UNKNOWN, UNKNOWN
    known = shares(update)
    values = [
        weight * each.loss.factor / update.clipped if share is None else share
        for weight, share, each in zip(update.weights, known, update.passes, strict=True)
    ]
    errors = [
        error * abs(value / weight) if weight else 0.0
        for value, weight, error in zip(values, update.weights, update.errors, strict=True)
    ]
    text = _weights(update, values, errors, None not in known)
    previous = PREVIOUS if update.stale_weight else ""
    has_parts = any(problem.cause == "part" for problem in update.problems)  # of losses in later losses
    if None in known or update.late_weight or has_parts:
        return text + previous, UNKNOWN
    return text + previous, _sums(update, values) + previous


def describe_check(update: Update) -> str:
    """Say whether an update without a problem was checked."""
    if not update.is_checked:
        return "not checked"
    return "partly checked" if update.unmade else "ok"


def _sums(update: Update, values: list[float]) -> str:
    """Write the sum of the weights. Losses of different lines have their own sums, unless they take turns."""
    sums: dict[int, float] = {}
    for each, value in zip(update.passes, values, strict=True):
        sums[each.place] = sums.get(each.place, 0.0) + value
    total = sum(sums.values())
    if len(sums) == 1 or is_close(total, 1):
        return format_fraction(total)
    written = [format_fraction(value) for value in sums.values()]
    return f"{written[0]} for each loss" if len({*written}) == 1 else ", ".join(written[:SHOWN_SUMS])


def _weights(update: Update, values: list[float], errors: list[float], are_known: bool) -> str:
    counts = [each.loss.count or 1.0 for each in update.passes]
    of_tokens = [value / count for value, count in zip(values, counts, strict=True)]
    token_errors = [error / count for error, count in zip(errors, counts, strict=True)]
    if len(values) > 1 and not differ(values, errors):
        mean = format_fraction(statistics.fmean(values))
        is_exact = format_fraction(values[0]) == format_fraction(values[-1]) == mean
        return f"{mean} each" if is_exact else f"about {mean} each"
    if len(values) > 1 and are_known and not differ(of_tokens, token_errors):
        return f"by {update.passes[0].loss.unit}s"
    counting = [i for i in range(len(values)) if i not in update.lost]
    is_long = len(values) > SHOWN
    if update.lost and is_long and counting:
        live = [values[i] for i in counting]
        if not differ(live, [errors[i] for i in counting]):
            mean = format_fraction(statistics.fmean(live))
            return f"{mean} of {len(live)}, 0 of {len(update.lost)}"
    shown = ["0" if i in update.lost else format_fraction(value) for i, value in enumerate(values)]
    return " ".join(shown[:SHOWN]) + (" ..." if is_long else "")
