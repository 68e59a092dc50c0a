"""The reasons why a gradient is handled as it is: what `explain()` says of each.

The engine decides (`reason_for` in csrc/autograd/reason.cpp), for each gradient and for `explain()`.
"""

from __future__ import annotations

from typing import NamedTuple

from ..accumulators import Path

FROZEN = "frozen"
HOOK_AFTER_NODE = "hook_after_node"
NO_ENGINE = "no_engine"
ORDINARY = "ordinary"
IN_MODULE = "in_module"
WEIGHT_HOOK = "weight_hook"
SHARDED = "sharded"
NEEDS_EAGER = "needs_eager"
NOT_A_LEAF = "not_a_leaf"
POST_ACCUMULATE_HOOK = "post_accumulate_hook"

#: Autograd stores these gradients in p.grad. If p.grad is not the accumulator, they are collected from there.
LEFT_TO_AUTOGRAD = (HOOK_AFTER_NODE, POST_ACCUMULATE_HOOK, NO_ENGINE)


class Handling(NamedTuple):
    """What happens to a gradient, for `explain()`.

    Attributes:
        words: the reason in words. Empty where `explain()` composes the sentence.
        path: how the gradient reaches the accumulator, unless a module adds it.
        backend: what adds it; None for the kernel that is selected for its dtypes and device.
    """

    words: str
    path: Path
    backend: str | None


REASONS = {
    FROZEN: Handling("frozen: requires_grad is False", Path.NONE, "-"),
    NOT_A_LEAF: Handling(
        "not a leaf: autograd stores no gradient; one put into p.grad counts", Path.EAGER, "eager"
    ),
    SHARDED: Handling(
        "sharded by FSDP2, which averages the gradients of all ranks and leaves each its shard",
        Path.FSDP2,
        None,
    ),
    HOOK_AFTER_NODE: Handling(
        "a hook after its AccumulateGrad node may read p.grad, as that of a reducer that data_parallel= does "
        "not name (DistributedDataParallel, FSDP1, ...): autograd fills p.grad",
        Path.EAGER,
        "stock",
    ),
    POST_ACCUMULATE_HOOK: Handling(
        "a post-accumulate-grad hook needs p.grad: autograd fills it", Path.EAGER, "stock"
    ),
    NEEDS_EAGER: Handling(
        "sparse, complex or of a subclass: plain torch adds what no kernel takes", Path.EAGER, "eager"
    ),
    WEIGHT_HOOK: Handling(
        "a hook on the weight needs its gradient, so no module adds it", Path.MULTI_TENSOR, None
    ),
    NO_ENGINE: Handling(
        "there is no native engine: autograd stores the gradient, and plain torch adds it",
        Path.EAGER,
        "stock",
    ),
    IN_MODULE: Handling("", Path.MULTI_TENSOR, None),
    ORDINARY: Handling("", Path.MULTI_TENSOR, None),
}
