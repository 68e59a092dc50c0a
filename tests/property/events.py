"""Random cases: a model, an optimizer, a loop and a list of events, all from one seed."""

import random

import adagrad
import torch

from .edits import CHANGES, ROADS
from .event import Event
from .models import ModelSpec, random_model
from .oracle import NEVER, Loop
from .scaling import Scaling
from .world import Case, OptimizerSpec

VARIANTS = {
    "plain": 12,
    "inputs": 2,
    "create_graph": 1,
    "penalty": 1,
    "retain": 1,
    "assign": 1,
    "thread": 1,
    "stashed": 2,
    "adversarial": 3,
}
NO_REENTRANT = ("inputs", "create_graph", "penalty", "assign", "retain")
BETWEEN = {
    "freeze": 3,
    "hook": 2,
    "unhook": 1,
    "cast": 2,
    "copy": 3,
    "save": 2,
    "restore": 2,
    "rate": 1,
    "add_group": 2,
    "grad": 1,
    "stash": 2,
    "swap": 1,
    "write": 1,
    "model_copy": 1,
    "inspect": 2,
    "ignored": 2,
    "set_grad": 1,
    "step": 1,
    "flush": 2,
    "discard": 1,
    "raising": 2,
    "critic": 3,
    "zero_grad": 1,
    "edit": 1,
    "edit_spent": 3,
    "put": 1,
    "append": 2,
    "remove": 1,
    "exchange": 2,
    "resize": 2,
}
#: After these events a checkpoint is sometimes saved or loaded.
CHECKED = ("freeze", "edit_spent", "put", "append", "remove", "exchange", "resize", "flush")
OPTIMIZERS = (
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.02, "momentum": 0.9, "foreach": True}),
    ("Adam", {"lr": 0.01}),
    ("AdamW", {"lr": 0.01, "foreach": True}),
    ("AdamW", {"lr": 0.01, "foreach": False}),
    ("AdamW", {"lr": 0.01, "fused": True}),
    ("SGD", {"lr": 0.1, "fused": True}),
    ("Adam", {"lr": 0.01, "fused": True}),
    *([("Adagrad", {"lr": 0.05})] if adagrad.GROWS else []),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9}),
    ("NAdam", {"lr": 0.01}),
    ("Adafactor", {"lr": 0.01}),
)
DTYPES = ("float32", "float64", "bfloat16")


def random_optimizer(rng: random.Random, model: ModelSpec, loop: Loop) -> OptimizerSpec:
    name, options = rng.choice(OPTIMIZERS)
    halves = model.dtype == "float16" and not loop.masters  # whose squares vanish
    plain = model.front == "sparse" or halves or rng.random() < 0.25
    # A fused kernel does not round a scaled low-precision gradient, so no test can see its value.
    scaled = loop.clips or loop.scaling is not None or loop.reduction != "sum"
    kept_low = not loop.counted and scaled and model.dtype in ("bfloat16", "float16")  # without zero_grad()
    unseen = options.get("fused") and not loop.masters and (loop.accumulate_dtype is not None or kept_low)
    plain = (
        plain or unseen or (name == "Adafactor" and "expanded" in model.blocks)
    )  # it divides by an empty one's size
    if plain:
        name, options = OPTIMIZERS[0]
    return OptimizerSpec(name, tuple(options.items()), groups=rng.choice([1, 1, 2]))


def random_scaling(rng: random.Random, counted: bool) -> Scaling:
    kind = "fusedacc" if counted or rng.random() < 0.3 else "torch"
    return Scaling(kind, rng.choice([2.0**4, 2.0**9, 2.0**14]), rng.choice([1, 2, 3]))


def random_loop(rng: random.Random, dtype: str) -> Loop:
    if rng.random() < 0.3:
        reduction = rng.choices(["sum", "mean", "weighted", "normalized"], [5, 1, 1, 1])[0]
        steps = None
    else:
        reduction = rng.choices(["mean", "sum", "weighted", "normalized"], [5, 2, 2, 2])[0]
        ragged = tuple(rng.randint(1, 4) for _ in range(3))
        steps = rng.choice([1, 2, 2, 3, 4, ragged])
    low = rng.random() < {"bfloat16": 0.3, "float32": 0.05}.get(dtype, 0.0)
    rounding = rng.choice(["stochastic", "stochastic", "nearest"]) if low else "nearest"
    # With low-precision sums, p.grad shows only a rounded copy of what updates a master weight.
    masters = dtype in ("bfloat16", "float16") and not low and rng.random() < 0.5
    scales = rng.random() < (0.6 if dtype == "float16" else 0.25)
    scaling = random_scaling(rng, steps is not None) if scales else None
    skips = rng.random() < 0.2
    clip = rng.choice([None, None, NEVER, 0.01, 0.1, 1.0])
    norm_type = rng.choice([2.0, 2.0, 2.0, float("inf")])
    low = torch.bfloat16 if low else None
    return Loop(steps, reduction, low, rounding, masters, skips, scaling, clip, norm_type)


def random_backward(rng: random.Random, loop: Loop, odd: float, dtype: str) -> dict[str, object]:
    variant = rng.choices(list(VARIANTS), list(VARIANTS.values()))[0] if rng.random() < odd else "plain"
    sums = dtype != "float16" or loop.scaling is None  # a scaled float16 sum in p.grad would overflow
    mode = rng.choices([None, "nonreentrant", "reentrant" if sums else None], [4, 1, 1])[0]
    args: dict[str, object] = {
        "seed": rng.randrange(1000),
        "variant": variant,
        "depth": rng.choice([0, 1, 2, 9, 9]),
    }
    if mode and not (mode == "reentrant" and variant in NO_REENTRANT):
        args["mode"] = mode
    args["calls"] = 2 if variant not in ("stashed", "assign") and rng.random() < 0.15 else 1
    if rng.random() < 0.2:
        args["accumulate"] = True
    if loop.weighs:
        args["weight"] = rng.choice([1.0, 2.0, 0.5, 3.0, 7.0])
        late = loop.reduction == "normalized" and rng.random() < 0.5
        if late:
            args["late"] = True
        elif rng.random() < 0.15:
            args |= {"weight": 0.0, "nan": variant != "adversarial"}
    if loop.watches and rng.random() < 0.12:
        args["bad"] = rng.choice(["inf", "nan"])
        if rng.random() < 0.7:
            args["index"] = rng.randrange(20)
    return args


def random_edit(rng: random.Random, changes: tuple[str, ...]) -> dict[str, object]:
    args = {"change": rng.choice(changes), "road": rng.choice(ROADS), "value": rng.choice([0.25, 5.0])}
    return args | ({} if rng.random() < 0.3 else {"index": rng.randrange(20)})


def random_event(rng: random.Random, kind: str, loop: Loop) -> Event:
    args: dict[str, object] = {}
    if kind in ("grad", "stash", "model_copy", "ignored", "raising", "critic"):
        args["seed"] = rng.randrange(1000)
    if kind in ("grad", "stash", "model_copy", "ignored"):
        args["depth"] = rng.choice([0, 1, 9])
    if kind == "ignored":
        args["zero"] = rng.random() < (0.5 if loop.counted else 0.2)
    if kind == "critic":
        args["zero"] = rng.random() < 0.5
    if kind == "raising":
        args |= {"early": rng.random() < 0.3, "weight": 2.0 if loop.weighs else None}
    if kind in ("freeze", "hook", "swap", "set_grad", "write", "put", "remove", "exchange"):
        args["index"] = rng.randrange(20)
    if kind == "freeze":
        args |= {"on": rng.random() < 0.5, "one": rng.random() < 0.5}
    if kind == "edit":
        args = random_edit(rng, CHANGES)
    if kind == "edit_spent":
        args = random_edit(rng, ("halve", "fill", "nan", "remove"))
    if kind == "append":
        args |= {"one": rng.random() < 0.5, "group": rng.random() < 0.5}
    if kind == "resize":
        args |= {"where": rng.choice(["front", "head"]), "rows": rng.choice([2, 4, 5, 8, 9, 12])}
        args["new"] = rng.random() < 0.5
    if kind == "hook":
        args["action"] = rng.choice(["scale", "keep", "post_see", "post_halve"])
    if kind == "set_grad":
        args["none"] = rng.random() < 0.5
    if kind == "cast":
        args["dtype"] = rng.choice(DTYPES)
    if kind == "copy":
        args |= {"how": rng.choice(["deepcopy", "pickle", "state_dict"]), "keep": rng.random() < 0.7}
        args["late"] = rng.random() < 0.3
    if kind == "zero_grad":
        args |= {"set_to_none": rng.random() < 0.7, "model": rng.random() < 0.3}
    return Event(kind, args)


def random_case(seed: int) -> Case:
    """Return a case that `seed` determines. A quarter of all cases are plain training."""
    rng = random.Random(seed)
    model = random_model(rng)
    loop = random_loop(rng, model.dtype)
    odd = rng.choice([0.1, 0.3, 0.6, 0.9])
    unscales = rng.choice([0.0, 0.5, 1.0])
    critic_loop = Loop(rng.choice([None, 1, 2, 3]), "sum")
    zeroes = 0.0 if rng.random() < 0.3 else (1.0 if loop.counted else 0.5)
    epochs = rng.choice([0.0, 0.15, 0.4])
    events: list[Event] = []
    for _ in range(rng.randint(5, 12)):
        while rng.random() < odd * 0.6:
            kind = rng.choices(list(BETWEEN), list(BETWEEN.values()))[0]
            events.append(random_event(rng, kind, loop))
            if kind in CHECKED and rng.random() < 0.3:
                events.append(random_event(rng, rng.choice(["copy", "save", "restore"]), loop))
        calls_back = loop.scaling is None and (loop.counted or not (loop.skips or loop.masters))
        closure = rng.random() < 0.15 and calls_back
        backwards = 2 if rng.random() < 0.15 else 1
        if closure:
            args = random_backward(rng, loop, odd, model.dtype)
            events.append(Event("closure", args | {"zero": rng.random() < 0.5}))
        else:
            for _ in range(backwards):
                events.append(Event("backward", random_backward(rng, loop, odd, model.dtype)))
            if rng.random() < odd * 0.15:
                events.append(
                    random_event(
                        rng,
                        rng.choice(["grad", "inspect", "model_copy", "raising", "unhook", "ignored"]),
                        loop,
                    )
                )
            steps = loop.counted or rng.random() < 0.4
            if loop.scaling is not None and steps and rng.random() < unscales:
                events.append(Event("unscale"))
            while rng.random() < odd * 0.4:
                events.append(random_event(rng, "edit", loop))
            if steps:
                events.append(Event("step", {"late_update": rng.random() < 0.2}))
        if rng.random() < zeroes:
            events.append(
                Event("zero_grad", {"set_to_none": rng.random() < 0.85, "model": rng.random() < 0.1})
            )
        if loop.counted and rng.random() < epochs:
            events.append(Event("flush"))
    if loop.counted:
        events.append(Event("flush"))
    if model.spare and rng.random() < 0.6:
        events.insert(rng.randrange(len(events) // 2), Event("add_group"))
    return Case(seed, model, random_optimizer(rng, model, loop), loop, critic_loop, tuple(events))
