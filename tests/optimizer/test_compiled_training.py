"""A compiled model, a compiled backward and a compiled `step()` train as the eager loop does."""

import copy
import itertools

import pytest
import sweeps
import torch
from loops import LOW, assert_close_weights, network, wrap

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
    ("plain", "aot_eager", "model"),
    ("plain", "aot_eager", "step outside"),
    ("clip", "aot_eager", "step inside"),
    ("masters", "aot_eager", "step inside"),
    ("plain", "aot_eager", "step alone"),
]
if sweeps.FULL:
    where = ("model", "step outside", "step inside", "step alone")
    CASES = list(itertools.product(OPTIONS, ("aot_eager", "inductor"), where))


@pytest.mark.parametrize(("options", "compiler", "where"), CASES)
def test_compiled_training_equals_the_eager_loop(options, compiler, where):
    dtype = LOW if options == "masters" else F32
    eager, reference = build(dtype, 2, **OPTIONS[options])
    for seed in range(4):
        loss_of(eager, batch(seed, dtype)).backward()
        reference.step(), reference.zero_grad()

    model, optimizer = build(dtype, 2, **OPTIONS[options])
    compiled = torch.compile(model, backend=compiler) if where == "model" else model

    def forward_backward(x):
        loss_of(compiled, x).backward()

    def step():
        optimizer.step()

    def whole(x):
        forward_backward(x)
        step(), optimizer.zero_grad()

    if where == "step alone":
        step = torch.compile(step, backend=compiler)
    if where == "step outside":
        forward_backward = torch.compile(forward_backward, backend=compiler)
    if where == "step inside":
        whole = torch.compile(whole, backend=compiler)
    for seed in range(4):
        whole(batch(seed, dtype))
    assert (optimizer.num_updates, optimizer.micro_step) == (2, 0)
    assert copy.deepcopy(optimizer).num_updates == 2
    tolerance = 1e-5 if dtype == F32 else 2e-2
    assert_close_weights(model, eager, tolerance, tolerance / 10)


def plain(model, optimizer, x, last):
    loss_of(model, x).backward()


def clipped(model, optimizer, x, last):
    loss_of(model, x).backward()
    if last:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


def twice(model, optimizer, x, last):
    loss_of(model, x).backward()
    (loss_of(model, 2 * x) * 0.5).backward()


def weighted(model, optimizer, x, last):
    with optimizer.accumulate(weight=3.0 if last else 1.0):
        loss_of(model, x).backward()


def after_an_ignored_one(model, optimizer, x, last):
    with optimizer.ignore():
        (loss_of(model, x) * 100).backward()
    loss_of(model, x).backward()


#: The compiled function, the number of micro-batches, and the wrapper's options. "model" is set to the model.
SKIPPING = {"max_grad_norm": 1e-2, "skip_nonfinite": True, "dtype": LOW}
BACKWARDS = {
    "plain": (plain, 3, {}),
    "clipped": (clipped, 2, {}),
    "twice": (twice, 2, {}),
    "skipping": (plain, 2, SKIPPING),
    "weighted": (weighted, 2, {"reduction": "weighted"}),
    "ignored": (after_an_ignored_one, 2, {"reduction": "sum"}),
    "model": (plain, 2, {"model": True}),
}


def shown_by(body, steps, options, compiler, clears=True):
    """Return p.grad after each backward of two and a half windows, and the parameters at the end."""
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


#: The hooks depend on Dynamo, not on the compiler of its graphs. The other compilers take ten times as long.
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
def test_a_traced_backward_updates_correctly_and_warns_about_p_grad(clears):
    warns = pytest.warns(UserWarning, match="past the hooks.*max_grad_norm")
    with torch._dynamo.config.patch(trace_autograd_ops=True), warns:
        _, ends = shown_by(plain, 2, {}, "eager", clears)
    _, wanted = shown_by(plain, 2, {}, None, clears)
    torch.testing.assert_close(ends, wanted)
