"""The audit changes nothing: results are bit for bit the same, nothing is left, and its memory is flat."""

import gc
import hashlib
import io
import warnings

import other_loops
import plain_loops
import pytest
import torch
from auditing_cases import audited
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import fusedacc
from fusedacc.auditing import optimizers, session
from fusedacc.auditing.sketch_sets import SketchPages, SketchSet
from fusedacc.auditing.sketches import SketchMap

#: Cases that compile or are long take seconds.
SKIPPED = ("compiled", "bf16_master", "normalized", "300", "bf16_512")
CASES = plain_loops.CASES | other_loops.CASES
#: torch's functions and methods that the audit replaces.
REPLACED = [
    (torch.autograd, "backward"),
    (torch.autograd, "grad"),
    (Optimizer, "__init__"),
    (Optimizer, "zero_grad"),
    (nn.Module, "zero_grad"),
    (torch.amp.GradScaler, "step"),
    (torch.amp.GradScaler, "scale"),
    (torch.amp.GradScaler, "unscale_"),
    (nn.utils, "clip_grads_with_norm_"),
]


def digest_of(function):
    """Return a hash of parameters, gradients and the random state at every update."""
    digest = hashlib.sha256()

    def add(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for param in group["params"]:
                for tensor in (param, param.grad):
                    if tensor is not None:
                        dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
                        digest.update(dense.float().numpy().tobytes())
        digest.update(torch.get_rng_state().numpy().tobytes())

    handle = register_optimizer_step_pre_hook(add)
    try:
        torch.manual_seed(0)
        function()
    finally:
        handle.remove()
    return digest.hexdigest()


@pytest.mark.parametrize("name", [name for name in CASES if not any(part in name for part in SKIPPED)])
def test_results_are_bit_for_bit_the_same(name):
    alone = digest_of(CASES[name])
    with fusedacc.audit(output=io.StringIO()):
        assert digest_of(CASES[name]) == alone


def test_nothing_is_left():
    before = [getattr(owner, name) for owner, name in REPLACED]
    model = plain_loops.mlp()
    audited(lambda: plain_loops.loop(model, plain_loops.adam(model), plain_loops.data()))
    assert [getattr(owner, name) for owner, name in REPLACED] == before
    assert not any(param._backward_hooks for param in model.parameters())
    assert session._running is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(model, io.BytesIO())


def test_a_watched_parameter_can_be_saved_and_copied_without_a_warning():
    model = plain_loops.mlp()

    def train():
        plain_loops.loop(model, plain_loops.adam(model), plain_loops.data())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.save(model, io.BytesIO())

    audited(train)


def test_an_exception_ends_the_audit_and_goes_on():
    output = io.StringIO()
    report = fusedacc.audit(output=output)

    def fail():
        with report:
            plain_loops.CASES["right"]()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert report.status == 0
    assert "No problem found." in output.getvalue()
    assert session._running is None


def test_a_failure_of_the_audit_does_not_stop_the_script(monkeypatch):
    def fail(*_):
        raise ValueError("no sketch")

    monkeypatch.setattr(SketchMap, "sketch", fail)
    trained = []
    report = audited(lambda: trained.append(plain_loops.CASES["right"]()))
    assert (report.status, len(trained)) == (2, 1)
    assert "the audit stopped: ValueError in _receive: no sketch" in report.notes


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_memory_is_flat(monkeypatch, is_wrapped):
    """Updates are judged in blocks and forgotten, so that the number of objects stays."""
    monkeypatch.setattr(session, "BLOCK", 64)
    monkeypatch.setattr(optimizers, "UNUSED_AFTER", 64)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if is_wrapped:
        optimizer = fusedacc.AccumulatingOptimizer(optimizer)
    counts = []
    with fusedacc.audit(updates=0, output=io.StringIO()) as report:
        for update in range(1, 513):
            for _ in range(2):
                (model(torch.randn(3, 4)).square().mean() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            if update in (256, 384, 512):  # as many updates are not judged yet
                gc.collect()
                counts.append(len(gc.get_objects()) + len(report._watcher.watch.optimizers._holding))
    assert report.status == 0, report.text
    assert report.as_json()["updates"] == 512
    assert max(counts) - min(counts) < 20, counts


def test_pages_of_sketches_are_used_again():
    pages = SketchPages()
    sketches = SketchSet(pages)
    for number in range(100):
        sketches.add(number, torch.full((64,), float(number)))
    sketches.add(3, torch.ones(64))
    assert len(sketches) == 100
    assert sketches[3].tolist() == [4.0] * 64
    assert sketches.is_finite()
    sketches.add(200, torch.tensor([float("inf")]))
    assert not sketches.is_finite()
    assert 200 in sketches
    assert 150 not in sketches
    sketches.clear()
    again = SketchSet(pages)
    for number in range(128):
        again.add(number, torch.ones(9))
    assert again.is_finite()
    assert list(again) == list(range(128))


def test_other_hooks_of_steps_run_when_the_audit_ends_inside_a_step():
    calls = []
    with fusedacc.audit(updates=2, output=io.StringIO()) as report:
        handle = register_optimizer_step_post_hook(lambda *_: calls.append(report.status))
        try:
            plain_loops.CASES["right"]()
        finally:
            handle.remove()
    assert calls == [None, 0, 0, 0, 0, 0]
