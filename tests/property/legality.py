"""Whether the contract defines what an event does in the current state."""

from .collector import Collector
from .event import Event
from .oracle import Loop
from .world import Case, World

BACKWARD = ("backward", "closure")
#: Events allowed between `unscale_` and its step, and before the gradient of a skipped update is cleared.
UNSCALED = ("step", "edit", "rate", "inspect", "grad", "model_copy", "unhook", "critic")
DROPPED = ("zero_grad", "discard", "rate", "inspect", "grad", "model_copy", "unhook", "critic")


def exact(case: Case) -> bool:
    """Whether the wrapper must give the same bits as the plain PyTorch loop."""
    loop, model = case.loop, case.model
    plain = loop.reduction == "sum" and loop.accumulate_dtype is None and not loop.clips
    # Rows of sparse gradients are added in another order.
    return not loop.counted and plain and model.dtype in ("float32", "float64") and model.front != "sparse"


def legal(case: Case, world: World, event: Event) -> bool:
    """Whether the contract defines this event in the state of the plain PyTorch side."""
    opt, kind, counted = world.opt, event.kind, case.loop.counted
    variant = event.get("variant", "plain")
    if not legal_scaled(case.loop, world, event):
        return False
    if variant == "stashed" and (world.stash is None or world.stashed_at != opt.num_updates):
        return False
    if (kind == "critic" or variant == "adversarial") and world.critic is None:
        return False
    if kind in ("critic", "unhook"):
        return True
    if ((counted and opt.stale) or world.ignored) and not legal_uncounted(world, event):
        return False
    if kind == "cast":
        # A fused kernel does not round a scaled bfloat16 gradient, so no test can see its value.
        hides_rounding = not counted and dict(case.optimizer.options).get("fused")
        odd = event.get("dtype") == "bfloat16" and ("lstm" in case.model.blocks or hides_rounding)
        if odd or case.loop.masters or case.loop.accumulate_dtype is not None:
            return False  # masters and accumulate_dtype may not fit the new dtype
        # A fused optimizer creates state even in an update that it skips.
        stateless = not any(opt.inner.state.values()) and not opt.num_skipped
        if exact(case):
            return stateless and event.get("dtype") in ("float32", "float64")
        return stateless and not opt.dirty and (counted or not (opt.stale or opt.mid_window))
    if kind == "restore" and (world.saved is None or world.saved_shapes != world.shapes):
        return False
    if kind == "edit" and event.get("change") == "nan" and (not case.loop.skips or case.loop.scaling):
        return False  # no update skips the NaN, or the scaler has checked before it
    if kind == "resize" and not resizable(world, event):
        return False
    if isinstance(opt, Collector):
        return legal_collected(world, opt, event)
    if kind in ("copy", "save", "restore"):
        empty = all(p.grad is None for p in world.params)
        if kind == "save" or event.get("how") == "state_dict":
            return empty or (opt.ran and not opt.stale)
        return empty  # PyTorch's copies lose p.grad, and loading keeps it
    return kind not in ("flush", "edit_spent", "put")


def legal_uncounted(world: World, event: Event) -> bool:
    """Whether a used or ignored gradient can be distinguished from what a backward may have added to it."""
    if event.kind == "cast" and world.case.model.front == "sparse":
        return False  # the cast gradient is another tensor
    if event.kind == "cast" or (event.kind == "freeze" and event.get("on")):
        return not world.written
    return not (world.moved and event.kind in (*BACKWARD, "raising", "ignored", "edit_spent"))


def resizable(world: World, event: Event) -> bool:
    """Whether plain PyTorch could continue: no gradient and no graph has the old shape."""
    spent = getattr(world.opt, "spent", lambda p: False)
    clear = all(p.grad is None or spent(p) for p in world.params)
    return clear and (bool(event.get("new")) or not world.keeps_graphs)


def legal_scaled(loop: Loop, world: World, event: Event) -> bool:
    """Whether loss scaling, skipped updates and master weights allow the event."""
    opt, kind = world.opt, event.kind
    if opt.unscaled and kind not in UNSCALED:
        return False
    if opt.found and not loop.counted and kind not in DROPPED:
        return False
    if kind == "closure":
        return loop.scaling is None and (loop.counted or not (loop.skips or loop.masters))
    if kind not in ("unscale", "step", "flush") or loop.scaling is None:
        return True
    if not loop.counted:  # torch's scaler needs a gradient
        return world.scaler.ready and opt.has_gradients
    if kind == "unscale":
        return world.scaler.ready and opt.dirty
    return world.scaler.ready or not opt.mid_window


def legal_collected(world: World, opt: Collector, event: Event) -> bool:
    kind, loop = event.kind, world.case.loop
    again = opt.dirty or event.get("calls") == 2 or event.get("variant") == "retain"
    again = again or event.get("mode") == "reentrant"
    again = again or (not loop.counted and (opt.stale or opt.window.count > 0))
    if kind in BACKWARD and again and any(p._post_accumulate_grad_hooks for p in opt.params):
        return False  # a hook that changes p.grad may see one backward's gradient or the micro-batch's
    if kind in BACKWARD or kind == "raising":
        emptied = event.get("zero") and not loop.counted
        heavy = event.get("weight") != 0 or (opt.window.weight > 0 and not emptied)
        single = not loop.needs_context or not opt.dirty
        assigns = event.get("variant") == "assign" and (opt.dirty or not loop.counted)
        return heavy and single and not assigns and not (kind == "closure" and opt.dirty)
    if kind == "step":
        fresh = all(p.grad is None for p in opt.params) or opt.stale
        return bool(opt.dirty or (fresh and loop.counted) or (not loop.counted and opt.window.count))
    if kind == "zero_grad":
        return not opt.dirty if loop.counted else not (event.get("model") and loop.needs_context)
    if kind == "flush":
        return loop.counted and not (opt.dirty and (loop.needs_context or loop.scaling))
    if kind == "discard":
        return loop.counted or not opt.stale
    if kind == "edit":
        if not loop.counted:
            return opt.dirty and loop.reduction == "sum"
        weight = 1.0 if opt.context is None else opt.context.weight
        final = opt.dirty and opt.will_update
        return final and (not loop.weighs or (loop.reduction == "weighted" and weight > 0))
    if kind == "edit_spent":
        return loop.counted and opt.stale and not opt.dirty
    if kind == "put":
        return loop.counted and opt.stale and not (opt.dirty or loop.needs_context or loop.scaling)
    if kind in ("append", "add_group") and opt.window.count and world.removed:
        return False  # no call has noticed the removal
    if kind in ("append", "remove", "exchange", "resize"):
        between = not opt.window.count and (loop.counted or not opt.stale)
        return not opt.dirty and (between or (loop.counted and kind != "resize"))
    if kind == "ignored":
        return not (opt.dirty and event.get("zero"))
    if kind in ("copy", "save", "restore", "add_group", "freeze", "hook"):
        return not opt.dirty and (loop.counted or not (opt.stale or opt.mid_window))
    return kind in ("grad", "stash", "swap", "write", "rate", "model_copy", "inspect", "unscale")
