"""Verdicts: what the weights of one update say.

`judge_update` finds lost, repeated, stale and uneven micro-batches, ranks and parameters that differ.
`sums.py` checks what the weights add up to, which needs several updates.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .amounts import Amount
from .call_sites import describe_calls
from .doubts import add_doubts
from .number_ranges import NumberRanges
from .records import EVENNESS, BackwardPass, Update
from .wording import (
    NEGLIGIBLE,
    STANDARD_ERRORS,
    differ,
    format_count,
    format_fraction,
    format_names,
    format_number,
    format_percentage,
    format_ratio,
    format_sites,
    is_close,
    plural,
)

#: Ranks update from different gradients if these differ by more than this share.
RANKS_APART = 0.001
#: An update is checked if at most this part of its gradient is no sum of those of micro-batches.
CHECKED_REST = 0.5
#: The same if the rest may come from passes that are missing, or from sums that were loaded or copied.
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
DIFFERENT_FACTORS = (
    "the script multiplies the gradients of most parameters by different factors: only whether micro-batches "
    "count the same was checked"
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
    weights = zip(update.passes, update.weights, strict=True)
    counting = [each for each, weight in weights if abs(weight) > NEGLIGIBLE * top]
    places = {each.place for each in counting}
    has_backward = any(each.how != "grad" for each in counting)

    def may_be_unused(each: BackwardPass) -> bool:
        # Another optimizer has used it, and this one uses none of its kind.
        is_of_another = each.is_counted and top and not (each.cleared and each.place in places)
        is_looked_at = each.how == "grad" and has_backward
        return bool(is_of_another or is_looked_at or each.excused)

    wanted = [i for i, each in enumerate(update.passes) if each in counting or not may_be_unused(each)]
    update.passes = [update.passes[i] for i in wanted]
    update.weights = [update.weights[i] for i in wanted]
    update.errors = [update.errors[i] for i in wanted]
    limit = CHECKED_REST_OF_SOME if update.misses_passes else CHECKED_REST
    update.is_checked = bool(update.passes) and update.rest <= limit and not _has_other_sums(update)
    if not update.is_checked:
        return
    if not top:
        _judge_empty(update)
        return
    is_fair = False
    unsure = [i for i, error in enumerate(update.errors) if error > UNSURE * min(update.unit, top)]
    if unsure and len(update.passes) > 1:
        update.notes.append(SAME_GRADIENTS)
        update.unmade.add(EVENNESS)
        limit = max(0.01, 10 * update.rest)
        is_fair = update.rest_if_fair <= limit
        if not is_fair and update.rest_if_others_fair > limit:
            update.is_vague = True
            text = "the micro-batches do not count the same; which ones cannot be told"
            update.add_problem("uneven", "unknown", text)
        if update.problems:
            return
    is_sure = len(unsure) <= len(update.passes) / 2 or len(update.passes) == 1
    _note_hooks(update)
    add_doubts(update)
    if is_sure or not is_fair:
        _find_lost(update, top, unsure, is_fair)
    _judge_repeated(update)
    if is_sure:
        _judge_evaluation(update)
    _judge_lost(update)
    _judge_stale(update)
    if not is_sure:
        return
    steps = expectations.steps
    if steps and len(update.passes) != steps * expectations.num_ranks:
        text = (
            f"the update holds {plural(len(update.passes), 'micro-batch')} instead of "
            f"{steps * expectations.num_ranks}"
        )
        update.add_problem("count", "steps", text)
    _judge_parameters(update)
    if update.lost or update.stale_weight or update.late_weight:
        update.unmade.add(EVENNESS)
    else:
        _judge_weights(update, expectations)


def _has_other_sums(update: Update) -> bool:
    """Return whether the optimizer was loaded or copied together with gradients of its open window."""
    if not update.is_restored:
        return False
    return bool(update.stale_weight or update.late_weight) or update.rest > CHECKED_REST_OF_SOME


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
    text = "step() finds no gradient, so no micro-batch reaches the optimizer"
    cleared = [each.cleared for each in update.passes if each.cleared]
    calls = describe_calls(cleared, "zero_grad()")
    if calls:
        text += f": {calls} clears all gradients"
    cause = "empty" if calls else "other"
    update.unmade.add(EVENNESS)
    update.add_problem("lost", cause, text, cleared=cleared, factor=0.0)


def _clipped_at(update: Update) -> str:
    """Return where gradients are clipped before the window's last micro-batch."""
    return format_sites(each.clipped for each in update.passes[:-1])


def _find_lost(update: Update, top: float, unsure: list[int], is_fair: bool) -> None:
    """Find passes that count next to nothing beside the others, or, if others are amplified, beside 1/k."""
    for i, (weight, share) in enumerate(zip(update.weights, shares(update), strict=True)):
        least = NEGLIGIBLE * top
        if share and weight:
            least = min(least, NEGLIGIBLE * abs(weight / share) / len(update.passes))
        limit = min(least + STANDARD_ERRORS * update.errors[i], top / 2)
        if i in unsure:  # equal gradients share a weight; if that is 0, none of them counts
            limit = 0.0 if is_fair else NEGLIGIBLE * top
        if abs(weight) < limit:
            update.lost.append(i)


def _counting(update: Update) -> list[int]:
    """Return the positions of the passes that count."""
    return [i for i in range(len(update.passes)) if i not in update.lost]


def _judge_repeated(update: Update) -> None:
    for i in _counting(update):
        if update.passes[i].runs > 1:
            text = "a loss goes through backward() twice, so its micro-batch counts 2 times"
            update.add_problem("double", "twice", text, at=update.passes[i], factor=2.0)


def _judge_evaluation(update: Update) -> None:
    passes = [update.passes[i] for i in _counting(update)]
    strange = [each for each in passes if each.number in update.evaluating]
    if strange:
        text = "a backward pass in evaluation mode reaches the optimizer too: nothing clears its gradient"
        update.add_problem("stale", "evaluation", text, at=strange[0])


def _judge_lost(update: Update) -> None:
    passes, counting = update.passes, _counting(update)
    lost = [passes[i] for i in update.lost]
    cleared = [each.cleared for each in lost if each.cleared]
    clipped, calls = _clipped_at(update), describe_calls(cleared, "zero_grad()")
    if lost and {passes[i].rank for i in counting} != {each.rank for each in passes}:
        text = "each rank uses only its own gradients: nothing averages them over the ranks"
        update.add_problem("ranks", "own", text)
    elif lost and clipped and not calls:
        update.is_vague = True
        text = f"the gradient is clipped after every micro-batch at {clipped}, so early ones fade away"
        update.add_problem("uneven", "clipped", text)
    elif lost:
        reach = "micro-batches reaches" if len(counting) == 1 else "micro-batches reach"
        text = f"only {len(counting)} of {len(passes)} {reach} the optimizer"
        if len(lost) < len(passes) / 2:
            text += f" (lost: {positions(passes, update.lost)})"
        if calls:
            gradients = "other gradient" if len(lost) == 1 else f"other {len(lost)} gradients"
            text += f": {calls} clears the {gradients}"
        cause = "cleared" if calls else "other"
        factor = len(counting) / len(passes)
        update.add_problem("lost", cause, text, cleared=cleared, factor=factor)
    elif update.apart > RANKS_APART:
        text = "the ranks use different gradients for the same update ({apart} apart)"
        update.add_problem(
            "ranks", "own", text, amounts={"apart": Amount.of(format_percentage, update.apart)}
        )


def _judge_stale(update: Update) -> None:
    weight, others = update.stale_weight, update.other_losses
    where = _where_to_clear(update)
    if weight and update.stale_parameters:
        _add_stale_parameters(update, update.stale_parameters, weight)
    elif weight:
        times = "" if is_close(weight, 1) else ", {times} times"
        text = f"the gradient of the previous update counts again{times}"
        if others:
            text += f". The gradient of {others}, counts too"
        text += ": nothing clears them" if others else ": nothing clears it"
        amounts = {"times": Amount.of(format_fraction, weight)}
        update.add_problem("stale", "again", text, factor=weight, amounts=amounts, call=where)
    elif others:
        text = f"the gradient of {others}, counts too: nothing clears it"
        update.add_problem("stale", "other loss", text, call=where)
    if update.late_weight:
        text = "gradients of the previous update's micro-batches arrive only in this update"
        update.add_problem("stale", "late", text, factor=update.late_weight)


def _add_stale_parameters(update: Update, names: list[str], weight: float, comment: str = "") -> None:
    text = "{parameters}: the gradient of the previous update counts again: nothing clears it" + comment
    listed, where = format_names(names), _where_to_clear(update)
    update.add_problem("stale", "parameters", text, factor=weight, parameters=listed, call=where)


def _where_to_clear(update: Update) -> str:
    """Say between which calls gradients should be cleared, so that none is left over in an update."""
    own = [each for each in update.passes if each not in update.left_over]
    before = update.left_over[-1].call if update.left_over else update.site.describe("step()")
    after = own[0].call if own else ""
    return f"after {before}, before {after}" if before and after else ""


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
        numbers = next(iter(found.values()))
        return _numbers(numbers)
    return "; ".join(f"{_numbers(numbers)} of rank {rank}" for rank, numbers in list(found.items())[:3])


def _numbers(numbers: NumberRanges) -> str:
    return f"number{'s' * (len(numbers) > 1)} {numbers}"


# Micro-batches, or single labels or values, that count more than others


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
    fair = [value / count for value, count in zip(values, counts, strict=True)]  # of one label or value
    if not differ(fair, [error / count for error, count in zip(errors, counts, strict=True)]):
        return
    times = max(fair) / max(min(fair), 1e-300)
    amounts = {"times": Amount.of(format_number, times)}
    least = min((update.weights[i] for i in group), key=abs)
    ratios = [update.weights[i] / least for i in group]
    more = [ratio for ratio in ratios if ratio > 1.5]
    clipped, unit = _clipped_at(update), losses[0].unit
    if losses[0].kind == "mean" and not differ(values, errors):
        usual = _usual_size(passes[0].place, expectations.sizes)
        if _is_only_last_smaller(passes, usual):
            update.notes.append(
                f"a last micro-batch of {min(counts):g} {unit}s counts as much as those of {usual:g}"
            )
            return
        text = (
            f"mean of means: each loss is a mean over the {{sizes}} {unit}s of its micro-batch, and all "
            f"micro-batches get the same weight (see the table). So one {unit} counts up to {{times.most}} "
            "times as much as another in the same update"
        )
        amounts["sizes"] = Amount.of(format_count, min(counts), max(counts))
        update.add_problem("uneven", "means", text, at=passes[0], factor=times, amounts=amounts)
    elif weights_are_equal:
        factors = [loss.factor for loss in losses]
        text = (
            "the losses of an update are multiplied by different numbers, the largest up to {spread.most} "
            f"times the smallest. So one {unit} counts up to {{times.most}} times as much as another in the "
            "same update"
        )
        amounts["spread"] = Amount.of(format_number, max(factors) / max(min(factors), 1e-300))
        update.add_problem("uneven", "factors", text, at=passes[0], factor=times, amounts=amounts)
    elif clipped:
        update.is_vague = True
        text = f"the gradient is clipped after every micro-batch at {clipped}, so early ones count less"
        update.add_problem("uneven", "clipped", text, at=passes[0], factor=times)
    elif any(problem.kind == "double" for problem in update.problems):
        update.unmade.add(EVENNESS)  # the one that counts twice is told already
    elif more and len(more) <= len(group) / 2 and all(is_close(ratio, round(more[0])) for ratio in more):
        which = positions(update.passes, [i for i, ratio in zip(group, ratios, strict=True) if ratio > 1.5])
        verb = "counts" if len(more) == 1 else "count"
        text = (
            f"{len(more)} of {len(group)} micro-batches {verb} {round(more[0])} times as much as the rest "
            f"({which})"
        )
        update.add_problem("double", "weights", text, at=passes[0], factor=float(round(more[0])))
    else:
        text = "the micro-batches of an update count differently (see the table)"
        if min(values) > 0:
            text += ": one counts up to {times.most} times as much as another"
            amounts["times"] = Amount.of(format_number, max(values) / min(values))
        update.add_problem("uneven", "weights", text, at=passes[0], factor=times, amounts=amounts)


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
    by_ratio: dict[str, tuple[list[str], float]] = {}
    by_weights: dict[str, list[str]] = {}
    stale: list[str] = []
    of_one_rank: list[str] = []
    ranks = {each.rank for each in update.passes}
    multiples = sum(outlier.ratio is not None for outlier in update.outliers)
    if multiples > len(update.names) / 2:  # as adaptive gradient clipping does
        update.notes.append(DIFFERENT_FACTORS)
        update.is_vague = True
        update.outliers = [outlier for outlier in update.outliers if outlier.ratio is None]
    for outlier in update.outliers:
        name, weights = update.names[outlier.parameter], outlier.weights
        if outlier.ratio is not None:
            by_ratio.setdefault(format_ratio(outlier.ratio), ([], outlier.ratio))[0].append(name)
        elif not weights:
            update.notes.append(f"{name}: its gradient has something else than the micro-batches' gradients")
        elif abs(outlier.stale_weight) > 0.5 and not differ(weights):
            stale.append(name)
        elif _ranks_that_count(update, weights) < ranks:
            of_one_rank.append(name)
        else:
            written = ", ".join(format_fraction(round(weight, 3)) for weight in weights[:6])
            by_weights.setdefault(written, []).append(name)
    for names, ratio in by_ratio.values():
        text = "{parameters}: the gradient counts {times} times as much as"
        if abs(ratio) < NEGLIGIBLE:
            text = "{parameters}: the gradient does not reach the optimizer, unlike"
        text += " that of the other parameters (the table shows those)"
        amounts = {"times": Amount.of(format_ratio, ratio)}
        listed = format_names(names)
        update.add_problem("parameters", "multiple", text, factor=ratio, parameters=listed, amounts=amounts)
    for written, names in by_weights.items():
        text = (
            f"{{parameters}}: the micro-batches count {written} times as much as in the other parameters "
            "(the table shows those)"
        )
        update.add_problem("parameters", "mixture", text, parameters=format_names(names))
    if of_one_rank:
        text = "{parameters}: each rank uses only its own gradients: nothing averages them over the ranks"
        update.add_problem("ranks", "own", text, parameters=format_names(of_one_rank))
    if stale:
        _add_stale_parameters(update, stale, 1.0, " (the table shows the other parameters)")


def _ranks_that_count(update: Update, weights: list[float]) -> set[int]:
    """Return the ranks whose passes have a weight."""
    return {
        each.rank
        for weight, each in zip(weights, update.passes, strict=False)  # judge_update may leave passes out
        if abs(weight) > NEGLIGIBLE
    }
