"""The native engine is loaded, gives the same results as no engine, and releases what it holds."""

import contextlib
import functools
import gc
import shutil
import subprocess
import sysconfig
import threading
import weakref
from pathlib import Path
from typing import Any

import forked
import pytest
import sweeps
import torch
from hook_situations import AS_STOCK, LOOPS, SITUATIONS, WHERE, Run, loss_of
from loops import LOW, TRAINS, with_backward
from torch import Tensor, nn

import fusedacc
from fusedacc.autograd.capture import Capture
from fusedacc.kernels import library, native_module

PACKAGE = Path(fusedacc.__file__).parent
needs_native = pytest.mark.skipif(native_module.module() is None, reason=f"{native_module.why_not()}")


def test_the_engine_is_loaded_if_it_can_be_built():
    compiler = next((found for found in map(shutil.which, ("g++", "c++", "clang++")) if found), None)
    if compiler is None or not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        pytest.skip("the engine cannot be built: there is no C++ compiler or no Python.h")
    assert native_module.why_not() is None


def worth_a_test(name: str, loop: str) -> bool:
    if not WHERE[name](LOOPS[loop]):
        return False
    if "compiled" in name:  # slow
        return loop == ("manual-float32" if name == "compiled_autograd" else "bfloat16")
    # With threads, the order of gradients changes the bits of a norm and of stochastic rounding.
    return name != "threads" or LOOPS[loop].options.keys().isdisjoint(("max_grad_norm", "rounding"))


CASES = [(name, loop) for name in SITUATIONS for loop in LOOPS if worth_a_test(name, loop)]


class Calls:
    """Counts the gradients that Python handles."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        receive = Capture.receive

        @functools.wraps(receive)  # the engine calls it by its name
        def counted(*arguments: Any, **options: Any) -> bool:
            self.count += 1
            return receive(*arguments, **options)

        monkeypatch.setattr(Capture, "receive", counted)

    def take(self) -> int:
        count, self.count = self.count, 0
        return count


def bitwise_equal(mine: Any, its: Any) -> bool:
    """Also compare NaNs and layouts."""
    if not isinstance(mine, Tensor) or not isinstance(its, Tensor):
        return type(mine) is type(its) and (mine == its or mine != mine)
    if mine.layout is not torch.strided:
        return its.layout is mine.layout and bitwise_equal(mine.to_dense(), its.to_dense())
    alike = (mine.shape, mine.dtype, mine.stride()) == (its.shape, its.dtype, its.stride())
    return alike and torch.equal(mine.nan_to_num(nan=12345.0), its.nan_to_num(nan=12345.0))


def traits(name: str, loop: str) -> dict[str, Any]:
    """Return the values of a case that the sweep combines."""
    of = LOOPS[loop]
    return {"name": name, "dtype": str(of.dtype), "counted": of.counted, "weighs": of.weighs}


def play(name: str, run: Run) -> list[Any]:
    torch.manual_seed(0)
    try:
        SITUATIONS[name](run)
    except Exception as error:
        run.see(f"{type(error).__name__}: {error}")
    if not run.stock and run.opt is not None:
        run.opt.close()  # a hook may refer to the run, and then nothing else frees the wrapper
    return run.seen


#: Situations in which autograd adds up some gradients in another order, or in the parameter's dtype, before
#: Python gets them.
ROUNDED = ("shapes_of_all_kinds", "reentrant_checkpoint", "a_hook_changes_p_grad_during_backward")


def is_comparable(name: str, loop: str) -> bool:
    """Whether the results without the engine are the same."""
    if name == "threads":  # without the engine, p.grad may show their gradients until step()
        return False
    node_hooks = ("hooks_on_the_node_after_ours", "post_accumulate_hooks_come_and_go")
    if "rounding" in LOOPS[loop].options and name in (*ROUNDED, *node_hooks):
        return False
    if LOOPS[loop].counted:
        return True
    if name == "gradients_put_by_hand":  # autograd adds to the user's own tensor
        return False
    # p.grad gets the parameter's dtype from the user or for a reducer.
    in_low = ("hooks_on_the_node_after_ours", "a_hook_changes_p_grad_during_backward")
    return LOOPS[loop].dtype != LOW or name not in in_low


@needs_native
@pytest.mark.filterwarnings("ignore")
@pytest.mark.sweep(of=traits)
@pytest.mark.parametrize(("name", "loop"), [case for case in CASES if is_comparable(*case)])
def test_with_and_without_the_engine_the_results_are_the_same(name, loop, monkeypatch):
    calls, seen = Calls(monkeypatch), {}
    for choice in "10":
        monkeypatch.setenv("FUSEDACC_ENGINE", choice)
        torch._dynamo.reset()
        seen[choice] = play(name, Run(LOOPS[loop])), calls.take()
    (native, fewer), (python, every) = seen["1"], seen["0"]
    assert len(native) == len(python), (native[-1], python[-1])
    eps = torch.finfo(LOOPS[loop].dtype).eps
    for index, (mine, its) in enumerate(zip(native, python, strict=True)):
        if name in ROUNDED and isinstance(mine, Tensor):
            torch.testing.assert_close(mine, its, rtol=4 * eps, atol=4 * eps)
        else:
            assert bitwise_equal(mine, its), (index, mine, its)
    assert fewer < every


@needs_native
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loop", ["manual-float32", *(["manual-float64"] if sweeps.FULL else [])])
@pytest.mark.parametrize("name", sorted(AS_STOCK))
def test_the_gradients_are_those_of_plain_pytorch(name, loop):
    wrapped, stock = (
        [value for value in play(name, Run(LOOPS[loop], stock)) if isinstance(value, Tensor)]
        for stock in (False, True)
    )
    assert len(wrapped) == len(stock)
    eps = torch.finfo(LOOPS[loop].dtype).eps
    torch.testing.assert_close(wrapped, stock, rtol=200 * eps, atol=200 * eps)


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.setenv("FUSEDACC_ENGINE", "1")
    return Calls(monkeypatch)


@needs_native
@pytest.mark.parametrize("loop", ["float32", "bfloat16", "manual-float32", "manual-bfloat16"])
def test_python_handles_no_gradient(loop, calls):
    run = Run(LOOPS[loop])
    model = run.wrapped()
    for _ in range(8):
        run.backward(loss_of(run, model))
        assert calls.take() == 0


@needs_native
@pytest.mark.parametrize("loop", ["float32", "bfloat16"])
def test_each_gradient_is_added_when_it_arrives(loop, calls):
    """Look from a hook on the first layer, whose gradient arrives last. The others must be added by then."""
    run = Run(LOOPS[loop])
    model = run.network()
    sums = {slot.param: slot for slot in run.wrap(model)._slots}
    first, last = model[0].weight, model[4].weight
    during: list[Tensor | None] = []

    def look(gradient: Tensor) -> None:
        total = sums[last].accumulator
        during.append(None if total is None else total.clone())

    first.register_hook(look)
    run.backward(loss_of(run, model))
    before = sums[last].accumulator.clone()
    run.backward(loss_of(run, model))
    assert during[0] is not None
    assert not torch.equal(during[1], before)
    assert torch.equal(during[1], sums[last].accumulator)


@needs_native
def test_threads_that_ask_the_engine_do_not_deadlock_with_additions():
    """A hook that adds holds a lock and may need the GIL.

    A thread with the GIL must not wait for that lock.
    """
    params = [nn.Parameter(torch.zeros(64)) for _ in range(50)]
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(params, lr=1.0), 1000, reduction="sum")
    engine = optimizer._engine
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            engine.flush()
            engine.step(optimizer.param_groups, [])

    asking = [threading.Thread(target=ask, daemon=True) for _ in range(2)]
    for thread in asking:
        thread.start()
    for _ in range(40):
        sum((p * 1.0).sum() for p in params).backward()
        optimizer.step()
    over.set()
    for thread in asking:
        thread.join(120)
        assert not thread.is_alive()
    assert optimizer.micro_step == 40
    assert all((slot.accumulator == 40).all() for slot in optimizer._slots)


def test_a_wrong_value_of_the_variable_is_named(monkeypatch):
    monkeypatch.setenv("FUSEDACC_ENGINE", "2")
    with pytest.raises(ValueError, match=r"FUSEDACC_ENGINE='2': allowed are '0' .*, '1' .*, or not set"):
        fusedacc.AccumulatingOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0))


def run_copy(tmp_path: Path, file: str | None, choice: str = "") -> subprocess.CompletedProcess[str]:
    """Train with a copy of the package without the native module, or with `file` as its content."""
    shutil.copytree(
        PACKAGE, tmp_path / "fusedacc", ignore=shutil.ignore_patterns("_autograd*", "__pycache__")
    )
    if file is not None:
        (tmp_path / "fusedacc" / native_module.file_name()).write_bytes(file.encode())
    program = "import warnings; warnings.simplefilter('error')" + TRAINS
    variables = {"FUSEDACC_ENGINE": choice, "FUSEDACC_CACHE": str(tmp_path / "cache")}
    return forked.run(program, root=tmp_path, folder=tmp_path, **variables)


@pytest.mark.skipif(library.load_error() is not None, reason=f"{library.load_error()}")
@pytest.mark.parametrize(
    ("file", "reasons"),
    [
        (None, ["none is installed", torch.__version__, "FUSEDACC_BUILD=0"]),
        ("no library", [native_module.file_name(), "does not load", "pip install"]),
    ],
)
def test_without_the_module_training_works_and_the_reason_is_printed(tmp_path, file, reasons):
    done = run_copy(tmp_path, file)
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in reasons)


def test_a_requested_engine_that_is_missing_is_an_error(tmp_path):
    why = f"FUSEDACC_ENGINE=1, but there is no native engine: none is installed for torch {torch.__version__}"
    assert f"RuntimeError: {why}" in run_copy(tmp_path, None, "1").stderr


@needs_native
@pytest.mark.parametrize("loop", ["float32", "bfloat16", "manual-float32"])
@pytest.mark.parametrize("failed", [False, True])
def test_deleted_wrappers_and_models_are_freed(uncollected, loop, failed):
    """Neither hooks on nodes that stay alive nor the bucket of a failed backward may hold them."""
    run = Run(LOOPS[loop])
    model = run.network()
    optimizer = run.wrap(model)
    run.train_on(model, 4)
    if failed:
        handle = model[2].weight.register_hook(lambda gradient: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            loss_of(run, model).backward()
        handle.remove()
    kept = loss_of(run, model)
    sums = [slot.accumulator for slot in optimizer._slots if slot.accumulator is not None]
    gone = [weakref.ref(part) for part in (optimizer._capture, optimizer._accumulators, *sums)]
    run.opt, run.seen, optimizer, sums = None, [], None, []
    assert [reference() for reference in gone] == [None] * len(gone)
    model.zero_grad()
    kept.backward()
    assert all(p.grad is not None for p in run.params)
    gone, model, kept, run = [weakref.ref(p) for p in run.params], None, None, None
    assert [reference() for reference in gone] == [None] * len(gone)


def refer_by_a_hook(param: nn.Parameter, optimizer: fusedacc.AccumulatingOptimizer) -> None:
    seen = []
    param.register_hook(lambda gradient: seen.append(optimizer.micro_step))


def refer_by_an_attribute(param: nn.Parameter, optimizer: fusedacc.AccumulatingOptimizer) -> None:
    param.optimizer = optimizer


@pytest.mark.parametrize("refer", [refer_by_a_hook, refer_by_an_attribute])
@pytest.mark.parametrize("with_model", [False, True])
def test_a_closed_wrapper_is_freed_with_a_parameter_that_refers_to_it(refer, with_model):
    model = nn.Linear(4, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fusedacc.AccumulatingOptimizer(inner, 2, model=model if with_model else None)
    refer(model.weight, optimizer)
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step(), optimizer.zero_grad()
    gone = [weakref.ref(part) for part in (optimizer, model.weight)]
    optimizer.close()
    del model, inner, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def calling_in_backward(x, function):
    """Return a copy of `x`, whose backward calls a function."""

    def backward(gradient):
        function()
        return gradient

    return with_backward(x, backward)


def run_in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.mark.skipif(native_module.module() is None, reason="nothing waits without the engine")
def test_an_addition_that_fails_taints_the_window_of_all_backward_passes(monkeypatch):
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    inner = torch.optim.SGD([first, second], lr=1.0)
    optimizer = fusedacc.AccumulatingOptimizer(inner, 4, backend="eager")
    adder = optimizer._accumulators.adder

    def fail(*_):
        raise MemoryError

    def run_another_pass():
        with monkeypatch.context() as broken, contextlib.suppress(MemoryError):
            broken.setattr(adder, "add", fail)
            first.sum().backward()

    # The other thread's backward pass launches the gradient of `second`, which waits, and has none yet.
    branch = calling_in_backward(first * 2.0, lambda: run_in_thread(run_another_pass))
    (branch.sum() + (second * 2.0).sum()).backward()
    with pytest.raises(RuntimeError, match=r"call discard\(\)"):
        optimizer.step()
    optimizer.discard()


def test_an_unfinished_backward_pass_of_another_thread_keeps_its_gradient():
    """Its parameter has a new node without our hook, so the engine does not know of this backward pass."""
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([first, second], lr=1.0), 9, reduction="sum")

    def run():
        first.sum().backward()

    run()
    optimizer.step()
    run_in_thread(run)
    run()
    second.data = second.data.double()
    seen = []

    def run_another_pass():
        run_in_thread(run)
        seen.append(second.grad is not None)

    branch = calling_in_backward(first * 1.0, run_another_pass)
    loss = branch.sum().double() + (second * 2.0).sum()
    loss.backward()
    assert seen == [True]
    optimizer.step()
    optimizer.flush()
    assert first.tolist() == [1.0 - 5.0] * 3
    assert second.tolist() == [1.0 - 2.0] * 3


@pytest.mark.parametrize("native", [True, False], ids=["engine", "no engine"])
def test_a_backward_pass_that_was_discarded_does_not_count(monkeypatch, native):
    if not native:
        monkeypatch.setenv("FUSEDACC_ENGINE", "0")
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([second], lr=1.0), 2)
    branch = calling_in_backward(first * 2.0, optimizer.discard)
    (branch.sum() + (second * 2.0).sum()).backward()  # the gradient of `second` comes first
    assert not optimizer.has_partial_window
    assert second.grad is None
