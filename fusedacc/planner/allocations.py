"""What was allocated when, what it was for, and what was alive at the peak.

A record is the same whether tensors were real, and the allocator told of them, or fake, and nobody allocated
anything: blocks with a beginning and an end.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

#: What memory is for. Accumulators are the wrapper's sums; gradients are those on their way to a sum, and the
#: stock loop's `p.grad`; temporaries are what the backward and the update need in passing.
KINDS = ("parameters", "accumulators", "gradients", "optimizer", "activations", "temporaries")
PARAMETERS, ACCUMULATORS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TEMPORARIES = KINDS
#: What the libraries keep for themselves, past torch's allocator.
LIBRARIES = "libraries"


@dataclasses.dataclass(eq=False)
class Block:
    """An allocation: alive from moment `start` up to moment `end`."""

    bytes: int
    start: int
    kind: str
    end: float = float("inf")


@dataclasses.dataclass(frozen=True)
class Inside:
    """What an operator allocates: `peak` bytes at most at once, and `kept` bytes that outlive it."""

    peak: int
    kept: int


@dataclasses.dataclass
class Operator:
    """A call, at a moment before which nothing of its own was allocated, and what its outputs hold."""

    start: int
    signature: Any
    outputs: list[Block] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Peak:
    """The most bytes that were alive at once, and what they were for."""

    bytes: int
    by_kind: Mapping[str, int]


def peak(
    blocks: Iterable[Block],
    operators: Iterable[Operator] = (),
    inside: Mapping[Any, Inside] | None = None,
) -> Peak:
    """The first moment at which most is alive.

    Args:
        blocks: of the record; moments are numbered from 0.
        operators: calls that allocate more than they return.
        inside: what they do, by signature; those without an entry allocate nothing else.
    """
    blocks, known = list(blocks), inside or {}
    measured = [(call, known[call.signature]) for call in operators if call.signature in known]
    for call, own in measured:
        _count_what_is_kept(call, own)
    changes: dict[int, int] = {}
    for block in blocks:
        changes[block.start] = changes.get(block.start, 0) + block.bytes
        if block.end != float("inf"):
            changes[int(block.end)] = changes.get(int(block.end), 0) - block.bytes
    within = {call.start: own.peak for call, own in measured}
    now = most = extra = 0
    at = -1
    for moment in sorted({*changes, *within}):
        more = within.get(moment, 0)
        now += changes.get(moment, 0)
        if now + more > most:
            most, at, extra = now + more, moment, more
    kinds: Counter[str] = Counter({TEMPORARIES: extra} if extra else {})
    for block in blocks:
        if block.start <= at < block.end and block.bytes:
            kinds[block.kind] += block.bytes
    return Peak(most, kinds)


def _count_what_is_kept(call: Operator, own: Inside) -> None:
    """Add to the last output what the fake ones did not show, such as workspaces of unknown size."""
    unseen = own.kept - sum(block.bytes for block in call.outputs)
    if unseen > 0 and call.outputs:
        call.outputs[-1].bytes += unseen
