"""What to do about a problem, in one line: by its kind and cause, in plain PyTorch or in a framework.

docs/audit.md shows the loops in full.
"""

from __future__ import annotations

from typing import NamedTuple

_REDUCE_AT_THE_LAST = (
    "let the last micro-batch of each update reduce the gradients of all: leave no_sync() before it (DDP), "
    "or call set_requires_gradient_sync(True) before it (FSDP2)."
)
#: Ends the causes that have another remedy if there are several ranks.
ON_RANKS = " on ranks"
#: By kind and cause: what to do in plain PyTorch.
PLAIN = {
    ("lost", "cleared"): "call zero_grad() once for each update, after step(), not between micro-batches.",
    ("lost", "empty"): "call zero_grad() after step(), not before it.",
    ("lost", "other"): (
        "add each micro-batch's gradient to p.grad before step() (do not assign it), and set p.grad to None "
        "or zero only after step()."
    ),
    ("lost", "other on ranks"): _REDUCE_AT_THE_LAST,
    ("double", "twice"): "call backward() once for each loss.",
    ("double", "part"): (
        "call backward() for each loss, or once for their sum, not both. To log a sum, add numbers: "
        "total += loss.item()"
    ),
    ("double", "weights"): "add the gradient of each micro-batch once.",
    ("scale", "not divided"): (
        "divide each loss by the number of micro-batches in its update: (loss / k).backward()"
    ),
    ("scale", "not divided on ranks"): (
        "divide each loss by the number of micro-batches on one rank: (loss / k).backward()"
    ),
    ("scale", "multiplied"): "divide each loss by the number of micro-batches; do not multiply by it.",
    ("scale", "divided twice"): (
        "divide once: either the loss or p.grad, by the number of micro-batches in the update."
    ),
    ("scale", "divided or cleared"): (
        "divide once: either the loss or p.grad, by the number of micro-batches in the update. Call "
        "zero_grad() only after step()."
    ),
    ("scale", "divided by ranks"): (
        "divide by the number of micro-batches on one rank. DistributedDataParallel and FSDP2 average over "
        "the ranks themselves."
    ),
    ("scale", "not full"): (
        "divide each loss by the number of micro-batches that this update really holds, or let all updates "
        "hold the same number."
    ),
    ("scale", "left over"): (
        "at the end of an epoch, update from the micro-batches that are left: divide their losses by their "
        "number, then call step() and zero_grad(). If your code skips an update, call zero_grad() there too."
    ),
    ("scale", "divisor"): (
        "call step() only after as many micro-batches as you divide by, or divide by the number between two "
        "calls of step()."
    ),
    ("scale", "samples"): "divide by the number of {units} that the update really holds.",
    ("scale", "tokens"): (
        "divide by the number of {units} that count in the whole update, for example "
        "(labels != -100).sum(). Leave padding out."
    ),
    ("scale", "loss scale"): (
        "call scaler.step(optimizer), not optimizer.step(), or scaler.unscale_(optimizer) before it. Call "
        "scaler.update() once after it."
    ),
    ("scale", "loss scale twice"): (
        "remove the loss scale once: scaler.step(optimizer) does it. Do not divide by it yourself too."
    ),
    ("scale", "expected"): "change what you divide by, or give --scale the sum that is right for your loss.",
    ("scale", "unlike others"): "divide each loss by the number of micro-batches in its own update.",
    ("uneven", "means"): (
        'take the sum over the {units} of each micro-batch (reduction="sum"), and divide it by the number of '
        "{units} in the whole update, not by the number of micro-batches."
    ),
    ("uneven", "means on ranks"): (
        'take the sum over the {units} of each micro-batch (reduction="sum"), and divide it by the number of '
        "{units} in the whole update, on all ranks together. Multiply by the number of ranks if DDP or FSDP2 "
        "averages."
    ),
    ("uneven", "factors"): (
        "multiply or divide all losses of an update by the same number. With a GradScaler, call "
        "scaler.update() only after step()."
    ),
    ("uneven", "factors on ranks"): (
        "multiply or divide all losses of an update by the same number on all ranks: all-reduce a number of "
        "tokens before you divide by it."
    ),
    ("uneven", "clipped"): "clip once for each update, after its last backward() and before step().",
    ("uneven", "weights"): (
        "do not change p.grad between the micro-batches of an update, for example by a product or an "
        "all_reduce. Do it once, before step()."
    ),
    ("uneven", "unknown"): "let all losses of an update count the same, and leave p.grad alone between them.",
    ("stale", "again"): ("call {zero_grad} there, once for each update."),
    ("stale", "other loss"): ("call {zero_grad} there, once for each update, not only after its step()."),
    ("stale", "parameters"): (
        "clear the gradients of these parameters too, after each step(): model.zero_grad() clears all."
    ),
    ("stale", "evaluation"): (
        "evaluate inside torch.no_grad(), without backward(), or call {zero_grad} after the evaluation."
    ),
    ("stale", "late"): "call step() only after the gradients of all its micro-batches were added.",
    ("stale", "late on ranks"): _REDUCE_AT_THE_LAST,
    ("ranks", "own"): (
        "let DistributedDataParallel reduce the gradients: leave no_sync() before the last micro-batch of "
        "each update. Or all-reduce p.grad before step(), and divide by the number of ranks."
    ),
    ("ranks", "added"): "divide p.grad by the number of ranks after all_reduce.",
    ("parameters", "multiple"): (
        "look for code that changes the gradients of these parameters only: a hook, a division, or a tied "
        "weight that is added by hand."
    ),
    ("parameters", "mixture"): (
        "look for code that treats these parameters differently within an update: requires_grad that is "
        "switched, a hook, or a change of p.grad."
    ),
    ("count", "steps"): "collect that many micro-batches before each step(), or change --steps.",
}


class Framework(NamedTuple):
    """What to do in a framework's own loop.

    Attributes:
        name: as its users write it.
        remedies: by kind and cause.
    """

    name: str
    remedies: dict[tuple[str, str], str]


_FULL_WINDOWS_IN_ACCELERATE = (
    "use a loader whose number of batches is a multiple of gradient_accumulation_steps."
)
_DIVIDED_BY_TRAINER = "set trainer.model_accepts_loss_kwargs = False, so that the Trainer divides."
_DATA_SET_WITH_LENGTH = (
    "train on a data set that has a length, so that the Trainer knows an epoch's last update."
)
_FULL_WINDOWS_IN_LIGHTNING = (
    "train on a number of batches that is a multiple of accumulate_grad_batches in each epoch."
)
_FULL_WINDOWS_IN_KERAS = (
    "train for a number of steps in each epoch that is a multiple of gradient_accumulation_steps."
)
_BATCHES_OF_ONE_SIZE = (
    "use a number of samples that is a multiple of batch_size, so that all batches are full."
)
_LIGHTNING = Framework(
    "Lightning",
    {
        ("scale", "not full"): _FULL_WINDOWS_IN_LIGHTNING,
        ("scale", "divisor"): _FULL_WINDOWS_IN_LIGHTNING,
        ("uneven", "means"): (
            "use manual optimization, and divide sums over tokens by the number of tokens in the whole "
            "update."
        ),
    },
)
#: By the package that calls step() for the script.
FRAMEWORKS = {
    "accelerate": Framework(
        "Accelerate",
        {
            ("scale", "not full"): _FULL_WINDOWS_IN_ACCELERATE,
            ("scale", "divisor"): _FULL_WINDOWS_IN_ACCELERATE,
            ("uneven", "means"): (
                'use the loop of its guide "Gradient accumulation with variable-size training samples".'
            ),
        },
    ),
    "transformers": Framework(
        "Transformers",
        {
            ("scale", "not divided"): _DIVIDED_BY_TRAINER,
            ("scale", "not full"): _DATA_SET_WITH_LENGTH,
            ("scale", "left over"): _DATA_SET_WITH_LENGTH,
            ("scale", "unlike others"): _DATA_SET_WITH_LENGTH,
            ("uneven", "factors"): _DATA_SET_WITH_LENGTH,
            ("uneven", "means"): (
                "let the model divide its sum over tokens by num_items_in_batch, which the Trainer passes to "
                "forward()."
            ),
        },
    ),
    "lightning": _LIGHTNING,
    "pytorch_lightning": _LIGHTNING,
    "fastai": Framework(
        "fastai",
        {("scale", "samples"): "use batches of one size, which divides n_acc of GradientAccumulation."},
    ),
    "keras": Framework(
        "Keras",
        {
            ("scale", "not full"): _FULL_WINDOWS_IN_KERAS,
            ("scale", "left over"): _FULL_WINDOWS_IN_KERAS,
            ("uneven", "means"): _BATCHES_OF_ONE_SIZE,
            ("uneven", "factors"): _BATCHES_OF_ONE_SIZE,
            ("lost", "cleared"): "let each micro-batch give a gradient to all layers.",
        },
    ),
    "fusedacc": Framework(
        "fusedacc",
        {
            ("scale", "divided twice"): (
                "do not divide the loss: with gradient_accumulation_steps, the wrapper divides."
            ),
            ("uneven", "means"): (
                'use reduction="weighted", and give optimizer.accumulate(weight=...) the number of {units} '
                "of each micro-batch."
            ),
        },
    ),
}


def find_remedy(kind: str, cause: str, library: str, num_ranks: int, unit: str = "value") -> str:
    """Return what to do, as "Fix: ..." or "Fix in Lightning: ...".

    Args:
        kind: one of `records.KINDS`.
        cause: what has caused it.
        library: the package that calls step() for the script; empty: the script calls it itself.
        num_ranks: ranks whose micro-batches are put together.
        unit: what losses count: "token", "label" or "value".

    Returns:
        The text, with "{zero_grad}" for that of the optimizers that have the problem.
    """
    framework = FRAMEWORKS.get(library)
    if framework is not None and (kind, cause) in framework.remedies:
        text = f"Fix in {framework.name}: {framework.remedies[kind, cause]}"
        return text.replace("{units}", f"{unit}s")
    if num_ranks > 1 and (kind, cause + ON_RANKS) in PLAIN:
        cause += ON_RANKS
    return f"Fix: {PLAIN[kind, cause]}".replace("{units}", f"{unit}s")
