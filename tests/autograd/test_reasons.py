"""The engine's reasons: who handles a gradient, and what `explain()` says of it."""

from collections.abc import Callable

import pytest
import torch
from loops import wrap
from torch import nn

from fusedacc.accumulators import GradState, Path
from fusedacc.accumulators.param import MODULE_PATHS
from fusedacc.autograd import reasons
from fusedacc.autograd.reasons import REASONS
from fusedacc.autograd.registration import accumulate_grad_node
from fusedacc.kernels import native_module
from fusedacc.optimizer import explain

needs_engine = pytest.mark.skipif(native_module.module() is None, reason=f"{native_module.why_not()}")


def frozen(param: nn.Parameter) -> None:
    param.requires_grad_(False)


def hooked(param: nn.Parameter) -> None:
    param.register_post_accumulate_grad_hook(lambda _: None)


def reduced(param: nn.Parameter) -> None:
    accumulate_grad_node(param).register_hook(lambda *gradients: None)


#: By reason: a function that changes a parameter.
SITUATIONS: dict[str, Callable[[nn.Parameter], None]] = {
    reasons.FROZEN: frozen,
    reasons.HOOK_AFTER_NODE: reduced,
    reasons.POST_ACCUMULATE_HOOK: hooked,
    reasons.ORDINARY: lambda param: None,
}


def parameter(needs_eager: bool = False):
    model = nn.Linear(3, 2, bias=False)
    optimizer = wrap(model, 2)
    (slot,) = optimizer._slots
    slot.needs_eager = needs_eager
    return model, optimizer, slot


@needs_engine
@pytest.mark.parametrize("reason", SITUATIONS)
def test_a_gradient_goes_where_its_reason_says(reason):
    model, optimizer, slot = parameter()
    other = nn.Parameter(torch.ones(2))
    SITUATIONS[reason](model.weight)
    assert optimizer._engine.reason_for(slot) == reason
    (model(torch.ones(4, 3)) * other).sum().backward()
    # What autograd has stored is added when the backward pass ends.
    assert (slot.accumulator is not None) == (reason != reasons.FROZEN)
    assert slot.grad_state == GradState.NOT_OURS
    assert model.weight.grad is None
    assert REASONS[reason].words in optimizer.explain()


@needs_engine
def test_a_hook_that_was_removed_is_no_reason():
    model, optimizer, slot = parameter()
    model.weight.register_post_accumulate_grad_hook(lambda _: None).remove()
    model.weight.register_hook(lambda gradient: gradient).remove()
    slot.paths = ("gemm",)
    assert optimizer._engine.reason_for(slot) == reasons.IN_MODULE


@needs_engine
def test_explain_says_every_reason():
    said = set()
    for make in (frozen, hooked, reduced):
        model, optimizer, _ = parameter()
        make(model.weight)
        said.add(optimizer.explain())
    _, optimizer, _ = parameter(needs_eager=True)
    said.add(optimizer.explain())
    model = nn.Linear(3, 2, bias=False)
    optimizer = wrap(model, 2, model=model)
    model.weight.register_hook(lambda gradient: gradient)
    optimizer._slots[0].paths = ("gemm",)
    said.add(optimizer.explain())
    missing = {reason for reason, known in REASONS.items() if not any(known.words in text for text in said)}
    # test_torch_optimizers.py tests the first; test_fsdp_masters.py, on two ranks, the second.
    assert missing == {reasons.NOT_A_LEAF, reasons.SHARDED, reasons.NO_ENGINE}


def test_explain_says_that_there_is_no_engine(monkeypatch):
    monkeypatch.setenv("FUSEDACC_ENGINE", "0")
    _, optimizer, _ = parameter()
    text = optimizer.explain()
    assert REASONS[reasons.NO_ENGINE].words in text
    assert "engine: none (FUSEDACC_ENGINE=0)" in text


def test_every_path_has_a_description_and_bytes():
    assert explain.BYTES.keys() == set(Path)
    assert explain.IN_MODULE.keys() == set(MODULE_PATHS)
    _, optimizer, slot = parameter()
    slot.paths = ("bilinear",)
    with pytest.raises(ValueError, match="'bilinear' is not a valid Path"):
        optimizer.explain()
