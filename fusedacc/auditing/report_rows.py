"""How the report's table describes the weights of an update."""

from __future__ import annotations

import statistics

from .records import Update
from .verdicts import shares
from .wording import differ, format_fraction

#: Weights that a row shows one by one.
SHOWN = 8


def describe_weights(update: Update) -> tuple[str, str]:
    """Return the weights of an update's micro-batches, and their sum, in words."""
    if not update.is_checked:
        return "not checked", ""
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
    is_one_loss = len({each.place for each in update.passes}) == 1
    is_one_loss &= all(each.loss.parts == 1 for each in update.passes)
    is_stale = bool(update.stale_weight or update.late_weight)
    total = format_fraction(sum(values)) if None not in known and is_one_loss and not is_stale else ""
    return text + (" + the previous update" if update.stale_weight else ""), total


def _weights(update: Update, values: list[float], errors: list[float], are_known: bool) -> str:
    counts = [each.loss.count or 1.0 for each in update.passes]
    of_tokens = [value / count for value, count in zip(values, counts, strict=True)]
    token_errors = [error / count for error, count in zip(errors, counts, strict=True)]
    if len(values) > 1 and not differ(values, errors):
        mean = format_fraction(statistics.fmean(values))
        is_exact = format_fraction(values[0]) == format_fraction(values[-1]) == mean
        return f"{mean} each" if is_exact else f"about {mean} each"
    if len(values) > 1 and are_known and not differ(of_tokens, token_errors):
        return "by samples or tokens"
    counting = [i for i in range(len(values)) if i not in update.lost]
    is_long = len(values) > SHOWN
    if update.lost and is_long and counting:
        live = [values[i] for i in counting]
        if not differ(live, [errors[i] for i in counting]):
            mean = format_fraction(statistics.fmean(live))
            return f"{mean} of {len(live)}, 0 of {len(update.lost)}"
    shown = ["0" if i in update.lost else format_fraction(value) for i, value in enumerate(values)]
    return " ".join(shown[:SHOWN]) + (" ..." if is_long else "")
