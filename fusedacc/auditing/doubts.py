"""Notes on backward passes that count in an update, but may not be meant to."""

from __future__ import annotations

from .call_sites import describe_calls
from .other_losses import counting_passes
from .records import FUNCTIONS, Update

MOVED = (
    "the parameters were changed between micro-batches that count in the same update: if the earlier "
    "gradients should not count, call zero_grad() after that change"
)


def add_doubts(update: Update) -> None:
    """Add notes to an update that was checked."""
    counting = counting_passes(update)
    moved = [each for each in counting if each.number in update.moved]
    if moved and len(moved) < len(counting):  # as in SAM without its zero_grad()
        update.notes.append(MOVED)
    places = {each.place for each in counting if not each.has_other_inputs}
    strange = [
        each
        for each in counting
        if each.has_other_inputs and each.place not in places and each.number not in update.evaluating
    ]
    if strange and places:  # as for adversarial examples
        calls = describe_calls((each.site for each in strange), FUNCTIONS[strange[0].how])
        update.notes.append(
            f"the gradients of {calls}, which has inputs that require gradients, count too: if only those of "
            "the inputs are wanted, use torch.autograd.grad(loss, inputs)"
        )
