"""Verdicts: what the weights of one update say.

`judge_update` finds lost, repeated, stale and uneven micro-batches, ranks and parameters that differ.
`sums.py` checks what the weights add up to, which needs several updates.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .number_ranges import NumberRanges
from .records import BackwardPass, Update
from .wording import (
    NEGLIGIBLE,
    STANDARD_ERRORS,
    differ,
    format_fraction,
    format_names,
    format_number,
    format_sites,
    is_close,
)

#: Ranks update from different gradients if these differ by more than this share.
RANKS_APART = 0.001
#: An update is checked if at most this part of its gradient is no sum of those of micro-batches.
CHECKED_REST = 0.5
#: The same if passes are missing that may be the rest.
CHECKED_REST_OF_SOME = 0.01
#: Standard error of a weight, relative to a usual weight, above which only sums of weights are certain.
UNSURE = 0.2

SAME_GRADIENTS = (
    "some micro-batches have the same gradients, or there are more micro-batches than numbers in the "
    "sketches: only the sum of their weights is certain"
)

HOOKS = (
    "hooks of the script change the gradients of most parameters: only whether micro-batches count the same "
    "was checked"
)

OWN_FACTORS = (
    "the script multiplies the gradients of most parameters by factors of their own: only whether "
    "micro-batches count the same was checked"
)


@dataclass(frozen=True)
class Expectations:
    """What is known beside the update itself.

    Attributes:
        steps: micro-batches of a full window on a rank, if they are to be checked.
        num_ranks: ranks whose micro-batches are put together.
        sizes: by place and number of samples: how many losses there are. It tells a small last micro-batch.
    """

    steps: int | None
    num_ranks: int
    sizes: Counter[tuple[int, float]]


def judge_update(update: Update, expectations: Expectations) -> None:
    """Find problems among the weights of an update."""
    top = max(map(abs, update.weights), default=0.0)
    # A pass that another optimizer has used need not count here.
    wanted = [
        i
        for i, each in enumerate(update.passes)
        if abs(update.weights[i]) > NEGLIGIBLE * top > 0 or not ((each.is_counted and top) or each.excused)
    ]
    update.passes = [update.passes[i] for i in wanted]
    update.weights = [update.weights[i] for i in wanted]
    update.errors = [update.errors[i] for i in wanted]
    update.is_checked = bool(update.passes) and update.rest <= (
        CHECKED_REST_OF_SOME if update.misses_passes else CHECKED_REST
    )
    if not update.is_checked:
        return
    if not top:
        _judge_empty(update)
        return
    unsure = [i for i, error in enumerate(update.errors) if error > UNSURE * min(update.unit, top)]
    if unsure and len(update.passes) > 1:
        update.notes.append(SAME_GRADIENTS)
        if update.rest_if_fair > max(0.01, 10 * update.rest):
            update.is_vague = True
            text = "the micro-batches do not count the same; which ones cannot be told"
            update.add_problem("uneven", text)
        if update.problems or len(unsure) > len(update.passes) / 2:
            return
    _note_hooks(update)
    _find_lost(update, top, unsure)
    _judge_evaluation(update)
    _judge_lost(update)
    _judge_stale(update)
    steps = expectations.steps
    if steps and len(update.passes) != steps * expectations.num_ranks:
        text = f"{len(update.passes)} micro-batches instead of {steps * expectations.num_ranks}"
        update.add_problem("count", text)
    _judge_parameters(update)
    if not update.lost and not update.stale_weight and not update.late_weight:
        _judge_weights(update, expectations)


def shares(update: Update) -> list[float | None]:
    """Return what each micro-batch adds to a mean, before clipping; None if its graph does not say."""
    result: list[float | None] = []
    for each, weight in zip(update.passes, update.weights, strict=True):
        loss, share = each.loss, weight * each.loss.factor / update.clipped
        if each.num_hooked > each.leaves.bit_count() / 2:
            result.append(None)  # the hooks may divide
        elif loss.kind == "mean":
            result.append(share)
        elif loss.kind == "sum" and loss.count is not None and loss.factor != 1:
            result.append(share * loss.count)
        else:
            result.append(None)
    return result


def _note_hooks(update: Update) -> None:
    if any(each.num_hooked > each.leaves.bit_count() / 2 for each in update.passes):
        update.notes.append(HOOKS)


def _judge_empty(update: Update) -> None:
    update.lost = list(range(len(update.passes)))
    text = "step() finds no gradient, so no micro-batch reaches the optimizer" + _cleared_at(update.passes)
    update.add_problem("lost", text, factor=0.0)


def _cleared_at(passes: list[BackwardPass]) -> str:
    sites = format_sites(each.cleared for each in passes)
    return f"; zero_grad() clears them at {sites}" if sites else ""


def _clipped_at(update: Update) -> str:
    """Return where gradients are clipped before the window's last micro-batch."""
    return format_sites(each.clipped for each in update.passes[:-1])


def _find_lost(update: Update, top: float, unsure: list[int]) -> None:
    """Find passes that count next to nothing beside the others, or, if others are amplified, beside 1/k."""
    for i, (weight, share) in enumerate(zip(update.weights, shares(update), strict=True)):
        least = NEGLIGIBLE * top
        if share and weight:
            least = min(least, NEGLIGIBLE * abs(weight / share) / len(update.passes))
        limit = min(least + STANDARD_ERRORS * update.errors[i], top / 2)
        if abs(weight) < limit and i not in unsure:
            update.lost.append(i)


def _counting(update: Update) -> list[int]:
    """Return the positions of the passes that count."""
    return [i for i in range(len(update.passes)) if i not in update.lost]


def _judge_evaluation(update: Update) -> None:
    passes = [update.passes[i] for i in _counting(update)]
    strange = [each for each in passes if each.number in update.evaluating]
    if strange:
        text = "a backward pass in evaluation mode reaches the optimizer too: nothing clears its gradient"
        update.add_problem("stale", text, strange[0].line, cause="evaluation")


def _judge_lost(update: Update) -> None:
    passes, counting = update.passes, _counting(update)
    lost = [passes[i] for i in update.lost]
    clipped, cleared = _clipped_at(update), _cleared_at(lost)
    if lost and {passes[i].rank for i in counting} != {each.rank for each in passes}:
        text = "an update uses the gradients of its own rank alone: nothing reduces them"
        update.add_problem("ranks", text)
    elif lost and clipped and not cleared:
        update.is_vague = True
        update.add_problem("uneven", f"every micro-batch is clipped at {clipped}, so early ones fade away")
    elif lost:
        which = f" (lost: {positions(passes, update.lost)})" if len(lost) < len(passes) / 2 else ""
        reach = "micro-batches reaches" if len(counting) == 1 else "micro-batches reach"
        text = f"only {len(counting)} of {len(passes)} {reach} the optimizer{which}{cleared}"
        update.add_problem("lost", text, factor=len(counting) / len(passes), cause="some")
    elif update.apart > RANKS_APART:
        update.add_problem("ranks", f"the ranks update from different gradients ({update.apart:.0%} apart)")


def _judge_stale(update: Update) -> None:
    weight = update.stale_weight
    if weight:
        times = "" if is_close(weight, 1) else f" {format_fraction(weight)} times"
        text = f"the gradient of the update before counts again{times}: nothing clears it"
        update.add_problem("stale", text, factor=weight, cause="again")
    if update.late_weight:
        text = "micro-batches of the update before arrive in this update"
        update.add_problem("stale", text, factor=update.late_weight, cause="late")


def positions(passes: list[BackwardPass], chosen: list[int]) -> str:
    """Write the positions of some micro-batches in their window, each counted on its rank from 1."""
    by_rank: dict[int, list[BackwardPass]] = {}
    for each in passes:
        by_rank.setdefault(each.rank, []).append(each)
    found: dict[int, NumberRanges] = {}
    for i in chosen:
        rank = passes[i].rank
        found.setdefault(rank, NumberRanges()).add(by_rank[rank].index(passes[i]) + 1)
    if len(by_rank) == 1:
        return f"number {next(iter(found.values()))}"
    return "; ".join(f"number {numbers} of rank {rank}" for rank, numbers in list(found.items())[:3])


# Micro-batches, samples or tokens that count more than others


def _judge_weights(update: Update, expectations: Expectations) -> None:
    """Compare micro-batches whose losses are of one kind: called from one place, with one reduction."""
    # A loss that is multiplied by 0 stands for a micro-batch without any labels.
    counting = [i for i in _counting(update) if update.passes[i].loss.factor]
    groups: dict[tuple[int, str], list[int]] = {}
    for i in counting:
        groups.setdefault((update.passes[i].place, update.passes[i].loss.kind), []).append(i)
    if not counting:
        return
    weights_are_equal = not differ(
        [update.weights[i] for i in counting], [update.errors[i] for i in counting]
    )
    for (_, kind), group in groups.items():
        if not (kind == "unknown" and weights_are_equal):
            _judge_group(update, group, weights_are_equal, expectations)


def _judge_group(
    update: Update, group: list[int], weights_are_equal: bool, expectations: Expectations
) -> None:
    passes = [update.passes[i] for i in group]
    losses = [each.loss for each in passes]
    values = [update.weights[i] * loss.factor for i, loss in zip(group, losses, strict=True)]
    errors = [update.errors[i] * loss.factor for i, loss in zip(group, losses, strict=True)]
    counts = [loss.mean_count for loss in losses]
    fair = [value / count for value, count in zip(values, counts, strict=True)]  # of one sample or token
    if not differ(fair, [error / count for error, count in zip(errors, counts, strict=True)]):
        return
    line, times = passes[0].line, max(fair) / max(min(fair), 1e-300)
    least = min((update.weights[i] for i in group), key=abs)
    ratios = [update.weights[i] / least for i in group]
    more = [ratio for ratio in ratios if ratio > 1.5]
    clipped = _clipped_at(update)
    if losses[0].kind == "mean" and not differ(values, errors):
        usual = _usual_size(passes[0].place, expectations.sizes)
        if _is_only_last_smaller(passes, usual):
            update.notes.append(
                f"a last micro-batch of {min(counts):g} samples counts as much as those of {usual:g}"
            )
            return
        text = (
            f"mean of means: losses over {min(counts):g} to {max(counts):g} samples or tokens count the "
            f"same, so one token counts up to {format_number(times)} times as much as another"
        )
        update.add_problem("uneven", text, line, times, "means")
    elif weights_are_equal:
        factors = [loss.factor for loss in losses]
        text = (
            f"the losses are multiplied by different numbers ({format_number(min(factors))} to "
            f"{format_number(max(factors))}), so one token counts up to {format_number(times)} times as much "
            "as another"
        )
        update.add_problem("uneven", text, line, times, "factors")
    elif clipped:
        update.is_vague = True
        text = f"every micro-batch is clipped at {clipped}, so early ones count less"
        update.add_problem("uneven", text, line, times)
    elif any(problem.kind == "double" for problem in update.problems):
        pass  # it is told already
    elif more and len(more) <= len(group) / 2 and all(is_close(ratio, round(more[0])) for ratio in more):
        which = positions(update.passes, [i for i, ratio in zip(group, ratios, strict=True) if ratio > 1.5])
        text = f"{len(more)} of {len(group)} micro-batches count {round(more[0])} times as much ({which})"
        update.add_problem("double", text, line, float(round(more[0])), "weights")
    else:
        text = f"the micro-batches count differently: {', '.join(map(format_fraction, values[:8]))}"
        update.add_problem("uneven", text, line, times, "weights")


def _usual_size(place: int, sizes: Counter[tuple[int, float]]) -> float:
    return max((key for key in sizes if key[0] == place), key=sizes.__getitem__)[1]


def _is_only_last_smaller(passes: list[BackwardPass], usual: float) -> bool:
    """Return whether all losses have the usual size but the last of a rank, as at the end of a data set."""
    counts: dict[int, list[float]] = {}
    for each in passes:
        counts.setdefault(each.rank, []).append(each.loss.mean_count)
    return all({*of_rank[:-1]} <= {usual} and of_rank[-1] <= usual for of_rank in counts.values())


# Parameters


def _judge_parameters(update: Update) -> None:
    """Find parameters whose gradient is a multiple of, or another mixture than, that of the rest."""
    by_text: dict[str, tuple[list[str], float | None]] = {}
    stale: list[str] = []
    of_one_rank: list[str] = []
    ranks = {each.rank for each in update.passes}
    multiples = sum(outlier.ratio is not None for outlier in update.outliers)
    if multiples > len(update.names) / 2:  # as adaptive gradient clipping does
        update.notes.append(OWN_FACTORS)
        update.is_vague = True
        update.outliers = [outlier for outlier in update.outliers if outlier.ratio is None]
    for outlier in update.outliers:
        name, weights = update.names[outlier.parameter], outlier.weights
        if outlier.ratio is not None:
            ratio = outlier.ratio
            text = f"counts {format_fraction(float(f'{ratio:.3g}'))} times as much as in the rest"
            by_text.setdefault(text, ([], ratio))[0].append(name)
        elif not weights:
            update.notes.append(f"{name}: its gradient has something else than the micro-batches' gradients")
        elif abs(outlier.stale_weight) > 0.5 and not differ(weights):
            stale.append(name)
        elif _ranks_that_count(update, weights) < ranks:
            of_one_rank.append(name)
        else:
            times = ", ".join(format_fraction(round(weight, 3)) for weight in weights[:6])
            text = f"micro-batches count {times} times as much as in the rest"
            by_text.setdefault(text, ([], None))[0].append(name)
    for text, (names, factor) in by_text.items():
        listed = format_names(names)
        update.add_problem("parameters", f"{listed}: {text}", factor=factor, cause=listed)
    if of_one_rank:
        listed = format_names(of_one_rank)
        text = f"{listed}: only the gradients of one rank count: nothing reduces them"
        update.add_problem("ranks", text, cause=listed)
    if stale:
        listed = format_names(stale)
        text = f"{listed}: the gradient of the update before counts again: nothing clears it"
        update.add_problem("stale", text, factor=1.0, cause=listed)


def _ranks_that_count(update: Update, weights: list[float]) -> set[int]:
    """Return the ranks whose passes have a weight."""
    return {
        each.rank
        for weight, each in zip(weights, update.passes, strict=False)  # judge_update may leave passes out
        if abs(weight) > NEGLIGIBLE
    }
