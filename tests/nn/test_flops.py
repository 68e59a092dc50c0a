"""With `model=`, torch's counter finds the same FLOPs as without."""

import importlib
import itertools
import sys

import pytest
import torch
from backends import cpu_backends
from experts_models import TWINS, Mixture, batch, wrapped
from torch import nn
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

from fusedacc.kernels import flops

aten = torch.ops.aten


def layers():
    return nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4, bias=False))


def convolutions():
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(12, 4))


TOKENS, IMAGES = torch.arange(6).view(2, 3), torch.ones(2, 1, 4, 4)
#: A model, the plain PyTorch model to compare with, and the inputs.
MODELS = {
    "layers": (layers, layers, (TOKENS,)),
    "convolutions": (convolutions, convolutions, (IMAGES,)),
    **{
        f"experts, {how}": (lambda h=how: Mixture(h), lambda t=twin: Mixture(t), batch(0))
        for how, twin in TWINS.items()
    },
}
BFLOAT16 = {"accumulate_dtype": torch.bfloat16}
#: Options of the wrapper, the parameters' dtype, and whether autocast is on.
SETTINGS = {
    "float32": ({}, torch.float32, False),
    "autocast": ({"keep_casts": True}, torch.float32, True),
    "bfloat16": ({}, torch.bfloat16, False),
    "stochastic": ({**BFLOAT16, "rounding": "stochastic"}, torch.bfloat16, False),
    "eager": ({"backend": "eager"}, torch.float32, False),
    "triton": ({"backend": "triton"}, torch.float32, False),
}


def counted(model, inputs, autocast):
    """Return the FLOPs of a forward and a backward."""
    with FlopCounterMode(display=False) as counter:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(*inputs).float().square().mean()
        loss.backward()
    return counter.get_total_flops()


#: PyTorch's grouped product rejects an input that autocast has cast. Triton runs on a CPU only in its
#: interpreter.
LEFT_OUT = {("experts, grouped", "autocast")}
if "triton" not in cpu_backends():
    LEFT_OUT |= {(model, "triton") for model in MODELS}
CASES = [case for case in itertools.product(MODELS, SETTINGS) if case not in LEFT_OUT]


@pytest.mark.parametrize(("model", "setting"), CASES)
def test_a_micro_batch_has_plain_pytorchs_flops(model, setting):
    (make, make_twin, inputs), (options, dtype, autocast) = MODELS[model], SETTINGS[setting]
    inputs = [each.to(dtype) if each.is_floating_point() else each for each in inputs]
    model, twin = make().to(dtype), make_twin().to(dtype)
    _optimizer = wrapped(model, 2, **options)
    wanted = counted(twin, inputs, autocast)
    assert wanted > 0
    assert [counted(model, inputs, autocast) for _ in range(2)] == [wanted] * 2


@pytest.mark.parametrize("options", [{}, {"keep_casts": True}], ids=str)
def test_a_compiled_backward_has_plain_pytorchs_flops(options):
    model, twin = (nn.Sequential(nn.Linear(200, 100), nn.Linear(100, 200)) for _ in range(2))
    _optimizer = wrapped(model, 8, **options)
    found = []
    for call in (torch.compile(model, backend="aot_eager"), twin):
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(options)):
            call(torch.ones(3, 200)).sum().backward()
            loss = call(torch.ones(3, 200)).sum()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        found.append(counter.get_total_flops())
    assert found[0] == found[1]


GROUPED = {
    "rows": ((6, 4), (3, 4, 5), (6, 5), 2 * 6 * 4 * 5),
    "rows of both": ((4, 6), (6, 5), (3, 4, 5), 2 * 4 * 6 * 5),
    "columns": ((3, 4, 5), (5, 6), (4, 6), 2 * 4 * 5 * 6),
    "matrices": ((3, 4, 5), (3, 5, 2), (3, 4, 2), 2 * 3 * 4 * 5 * 2),
}


@pytest.mark.parametrize(("left", "right", "out", "wanted"), GROUPED.values(), ids=GROUPED)
def test_grouped_products_of_every_shape(left, right, out, wanted):
    formula = FlopCounterMode(display=False).flop_registry[aten._grouped_mm]
    tensors = (torch.empty(shape, device="meta") for shape in (left, right))
    assert formula(*tensors, None, out_val=torch.empty(out, device="meta")) == wanted


def test_a_product_into_a_sum_of_a_wider_dtype():
    """On a GPU. PyTorch's own formula raises an error up to torch 2.13."""
    total = torch.empty(4, 5, device="meta")
    left, right = (torch.empty(3, size, dtype=torch.bfloat16, device="meta") for size in (4, 5))
    formula = FlopCounterMode(display=False).flop_registry[aten.addmm]
    assert formula(total, left.t(), right, torch.float32, out=total, out_val=total) == 2 * 3 * 4 * 5


@pytest.fixture
def _unregistered(monkeypatch):
    """Use a registry without our operators."""
    kept = {name: own for name, own in flop_counter.flop_registry.items() if own.__module__ != flops.__name__}
    monkeypatch.setattr(flop_counter, "flop_registry", kept)


@pytest.mark.usefixtures("_unregistered")
def test_a_formula_that_is_there_stays():
    for packet in (aten.addmm, aten.addmm_):
        flop_counter.flop_registry.pop(packet, None)
        flop_counter.register_flop_formula(packet)(lambda *shapes, **more: 7)
    flops.register()
    total, left, right = torch.zeros(4, 5), torch.ones(4, 3), torch.ones(3, 5)
    with FlopCounterMode(display=False) as counter:
        total.addmm_(left, right)
        torch.addmm(total, left, right)
    assert counter.get_total_flops() == 2 * 7


def test_formulas_are_there_as_soon_as_the_counter_is_imported(monkeypatch):
    monkeypatch.setattr(torch.utils, "flop_counter", flop_counter)
    monkeypatch.delitem(sys.modules, flop_counter.__name__)
    finders = list(sys.meta_path)
    flops.register_in_time()
    assert len(sys.meta_path) == len(finders) + 1
    fresh = importlib.import_module(flop_counter.__name__)
    assert fresh is not flop_counter
    assert {aten.addmm_, torch.ops.fusedacc.gemm_accumulate_} <= set(fresh.flop_registry)
    assert sys.meta_path == finders


@pytest.mark.usefixtures("_unregistered")
@pytest.mark.parametrize("name", ["register_flop_formula", "flop_registry"])
def test_another_torch_may_have_moved_the_registry(name, monkeypatch):
    if name == "flop_registry":  # torch's function still uses it
        monkeypatch.setattr(flops, "_FORMULAS", {})
    monkeypatch.delattr(flop_counter, name)
    flops.register()
