"""The eligibility table, Python hooks, native hooks and `explain()` agree on who takes a gradient."""

from collections.abc import Callable

import pytest
import torch
from loops import wrap
from torch import Tensor, nn

from fusedacc.accumulators import GradState, Path
from fusedacc.accumulators.param import MODULE_PATHS
from fusedacc.autograd import eligibility
from fusedacc.autograd.eligibility import Case, Taker
from fusedacc.autograd.python_hooks import accumulate_grad_node
from fusedacc.kernels import native_module, torch_state
from fusedacc.optimizer import explain


def frozen(param: nn.Parameter) -> Tensor:
    param.requires_grad_(False)
    return torch.ones_like(param)


def hooked(param: nn.Parameter) -> Tensor:
    param.register_post_accumulate_grad_hook(lambda _: None)
    return torch.ones_like(param)


def reduced(param: nn.Parameter) -> Tensor:
    accumulate_grad_node(param).register_hook(lambda *gradients: None)
    return torch.ones_like(param)


#: For each case: a function that changes a parameter, if needed, and returns a gradient for it.
SITUATIONS: dict[str, Callable[[nn.Parameter], Tensor | None]] = {
    "frozen": frozen,
    "reduced_outside": reduced,
    "post_accumulate_hook": hooked,
    "absent": lambda _: None,
    "not_plain": lambda param: torch.ones_like(param).to_sparse(),
    "other_lane": lambda param: torch.ones_like(param).double(),
    "ordinary": torch.ones_like,
}


def parameter(needs_eager: bool = False):
    model = nn.Linear(3, 2, bias=False)
    optimizer = wrap(model, 2)
    (slot,) = optimizer._slots
    slot.set_needs_eager(needs_eager)
    return model, optimizer, slot


def test_native_hooks_list_the_same_cases_in_the_same_order():
    module = native_module.loaded()
    if module is None:
        pytest.skip("no native hooks here")
    assert [case.name for case in eligibility.GRADIENT_CASES] == module.CASES


@pytest.mark.parametrize("name", [*SITUATIONS, "needs_eager"])
def test_python_and_native_hooks_find_the_same_case(name, monkeypatch):
    model, optimizer, slot = parameter(needs_eager=name == "needs_eager")
    node, _ = optimizer._capture.registry.nodes[slot]
    gradient = SITUATIONS.get(name, torch.ones_like)(model.weight)
    if name == "reduced_outside":
        monkeypatch.setattr(torch_state, "process_group_up", lambda: True)
    assert eligibility.of_gradient(slot, gradient).name == name
    if slot.native_hook is not None:
        assert slot.native_hook.case_of(node, gradient) == name


#: Who may take the gradient that a hook has received.
TAKERS = (Taker.NOBODY, Taker.DONE, Taker.AUTOGRAD, Taker.TORCH, Taker.KERNEL)


@pytest.mark.parametrize("taker", TAKERS)
def test_the_taker_of_a_new_case_gets_the_gradient(taker, monkeypatch):
    monkeypatch.setenv("FUSEDACC_NATIVE_HOOKS", "0")
    added = Case("new", taker, "of this test", lambda _: True, lambda _slot, gradient: gradient is not None)
    monkeypatch.setattr(eligibility, "CASES", (added, *eligibility.CASES))
    monkeypatch.setattr(eligibility, "GRADIENT_CASES", (added, *eligibility.GRADIENT_CASES))
    model, _optimizer, slot = parameter()
    model(torch.ones(4, 3)).sum().backward()
    # What autograd stores is collected when the backward pass ends, if it has begun for the wrapper.
    assert (slot.accumulator is not None) == (taker in (Taker.AUTOGRAD, Taker.TORCH, Taker.KERNEL))
    assert (model.weight.grad is not None) == (taker is Taker.NOBODY)


@pytest.mark.parametrize("native", ["0", ""])
@pytest.mark.parametrize("name", ["frozen", "post_accumulate_hook", "ordinary"])
def test_the_taker_in_the_table_gets_the_gradient(name, native, monkeypatch):
    monkeypatch.setenv("FUSEDACC_NATIVE_HOOKS", native)
    model, optimizer, slot = parameter()
    other = nn.Parameter(torch.ones(2))
    SITUATIONS[name](model.weight)
    case = eligibility.of_parameter(slot)
    assert case.name == name
    (model(torch.ones(4, 3)) * other).sum().backward()
    stored = slot.grad_state is GradState.NOT_OURS and slot.param.grad is not None
    taken = case.taker if slot.accumulator is not None else Taker.NOBODY
    assert (Taker.AUTOGRAD if stored else taken) is case.taker
    assert name == "ordinary" or case.why in optimizer.explain()


def test_explain_prints_every_reason_in_the_table(monkeypatch):
    said = set()
    for make in (frozen, hooked):
        model, optimizer, _ = parameter()
        make(model.weight)
        said.add(optimizer.explain())
    _, optimizer, _ = parameter(needs_eager=True)
    said.add(optimizer.explain())
    monkeypatch.setattr(torch_state, "process_group_up", lambda: True)
    _, optimizer, slot = parameter()
    handle = accumulate_grad_node(slot.param).register_hook(lambda *gradients: None)
    said.add(optimizer.explain())
    handle.remove()
    # Without native code any process group counts as a reducer.
    assert (eligibility.REDUCED_OUTSIDE.why in optimizer.explain()) == (native_module.loaded() is None)
    monkeypatch.undo()
    model = nn.Linear(3, 2, bias=False)
    optimizer = wrap(model, 2, model=model)
    model.weight.register_hook(lambda gradient: gradient)
    optimizer._slots[0].paths = ("gemm",)
    said.add(optimizer.explain())
    reasons = [case.why for case in eligibility.CASES if case.of_parameter is not None and case.why]
    missing = [why for why in reasons if not any(why in text for text in said)]
    # test_torch_optimizers.py tests the first, and test_fsdp_masters.py, on two ranks, the second.
    assert missing == [eligibility.NOT_A_LEAF.why, eligibility.SHARDED.why]


def test_every_path_has_a_description_and_bytes():
    assert explain.BYTES.keys() == set(Path)
    assert explain.IN_MODULE.keys() == set(MODULE_PATHS)
    _, optimizer, slot = parameter()
    slot.paths = ("bilinear",)
    with pytest.raises(ValueError, match="'bilinear' is not a valid Path"):
        optimizer.explain()
