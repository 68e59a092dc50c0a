"""Losses of another optimizer that an update also uses, as a GAN's critic may use those of its generator.

The generator's backward pass reaches the critic too. If nothing clears the critic's gradients after it, the
critic's next update holds them.
"""

from __future__ import annotations

from collections.abc import Iterable

from .call_sites import describe_calls
from .records import FUNCTIONS, BackwardPass, Update
from .wording import NEGLIGIBLE


def counting_passes(update: Update) -> list[BackwardPass]:
    """Return the passes that count in an update."""
    top = max(map(abs, update.weights), default=0.0)
    weights = zip(update.passes, update.weights, strict=True)
    return [each for each, weight in weights if abs(weight) > NEGLIGIBLE * top]


def find_other_losses(update: Update, optimizer: int) -> list[BackwardPass]:
    """Find passes that count, but that another optimizer had used before a pass at another line ran.

    Args:
        update: an update whose weights are known.
        optimizer: the place of its optimizer in the report.
    """
    counting = counting_passes(update)
    last = {(each.rank, each.place): each.number for each in counting}

    def is_used_before(each: BackwardPass) -> bool:
        later = [
            number for (rank, place), number in last.items() if rank == each.rank and place != each.place
        ]
        used = [number for other, number in each.used_at.items() if other != optimizer]
        return bool(later and used) and min(used) <= max(later)

    return [each for each in counting if is_used_before(each)]


def are_left_over(update: Update, others: list[BackwardPass], first_places: Iterable[int]) -> bool:
    """Return whether losses of another optimizer are left over, and not meant for this update.

    They come before all losses of this optimizer, and its first update had none of them.

    Args:
        update: the update.
        others: the passes of `find_other_losses`.
        first_places: where the passes of the optimizer's first update were called.
    """
    own = [each for each in counting_passes(update) if each not in others]
    places = {each.place for each in others}
    if not others or not own or not {each.place for each in own} <= {*first_places} - places:
        return False
    return not places & {*first_places} and all(
        other.number < each.number for other in others for each in own if other.rank == each.rank
    )


def describe_other_losses(others: list[BackwardPass], optimizer: int) -> str:
    """Write "a loss of optimizer 2 (backward() at gan.py:15)".

    Args:
        others: the passes of `find_other_losses`.
        optimizer: the place of the optimizer that also uses them.
    """
    users = sorted({place + 1 for each in others for place in each.used_at if place != optimizer})
    loss = "losses" if len({each.place for each in others}) > 1 else "a loss"
    optimizers = f"optimizer{'s' * (len(users) > 1)} {', '.join(map(str, users))}"
    calls = describe_calls((each.site for each in others), FUNCTIONS[others[0].how])
    return f"{loss} of {optimizers}" + f" ({calls})" * bool(calls)
