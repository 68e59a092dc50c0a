"""The largest size whose cost a budget holds."""

from __future__ import annotations

from collections.abc import Callable


class TooSmallError(ValueError):
    """Even one sample costs more than the budget holds."""

    def __init__(self, cost: int, budget: int) -> None:
        super().__init__(f"one sample costs {cost} of {budget}")
        self.cost, self.budget = cost, budget


def largest(cost: Callable[[int], int], most: int, budget: int, least: int = 1) -> int:
    """The largest of `least` ... `most` that costs at most `budget`; costs grow with the size.

    Each guess is where a line through the costs of the largest size that fits and the smallest that does not
    meets the budget. Costs are nearly linear, so that few are asked for; where they bend, halves are taken.
    Raises TooSmallError where even the least does not fit.
    """
    low, low_cost = least, cost(least)
    if low_cost > budget:
        raise TooSmallError(low_cost, budget)
    if most == least:
        return least
    high, high_cost = most, cost(most)
    if high_cost <= budget:
        return most
    turns = 0
    while high - low > 1:
        share = (budget - low_cost) / max(1, high_cost - low_cost)
        guess = low + int(share * (high - low))
        if turns % 3 == 2:  # a bent line would creep
            guess = (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
        turns += 1
        own = cost(guess)
        if own <= budget:
            low, low_cost = guess, own
        else:
            high, high_cost = guess, own
    return low
