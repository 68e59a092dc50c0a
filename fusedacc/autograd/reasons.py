"""The reasons why a gradient is handled as it is: what `explain()` says of each.

The engine decides (`Reason` in csrc/autograd/engine.h), for each gradient that comes and for `explain()`.
"""

from __future__ import annotations

FROZEN = "frozen"
REDUCED_OUTSIDE = "reduced_outside"
NO_ENGINE = "no_engine"
ORDINARY = "ordinary"
IN_MODULE = "in_module"
WEIGHT_HOOK = "weight_hook"
SHARDED = "sharded"
NEEDS_EAGER = "needs_eager"
NOT_A_LEAF = "not_a_leaf"
POST_ACCUMULATE_HOOK = "post_accumulate_hook"

#: Autograd stores these gradients in p.grad. If p.grad is not the accumulator, they are collected from there.
LEFT_TO_AUTOGRAD = (REDUCED_OUTSIDE, POST_ACCUMULATE_HOOK, NO_ENGINE)

#: In words. Empty where `explain()` composes the sentence.
REASONS = {
    FROZEN: "frozen: requires_grad is False",
    NOT_A_LEAF: "not a leaf: autograd stores no gradient; one put into p.grad counts",
    SHARDED: "sharded by FSDP2, which averages the gradients of all ranks and leaves each its shard",
    REDUCED_OUTSIDE: (
        "a reducer that data_parallel= does not name (DistributedDataParallel, FSDP1, ...) reads p.grad: "
        "autograd fills it"
    ),
    POST_ACCUMULATE_HOOK: "a post-accumulate-grad hook needs p.grad: autograd fills it",
    NEEDS_EAGER: "sparse, complex or of a subclass: plain torch adds what no kernel takes",
    WEIGHT_HOOK: "a hook on the weight looks at its gradient, which is written for it",
    NO_ENGINE: "there is no native engine: autograd stores the gradient, and plain torch adds it",
    IN_MODULE: "",
    ORDINARY: "",
}
