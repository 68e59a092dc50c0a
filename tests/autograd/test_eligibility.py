"""Who takes a gradient: the table, the hooks in Python and the native ones, and `explain()` agree."""

from collections.abc import Callable

import pytest
import torch
from loops import wrap
from torch import Tensor, nn

import fusedacc
from fusedacc.accumulators import GradState, Path
from fusedacc.accumulators.param import MODULE_PATHS
from fusedacc.autograd import eligibility
from fusedacc.autograd.eligibility import Case, Taker
from fusedacc.autograd.python_hooks import accumulate_grad_node
from fusedacc.kernels import native_module
from fusedacc.optimizer import explain


class Subclass(Tensor):
    pass


def frozen(param: nn.Parameter) -> Tensor:
    param.requires_grad_(False)
    return torch.ones_like(param)


def hooked(param: nn.Parameter) -> Tensor:
    param.register_post_accumulate_grad_hook(lambda _: None)
    return torch.ones_like(param)


#: What a gradient is like, or what is done to its parameter: by the case that is to be found.
SITUATIONS: dict[str, Callable[[nn.Parameter], Tensor | None]] = {
    "frozen": frozen,
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


def test_the_native_hooks_have_the_cases_of_a_gradient_by_name_and_order():
    module = native_module.loaded()
    if module is None:
        pytest.skip("no native hooks here")
    assert [case.name for case in eligibility.GRADIENT_CASES] == module.CASES


@pytest.mark.parametrize("name", [*SITUATIONS, "needs_eager"])
def test_python_and_native_hooks_find_the_same_case(name):
    model, _optimizer, slot = parameter(needs_eager=name == "needs_eager")
    gradient = SITUATIONS.get(name, torch.ones_like)(model.weight)
    assert eligibility.of_gradient(slot, gradient).name == name
    if slot.native is not None:
        assert slot.native.case_of(model.weight, gradient) == name


#: Who may take the gradient that a hook has received.
TAKERS = (Taker.NOBODY, Taker.DONE, Taker.AUTOGRAD, Taker.TORCH, Taker.KERNEL)


@pytest.mark.parametrize("taker", TAKERS)
def test_a_new_case_is_treated_as_its_taker_says(taker, monkeypatch):
    monkeypatch.setenv("FUSEDACC_NATIVE_HOOKS", "0")
    added = Case("new", taker, "of this test", lambda _: True, lambda _slot, gradient: gradient is not None)
    monkeypatch.setattr(eligibility, "CASES", (added, *eligibility.CASES))
    monkeypatch.setattr(eligibility, "GRADIENT_CASES", (added, *eligibility.GRADIENT_CASES))
    model, _optimizer, slot = parameter()
    model(torch.ones(4, 3)).sum().backward()
    is_added = taker in (Taker.TORCH, Taker.KERNEL)
    assert (slot.accumulator is not None) == is_added
    assert (model.weight.grad is not None) == (taker in (Taker.AUTOGRAD, Taker.NOBODY))


@pytest.mark.parametrize("native", ["0", ""])
def test_a_subclass_is_not_plain(native, monkeypatch):
    monkeypatch.setenv("FUSEDACC_NATIVE_HOOKS", native)
    _model, _optimizer, slot = parameter()
    assert eligibility.of_gradient(slot, torch.ones(2, 3).as_subclass(Subclass)).name == "not_plain"


def outcome(case: Case, slot) -> Taker:
    """Who has taken the gradient of the backward that has just run."""
    if slot.grad_state is GradState.FOREIGN and slot.param.grad is not None:
        return Taker.AUTOGRAD
    return Taker.NOBODY if slot.accumulator is None else case.taker


@pytest.mark.parametrize("native", ["0", ""])
@pytest.mark.parametrize("name", ["frozen", "post_accumulate_hook", "ordinary"])
def test_what_the_table_says_of_a_parameter_happens(name, native, monkeypatch):
    monkeypatch.setenv("FUSEDACC_NATIVE_HOOKS", native)
    model, optimizer, slot = parameter()
    other = nn.Parameter(torch.ones(2))
    SITUATIONS[name](model.weight)
    case = eligibility.of_parameter(slot)
    assert case.name == name
    (model(torch.ones(4, 3)) * other).sum().backward()
    assert outcome(case, slot) is case.taker
    assert name == "ordinary" or case.why in optimizer.explain()


def test_explain_prints_every_reason_that_the_table_has(monkeypatch):
    """Each case of a parameter that has a sentence is reachable, and `explain()` says it."""
    said = set()
    for make in (frozen, hooked):
        model, optimizer, _ = parameter()
        make(model.weight)
        said.add(optimizer.explain())
    _, optimizer, _ = parameter(needs_eager=True)
    said.add(optimizer.explain())
    monkeypatch.setattr("fusedacc.autograd.registration.process_group_up", lambda: True)
    _, optimizer, slot = parameter()
    handle = accumulate_grad_node(slot.param).register_hook(lambda *gradients: None)
    said.add(optimizer.explain())
    handle.remove()
    assert eligibility.REDUCED_OUTSIDE.why not in optimizer.explain()
    monkeypatch.undo()
    model = nn.Linear(3, 2, bias=False)
    optimizer = wrap(model, 2, model=model)
    model.weight.register_hook(lambda gradient: gradient)
    optimizer._slots[0].paths = ("gemm",)  # whether a layer this small is replaced is found out by trial
    said.add(optimizer.explain())
    reasons = [case.why for case in eligibility.CASES if case.of_parameter is not None and case.why]
    missing = [why for why in reasons if not any(why in text for text in said)]
    # Those are in tests/optimizer/test_optim_db.py and, on two ranks, tests/distributed/test_fsdp_masters.py.
    assert missing == [eligibility.NOT_A_LEAF.why, eligibility.SHARDED.why]


def test_every_path_has_its_words_and_bytes():
    assert explain.BYTES.keys() == set(Path)
    assert explain.IN_MODULE.keys() == set(MODULE_PATHS)
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(torch.nn.Linear(2, 2).parameters()), 2)
    optimizer._slots[0].paths = ("bilinear",)
    with pytest.raises(ValueError, match="'bilinear' is not a valid Path"):
        optimizer.explain()
