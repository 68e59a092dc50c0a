"""What the autograd graph of a loss says: its constant factors, and whether it is a mean or a sum, and of how
many.

`(F.cross_entropy(logits, labels) / 4).backward()` has the graph Div(4) -> NllLoss(mean). So the loss is 1/4
of a mean over the labels that are not ignored. That is what an equal share of 4 micro-batches looks like.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

#: An autograd node. PyTorch has no public type for the nodes of operators.
Node = Any

#: Beginnings of the names of nodes that change no value.
UNCHANGED = (
    "View",
    "Reshape",
    "UnsafeView",
    "Squeeze",
    "Unsqueeze",
    "Clone",
    "Alias",
    "ToCopy",
    "AddBackward",
    "SubBackward",
    "NegBackward",
)
#: Beginnings of the names of losses with an argument `reduction`.
LOSSES = (
    "Nll",
    "MseLoss",
    "BinaryCrossEntropy",
    "SmoothL1Loss",
    "HuberLoss",
    "SoftMarginLoss",
    "KlDiv",
    "L1Loss",
)
#: ATen's numbers for reductions. 0 is "none".
REDUCTIONS: dict[int, Literal["mean", "sum"]] = {1: "mean", 2: "sum"}
#: Sums of losses in sums of losses are followed to this depth.
MAX_DEPTH = 64


@dataclass(frozen=True)
class Loss:
    """A loss, as its graph describes it: `factor` times a mean or a sum over `count` values.

    Attributes:
        factor: product of all constant factors, without the sign.
        kind: "mean", "sum", or "unknown".
        count: over how many values it is a mean or a sum; None: unknown.
        unit: what these values are: "token", "label" or "value".
        divisors: the constants by which it is divided.
        factors: the constants by which it is multiplied.
        parts: number of losses that it adds up.
        is_divided_sum: whether it is a mean because one of its constants divides a sum by `count`.
    """

    factor: float = 1.0
    kind: Literal["mean", "sum", "unknown"] = "unknown"
    count: float | None = None
    unit: Literal["token", "label", "value"] = "value"
    divisors: tuple[float, ...] = ()
    factors: tuple[float, ...] = ()
    parts: int = 1
    is_divided_sum: bool = False

    @property
    def mean_count(self) -> float:
        """Values over which a mean is taken. A sum, or an unknown loss, counts as 1."""
        return self.count or 1.0 if self.kind == "mean" else 1.0


def read_loss(node: Node, depth: int = 0) -> tuple[Loss, Node]:
    """Follow a graph from its root through constant factors to the node that reduces.

    Args:
        node: the root, `loss.grad_fn`; None: a leaf.
        depth: number of sums of losses around this one.

    Returns:
        The loss, and the node at which the search has ended.

    Raises:
        RuntimeError: the graph was freed, or a saved tensor was changed in place.
    """
    divisors: tuple[float, ...] = ()
    factors: tuple[float, ...] = ()
    factor = 1.0
    while node is not None:
        name, inputs = node.name(), _inputs(node)
        if len(inputs) != 1:
            break
        constant = _saved_constant(node) if name.startswith(("DivBackward", "MulBackward")) else None
        if constant is not None and name.startswith("Div"):
            factor = factor / constant if constant else math.inf  # then gradients are inf or nan
            divisors += (constant,)
        elif constant is not None:
            factor *= constant
            factors += (abs(constant),)
        elif not _keeps_value(node, name):
            break
        node = inputs[0]
    loss = Loss(abs(factor), divisors=divisors, factors=factors)
    return (loss if node is None else _reduction(loss, node, depth)), node


def _inputs(node: Node) -> list[Node]:
    return [each for each, _ in node.next_functions if each is not None]


def _saved_constant(node: Node) -> float | None:
    """Return the other operand of a product or quotient, if it is one number."""
    for name in ("_saved_other", "_saved_self"):
        value = getattr(node, name, None)
        if value is not None and (not isinstance(value, Tensor) or value.numel() == 1):
            return float(value)
    return None


def _keeps_value(node: Node, name: str) -> bool:
    """Return whether a node with one input returns that value, up to its sign."""
    return (
        name.startswith(UNCHANGED)
        or (name.startswith("WhereBackward") and node._saved_condition.numel() == 1)
        or (name.startswith("MeanBackward") and node._saved_self_sym_numel == 1)
        or (name.startswith("SumBackward") and math.prod(node._saved_self_sym_sizes) == 1)
    )


def _reduction(loss: Loss, node: Node, depth: int) -> Loss:
    """Add to a loss what the node behind its constant factors says."""
    name = node.name()
    if name.startswith(LOSSES) and getattr(node, "_saved_reduction", 0) in REDUCTIONS:
        kind = REDUCTIONS[node._saved_reduction]
        loss = replace(loss, kind=kind, count=_labels(node, kind), unit=_unit(node))
    elif name.startswith("MeanBackward"):
        loss = replace(loss, kind="mean", count=float(node._saved_self_sym_numel))
    elif name.startswith("SumBackward"):
        loss = replace(loss, kind="sum", count=_summands(node))
    elif name.startswith(("AddBackward", "SubBackward")) and depth < MAX_DEPTH:
        loss = _sum_of_losses(loss, [read_loss(each, depth + 1) for each in _inputs(node)])
    if loss.kind == "sum" and loss.count and any(abs(each - loss.count) < 1e-3 for each in loss.divisors):
        # sum(x * mask) / mask.sum()
        loss = replace(loss, kind="mean", factor=loss.factor * loss.count, is_divided_sum=True)
    return loss


def _labels(node: Node, kind: str) -> float | None:
    """Return over how many values a loss with an argument `reduction` is taken, without ignored labels."""
    if getattr(node, "_saved_weight", None) is not None and hasattr(node, "_saved_ignore_index"):
        # With class weights, a sum may be divided by the samples or by their weights.
        used = node._saved_target != node._saved_ignore_index
        return float(used.sum()) if kind == "mean" else None
    total_weight = getattr(node, "_saved_total_weight", None)  # the labels that are not ignored
    return float(node._saved_self.numel() if total_weight is None else total_weight)


def _unit(node: Node) -> Literal["token", "label", "value"]:
    """Return what a loss with an argument `reduction` counts: tokens, if its logits had three dimensions."""
    if not node.name().startswith("Nll"):
        return "value"
    inputs = _inputs(node)
    while len(inputs) == 1:
        if len(getattr(inputs[0], "_saved_self_sym_sizes", ())) == 3:
            return "token"
        if not inputs[0].name().startswith((*UNCHANGED, "LogSoftmax")):
            break
        inputs = _inputs(inputs[0])
    return "label"


def _sum_of_losses(loss: Loss, parts: list[tuple[Loss, Node]]) -> Loss:
    """Return a sum of losses: the one with labels counts, or what all parts agree on."""
    # Divisors of the sum say nothing of accumulation: (real + fake) / 2 is a mean over the parts.
    loss = replace(loss, divisors=(), parts=sum(part.parts for part, _ in parts))
    labelled = [part for part, end in parts if end is not None and end.name().startswith("Nll")]
    found = labelled if len(labelled) == 1 else [part for part, _ in parts]
    if len({(part.kind, part.count, round(part.factor, 9)) for part in found}) != 1:
        return loss
    first = found[0]
    return replace(
        loss,
        factor=loss.factor * first.factor,
        kind=first.kind,
        count=first.count,
        unit=first.unit,
        factors=loss.factors + first.factors,
    )


def _summands(node: Node) -> float | None:
    """Return how many values a sum adds, without those that a mask of 0 and 1 removes. None: unknown."""
    numel = math.prod(node._saved_self_sym_sizes)
    before = node.next_functions[0][0]
    if before is not None and before.name().startswith("MulBackward"):
        for name in ("_saved_other", "_saved_self"):
            mask = getattr(before, name, None)
            if isinstance(mask, Tensor) and mask.numel() > 1 and not mask.requires_grad:
                is_binary = bool(((mask == 0) | (mask == 1)).all())
                return float(mask.sum()) * numel / mask.numel() if is_binary else None
    return float(numel)
