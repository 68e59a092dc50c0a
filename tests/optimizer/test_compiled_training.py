"""A compiled model, a compiled backward, step() inside and outside a compiled region: as the eager loop."""

import copy
import itertools
from contextlib import nullcontext

import pytest
import sweeps
import torch
from loops import LOW, assert_close_weights, assert_equal_weights, network, wrap

import fusedacc

F32 = torch.float32


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def build(dtype, steps, **options):
    model = network(dtype)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return model, fusedacc.AccumulatingOptimizer(inner, steps, **options)


def batch(seed, dtype):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)


def loss_of(model, x):
    return model(x).float().square().mean()


OPTIONS = {
    "plain": {},
    "clip": {"max_grad_norm": 0.05},
    "masters": {"master_weights": True, "max_grad_norm": 0.05},
}


CASES = [
    ("plain", "inductor", "model"),
    ("plain", "aot_eager", "step outside"),
    ("clip", "aot_eager", "step inside"),
    ("masters", "inductor", "step inside"),
]
if sweeps.FULL:
    CASES = list(
        itertools.product(OPTIONS, ("aot_eager", "inductor"), ("model", "step outside", "step inside"))
    )


@pytest.mark.parametrize(("options", "compiler", "where"), CASES)
def test_equals_the_eager_loop(options, compiler, where):
    dtype = LOW if options == "masters" else F32
    eager, reference = build(dtype, 2, **OPTIONS[options])
    for seed in range(4):
        loss_of(eager, batch(seed, dtype)).backward()
        reference.step(), reference.zero_grad()

    model, optimizer = build(dtype, 2, **OPTIONS[options])
    compiled = torch.compile(model, backend=compiler) if where == "model" else model

    def forward_backward(x):
        loss_of(compiled, x).backward()

    def whole(x):
        forward_backward(x)
        optimizer.step(), optimizer.zero_grad()

    if where == "step outside":
        forward_backward = torch.compile(forward_backward, backend=compiler)
    if where == "step inside":
        whole = torch.compile(whole, backend=compiler)
    for seed in range(4):
        whole(batch(seed, dtype))
    assert (optimizer.num_updates, optimizer.micro_step) == (2, 0)
    tolerance = 1e-5 if dtype == F32 else 2e-2
    assert_close_weights(model, eager, tolerance, tolerance / 10)


def test_only_the_update_is_compiled():
    eager, reference = build(F32, 1)
    model, optimizer = build(F32, 1)
    step = torch.compile(lambda: optimizer.step(), backend="aot_eager")
    for seed in range(3):
        for m, o, run in ((eager, reference, reference.step), (model, optimizer, step)):
            loss_of(m, batch(seed, F32)).backward()
            run()
            o.zero_grad()
    assert_equal_weights(model, eager)
    assert optimizer.num_updates == 3
    assert copy.deepcopy(optimizer).num_updates == 3


def plain(model, optimizer, x, last):
    loss_of(model, x).backward()


def clipped(model, optimizer, x, last):
    loss_of(model, x).backward()
    if last:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


def twice(model, optimizer, x, last):
    loss_of(model, x).backward()
    (loss_of(model, 2 * x) * 0.5).backward()


def weighed(model, optimizer, x, last):
    with optimizer.accumulate(weight=3.0 if last else 1.0):
        loss_of(model, x).backward()


def beside_an_ignored_one(model, optimizer, x, last):
    with optimizer.ignore():
        (loss_of(model, x) * 100).backward()
    loss_of(model, x).backward()


#: What is compiled, the number of micro-batches, and what the wrapper is made with; "model" is the model.
BACKWARDS = {
    "plain": (plain, 3, {}),
    "clipped": (clipped, 2, {}),
    "twice": (twice, 2, {}),
    "private": (
        plain,
        2,
        {"max_grad_norm": 1e-2, "skip_nonfinite": True, "private_gradients": True, "dtype": LOW},
    ),
    "weighted": (weighed, 2, {"reduction": "weighted"}),
    "ignored": (beside_an_ignored_one, 2, {"reduction": "sum"}),
    "model": (plain, 2, {"model": True}),
}


def shown_by(body, steps, options, compiler, clears=True):
    """What p.grad shows after each backward of two windows and a half, and the parameters in the end."""
    dtype = options.get("dtype", F32)
    model = network(dtype)
    kept = {name: model if name == "model" else value for name, value in options.items() if name != "dtype"}
    optimizer = wrap(model, steps, **kept)

    def forward_backward(x, last):
        body(model, optimizer, x, last)

    run = forward_backward if compiler is None else torch.compile(forward_backward, backend=compiler)
    shown = []
    for number in range(2 * steps + 1):
        run(batch(number, dtype), number % steps == steps - 1)
        shown.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
        if clears:
            optimizer.zero_grad()
    return shown, [p.detach() for p in model.parameters()]


#: The hooks meet Dynamo, whatever compiles its graphs; the others take ten times as long.
COMPILERS = ("eager", "aot_eager", "inductor") if sweeps.FULL else ("eager",)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("name", BACKWARDS)
def test_p_grad_is_the_final_gradient_after_a_compiled_backward(name, compiler):
    shown, ends = shown_by(*BACKWARDS[name], compiler)
    wanted, eager_ends = shown_by(*BACKWARDS[name], None)
    torch.testing.assert_close([shown, ends], [wanted, eager_ends], rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="this torch traces no backward"
)
@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("private", [True, False])
def test_a_backward_that_is_traced_updates_rightly_and_says_what_p_grad_is(private, clears):
    options = {"private_gradients": private}
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        said = nullcontext() if private else pytest.warns(UserWarning, match="past the hooks.*max_grad_norm")
        with said:
            _, ends = shown_by(plain, 2, options, "eager", clears)
    _, wanted = shown_by(plain, 2, options, None, clears)
    torch.testing.assert_close(ends, wanted)
