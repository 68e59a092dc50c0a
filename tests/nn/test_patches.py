"""`model=`: which modules' forwards are replaced, that users see no difference, and `close()`."""

import copy
import gc
import io
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import forked
import pytest
import torch
from test_autograd import Net, assert_same_gradients, loss_of, wrap
from torch import nn
from torch.overrides import TorchFunctionMode

import fusedacc
from fusedacc.nn import patches


def route_of(optimizer, name):
    row = next(line.split() for line in optimizer.explain().splitlines() if line.split()[0] == name)
    return row[2]


def named(model, **options):
    inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
    return fusedacc.AccumulatingOptimizer(inner, model=model, **options)


def is_stock(module):
    return getattr(module.forward, "__func__", None) is type(module).forward


def assert_train_alike(model, twin):
    for net in (model, twin):
        loss_of(net).backward()
    assert_same_gradients(model, twin)


def test_explain_and_errors_name_parameters_as_the_model_does():
    model = Net()
    other = nn.Linear(2, 2)
    groups = [{"params": list(model.parameters())}, {"params": list(other.parameters())}]
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(groups, lr=0.1), 2, model=model)
    names = [line.split()[0] for line in optimizer.explain().splitlines()[2:8]]
    assert names == [*(name for name, _ in model.named_parameters()), "1.0"]
    with pytest.raises(ValueError, match=r"parameter 'embedding.weight' is already accumulated"):
        fusedacc.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    model.late = nn.Linear(6, 6)
    optimizer.add_param_group({"params": list(model.late.parameters())})
    assert route_of(optimizer, "late.weight") == "gemm"
    assert route_of(optimizer, "late.bias") == "multi_tensor"


def test_only_modules_of_optimized_weights_are_replaced():
    model = Net(tied=False)
    inner = torch.optim.SGD([model.up.weight, model.up.bias], lr=0.1)
    optimizer = fusedacc.AccumulatingOptimizer(inner, model=model)
    assert not is_stock(model.up)
    assert all(map(is_stock, (model.embedding, model.down, model.head)))
    optimizer.add_param_group({"params": [model.down.weight]})
    assert not is_stock(model.down)


def test_close_restores_every_module():
    model = Net()
    optimizer = wrap(model)
    assert not is_stock(model.up)
    optimizer.close()
    assert all(is_stock(module) for module in model.modules())
    assert all("forward" not in module.__dict__ for module in model.modules())
    loss_of(model).backward()
    assert model.up.weight.grad is not None


def test_a_deleted_wrapper_restores_every_module():
    model = Net()
    twin = copy.deepcopy(model)
    wrap(model)
    gc.collect()
    assert_train_alike(model, twin)
    optimizer = wrap(model)  # another may follow
    assert not is_stock(model.up)
    assert route_of(optimizer, "up.weight") == "gemm"


@pytest.mark.usefixtures("uncollected")
def test_the_model_is_freed_at_once():
    model = Net()
    optimizer = wrap(model)
    loss_of(model).backward()
    reference = weakref.ref(model.up)
    del model, optimizer
    assert reference() is None


def by_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_pickle(module, protocol=pickle.DEFAULT_PROTOCOL):
    return pickle.loads(pickle.dumps(module, protocol))


def by_state(module):
    """Copy a module from its state, as some users do."""
    other = type(module).__new__(type(module))
    other.__setstate__(copy.deepcopy(module.__reduce_ex__(2)[2]))
    return other


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, by_pickle, lambda model: by_pickle(model, 2), by_torch_save, by_state]
)
def test_a_copy_is_stock(duplicate):
    model = Net()
    stocks = [module.__dict__.keys() for module in copy.deepcopy(model).modules()]
    optimizer = wrap(model, 2)
    ours = [dict(module.__dict__) for module in model.modules()]
    other = duplicate(model)
    assert [module.__dict__ for module in model.modules()] == ours
    assert [module.__dict__.keys() for module in other.modules()] == stocks
    assert other.head.weight is other.embedding.weight
    loss_of(other).backward()
    assert optimizer.micro_step == 0
    assert all(p.grad is None for p in model.parameters())
    second = wrap(other)
    assert not is_stock(other.up)
    second.close()
    assert not is_stock(model.up)


def test_a_shallow_copy_and_a_replica_are_stock():
    linear = nn.Linear(3, 2)
    stock = set(linear.__dict__)
    optimizer = named(linear, gradient_accumulation_steps=2)
    assert set(copy.copy(linear).__dict__) == stock
    assert "forward" not in linear._replicate_for_data_parallel().__dict__
    assert not is_stock(linear)
    other = copy.copy(linear)
    for module in (linear, other):
        module(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert linear.weight.grad.tolist() == [[1.0] * 3] * 2


class Counted(nn.Linear):
    """Defines its own methods for copies and pickles."""

    def __deepcopy__(self, memo):
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__dict__ = copy.deepcopy(self.__dict__, memo) | {"copies": 1}
        return other

    def __getstate__(self):
        return {"all": self.__dict__.copy()}

    def __setstate__(self, state):
        self.__dict__.update(state["all"])


class Slotted(nn.Linear):
    __slots__ = ("note",)


@pytest.mark.parametrize("kind", [Counted, Slotted])
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, by_pickle, by_torch_save])
def test_a_module_with_custom_copy_methods(kind, duplicate):
    linear = kind(3, 2)
    stock = set(linear.__dict__)
    optimizer = named(linear)
    assert not is_stock(linear)
    other = duplicate(linear)
    assert set(other.__dict__) - {"copies"} == stock
    assert ("copies" in other.__dict__) == (kind is Counted and duplicate is copy.deepcopy)
    assert not is_stock(linear)
    optimizer.close()
    assert set(linear.__dict__) == stock


LOADS = """
import pathlib, pickle, sys, torch
sys.modules["fusedacc"] = None
saved = torch.load(sys.argv[1], weights_only=False)
pickled = pickle.loads(pathlib.Path(sys.argv[2]).read_bytes())
for model in saved, pickled:
    assert not any("forward" in module.__dict__ for module in model.modules())
    print(model[0](torch.ones(3)).tolist())
"""


def test_a_saved_model_loads_without_fusedacc(tmp_path):
    saved, pickled = tmp_path / "saved", tmp_path / "pickled"
    model = nn.Sequential(nn.Linear(3, 2), nn.Embedding(4, 2))
    _optimizer = wrap(model, 2)
    torch.save(model, saved)
    pickled.write_bytes(pickle.dumps(model))
    printed = forked.run(LOADS, str(saved), str(pickled))
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.splitlines() == [str(model[0](torch.ones(3)).tolist())] * 2
    assert not is_stock(model[0])


def test_modules_may_be_copied_while_others_run_them():
    model, stop = Net(), threading.Event()
    optimizer = wrap(model, 2)
    ours = [dict(module.__dict__) for module in model.modules()]

    def keep_copying():
        while not stop.is_set():
            assert all("forward" not in module.__dict__ for module in copy.deepcopy(model).modules())

    with ThreadPoolExecutor(2) as pool:
        copying = pool.submit(keep_copying)
        try:
            for seed in range(40):
                loss_of(model, seed).backward()
                optimizer.step(), optimizer.zero_grad()
        finally:
            stop.set()
        copying.result()
    assert [module.__dict__ for module in model.modules()] == ours
    twin = Net()
    stock = torch.optim.SGD(twin.parameters(), lr=0.1)
    for seed in range(0, 40, 2):
        ((loss_of(twin, seed) + loss_of(twin, seed + 1)) / 2).backward()
        stock.step(), stock.zero_grad()
    torch.testing.assert_close([*model.parameters()], [*twin.parameters()])


@pytest.mark.parametrize("change", ["to", "half", "assign"])
def test_a_moved_model_trains_on(change):
    model = Net()
    optimizer = wrap(model)
    if change == "assign":  # the optimizer does not have the new parameters
        model.load_state_dict(Net().state_dict(), assign=True)
        assert_train_alike(model, copy.deepcopy(model))
        return
    model.to(torch.float64 if change == "to" else torch.bfloat16)
    loss_of(model).backward()
    optimizer.step(), optimizer.zero_grad()
    twin = copy.deepcopy(model)
    for net in (model, twin):
        loss_of(net).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.to(theirs.dtype), theirs.grad, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("when", ["before", "after"])
def test_parametrized_modules_are_not_replaced(when):
    model, twin = Net(), Net()

    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    if when == "after":
        optimizer = named(model)
    for net in (model, twin):
        nn.utils.parametrize.register_parametrization(net.up, "weight", Double())
        nn.utils.parametrizations.weight_norm(net.down)
    if when == "before":
        optimizer = named(model)
        assert route_of(optimizer, "up.parametrizations.weight.original") == "multi_tensor"
        assert "parametrization" in optimizer.explain()
    assert_train_alike(model, twin)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_the_deprecated_weight_norm_is_not_replaced():
    model, twin = Net(), Net()
    for net in (model, twin):
        torch.nn.utils.weight_norm(net.up)
    optimizer = named(model)
    assert route_of(optimizer, "up.weight_g") == "multi_tensor"
    assert "weight or spectral norm" in optimizer.explain()
    assert_train_alike(model, twin)


def test_custom_forwards_are_not_replaced():
    class Scaled(nn.Linear):
        def forward(self, input):
            return 3 * super().forward(input)

    class Same(nn.Linear):
        pass

    class Copies(nn.Linear):
        def __copy__(self):
            raise NotImplementedError

    layers = Scaled(3, 3), Same(3, 3), nn.Embedding(3, 3, sparse=True), nn.Linear(3, 3), Copies(3, 3)
    model = nn.Sequential(*layers)
    mine = model[3].forward = lambda x: nn.Linear.forward(model[3], x) + 1
    optimizer = named(model)
    assert [is_stock(model[index]) for index in (0, 1, 2, 4)] == [True, False, True, True]
    for reason in ("__copy__", "sparse=True", "forward has been replaced"):
        assert reason in optimizer.explain()
    optimizer.close()
    assert model[3].forward is mine


def test_users_may_replace_the_patched_forward():
    model = Net()
    optimizer = wrap(model)
    ours = model.up.forward
    model.up.forward = lambda x: ours(x) * 2
    kept = model.up.forward
    optimizer.close()
    assert model.up.forward is kept
    twin = Net()
    torch.testing.assert_close(model.up(torch.ones(6)), 2 * twin.up(torch.ones(6)))


def test_bad_model_is_refused():
    inner = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module or None, got list"):
        fusedacc.AccumulatingOptimizer(inner, model=[nn.Linear(1, 1)])
    with pytest.warns(UserWarning, match="model="):
        fusedacc.AccumulatingOptimizer(inner, model=nn.Linear(1, 1))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated")
@pytest.mark.parametrize("closed", [False, True])
def test_modules_can_be_scripted(closed):
    model = Net()
    optimizer = wrap(model)
    if closed:
        optimizer.close()
    x = torch.ones(2, 6)
    scripted = torch.jit.script(nn.Sequential(model.up, model.down))
    torch.testing.assert_close(scripted(x), model.down(model.up(x)))
    assert is_stock(model.up)
    assert is_stock(model.head) == closed


def test_modules_in_data_parallel_are_not_replaced():
    model = nn.DataParallel(Net())
    with pytest.warns(UserWarning, match="model="):
        optimizer = named(model)
    assert "replicas" in optimizer.explain()
    assert all(map(is_stock, model.modules()))


class Seen(TorchFunctionMode):
    """Records the functions of torch that are called."""

    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def test_a_function_mode_sees_what_plain_pytorch_calls():
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 4))
    optimizer = wrap(model)
    twin = copy.deepcopy(model)
    indices = torch.arange(5)
    for net in (model, twin):
        with Seen() as mode:
            net(indices).square().sum().backward()
        assert nn.functional.linear in mode.functions
        assert nn.functional.embedding in mode.functions
    optimizer.step()
    assert_same_gradients(model, twin)


def test_a_default_device_changes_nothing():
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 4))
    optimizer = wrap(model)
    with torch.device("cpu"):
        output = model(torch.arange(5))
    optimizer.close()
    assert "fusedacc" in output.grad_fn.name()


def test_without_the_engine_pytorch_computes_modules(monkeypatch):
    monkeypatch.setenv("FUSEDACC_ENGINE", "0")
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 4))
    twin = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="model= was given"):
        optimizer = wrap(model)
    assert all(map(is_stock, model))
    for net in (model, twin):
        net(torch.arange(5)).square().sum().backward()
    assert patches.NOT_BUILT in optimizer.explain()
    optimizer.step()
    assert_same_gradients(model, twin)
