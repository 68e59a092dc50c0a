"""Optimizers of other packages, and all of torch's, inside the wrapper, against themselves without it.

With k a power of two, scaling by 1/k rounds nothing, so that the same sums in the same order are equal bit
for bit: stock accumulation in float32, and sums kept in float32 by hand beside bfloat16 parameters.
"""

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import optimi
import pages
import pytest
import pytorch_optimizer
import schedulefree
import torch
import transformers
from comparison import snapshot
from loops import identical, through_file

import fusedacc

STEPS = 2
#: 13 updates; the last window has one micro-batch. Some optimizers warm up for ten.
MICRO_BATCHES = 25

Make = Callable[[torch.nn.Module], Any]


def network(dtype: torch.dtype = torch.float32, bias: bool = True) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 8, bias=bias), torch.nn.Tanh(), torch.nn.Linear(8, 4, bias=bias)]
    return torch.nn.Sequential(*layers).to(dtype)


def inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 6, generator=generator).to(dtype) for _ in range(MICRO_BATCHES)]


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - 1).square().mean()


def windows(dtype: torch.dtype) -> Iterator[list[torch.Tensor]]:
    data = inputs(dtype)
    for start in range(0, MICRO_BATCHES, STEPS):
        yield data[start : start + STEPS]


class Training:
    """`train()` before and `eval()` after, where an optimizer has them; the same random numbers for each."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def __enter__(self) -> None:
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()
        torch.manual_seed(2)
        numpy.random.seed(2)

    def __exit__(self, *_: Any) -> None:
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()


def stock(make: Make, model: torch.nn.Module, wrap: Callable[[Any], Any] = lambda bare: bare) -> list[Any]:
    """Losses and parameters of the loop that divides the loss; `wrap` may put a manual wrapper around."""
    optimizer, losses = wrap(make(model)), []
    with Training(optimizer):
        for window in windows(torch.float32):
            for x in window:
                loss = loss_of(model, x)
                (loss / len(window)).backward()
                losses.append(loss.detach())
            optimizer.step(), optimizer.zero_grad()
    return losses + snapshot(model)


def by_hand(make: Make, model: torch.nn.Module) -> list[Any]:
    """The same with float32 sums beside bfloat16 parameters."""
    optimizer, losses, parameters = make(model), [], list(model.parameters())
    with Training(optimizer):
        for window in windows(torch.bfloat16):
            sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
            for x in window:
                loss = loss_of(model, x)
                loss.backward()
                losses.append(loss.detach())
                for parameter, total in zip(parameters, sums, strict=True):
                    total.add_(parameter.grad.float(), alpha=1 / len(window))
                    parameter.grad = None
            for parameter, total in zip(parameters, sums, strict=True):
                parameter.grad = total.to(parameter.dtype)
            optimizer.step(), optimizer.zero_grad()
    return losses + snapshot(model)


def counted(make: Make, model: torch.nn.Module) -> list[Any]:
    """The counted loop, and a flush."""
    optimizer, losses = fusedacc.AccumulatingOptimizer(make(model), STEPS), []
    with Training(optimizer):
        for x in inputs(next(model.parameters()).dtype):
            loss = loss_of(model, x)
            loss.backward()
            losses.append(loss.detach())
            optimizer.step(), optimizer.zero_grad()
        optimizer.flush()
    assert optimizer.num_updates == -(-MICRO_BATCHES // STEPS)
    assert "multi_tensor" in optimizer.explain()
    assert "stock" not in optimizer.explain()
    return losses + snapshot(model)


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def plain(kind: Any, **settings: Any) -> Make:
    settings = {"lr": 1e-2} | settings
    return lambda model: kind(model.parameters(), **settings)


def matrices(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def hidden_and_rest(kind: Any) -> Make:
    def make(model: torch.nn.Module) -> Any:
        rest = [parameter for parameter in model.parameters() if parameter.ndim != 2]
        groups = [(matrices(model), True), (rest, False)]
        return kind([{"params": params, "use_muon": hidden, "lr": 1e-2} for params, hidden in groups])

    return make


def around_adamw(kind: Any, **settings: Any) -> Make:
    return lambda model: kind(torch.optim.AdamW(model.parameters(), lr=1e-2), **settings)


load = pytorch_optimizer.load_optimizer

#: Of pytorch_optimizer, what does not take parameters, a learning rate and a plain step().
MUONS = ("adago", "adamuon", "muon", "muonclip", "normuon")
CREATE_GRAPH = ("adahessian", "sophiah")
CLOSURES = ("alig", "bsam", "lbfgs")
IN_BACKWARD = ("lomo", "adalomo")
#: The first needs a process group, the second a package that is not there.
NOT_HERE = ("distributedmuon", "demo")
ARGUMENTS = ("adammini", "ranger21", "sara", "spectralsphere")
OTHERS = {*MUONS, *CREATE_GRAPH, *CLOSURES, *IN_BACKWARD, *NOT_HERE, *ARGUMENTS}

PLAIN = [name for name in pytorch_optimizer.get_supported_optimizers() if name not in OTHERS]
TORCH = [
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop"),
    *("Rprop", "SGD"),
]
SCHEDULE_FREE = [
    *("AdamWScheduleFree", "AdamWScheduleFreePaper", "AdamWScheduleFreeReference", "RAdamScheduleFree"),
    *("SGDScheduleFree", "SGDScheduleFreeReference"),
]
OPTIMI = ["Adam", "AdamW", "Adan", "Lion", "RAdam", "Ranger", "SGD", "StableAdamW"]

OPTIMIZERS: dict[str, Make] = (
    {f"torch.{name}": plain(getattr(torch.optim, name)) for name in TORCH}
    | {"torch.Muon": lambda model: torch.optim.Muon(matrices(model), lr=1e-2)}
    | {f"optimi.{name}": plain(getattr(optimi, name), triton=False) for name in OPTIMI}
    | {
        "optimi.AdamW by foreach": plain(optimi.AdamW, foreach=True),
        "optimi.AdamW kahan": plain(optimi.AdamW, kahan_sum=True, triton=False),
        "transformers.Adafactor": lambda model: transformers.Adafactor(model.parameters()),
        "transformers.Adafactor lr": plain(
            transformers.Adafactor, relative_step=False, scale_parameter=False, warmup_init=False
        ),
    }
    | {f"schedulefree.{name}": plain(getattr(schedulefree, name)) for name in SCHEDULE_FREE}
    | {f"pytorch_optimizer.{name}": plain(load(name)) for name in PLAIN}
    | {f"pytorch_optimizer.{name}": hidden_and_rest(load(name)) for name in MUONS}
    | {
        "pytorch_optimizer.ranger21": plain(load("ranger21"), num_iterations=20),
        # By default it moves weights below 1e-3 only.
        "pytorch_optimizer.sara": plain(load("sara"), threshold=1.0),
        "pytorch_optimizer.adammini": lambda model: pytorch_optimizer.AdamMini(model, lr=1e-2),
        "pytorch_optimizer.Lookahead": around_adamw(pytorch_optimizer.Lookahead, k=2),
        "pytorch_optimizer.OrthoGrad": around_adamw(pytorch_optimizer.OrthoGrad),
        "pytorch_optimizer.PCGrad": around_adamw(pytorch_optimizer.PCGrad),
        "pytorch_optimizer.TRAC": around_adamw(pytorch_optimizer.TRAC),
        "pytorch_optimizer.ScheduleFreeWrapper": around_adamw(pytorch_optimizer.ScheduleFreeWrapper),
        "pytorch_optimizer.Magma": around_adamw(pytorch_optimizer.Magma),
    }
)
#: What raises, or gives nan, with bfloat16 parameters by itself.
NOT_BFLOAT16 = {f"pytorch_optimizer.{name}" for name in ("adai", "lorarite", "TRAC")}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_float32_equals_stock_accumulation(name: str) -> None:
    make = OPTIMIZERS[name]
    wanted = stock(make, network())
    assert equal(counted(make, network()), wanted)
    assert equal(stock(make, network(), wrap=fusedacc.AccumulatingOptimizer), wanted)
    assert all(value.isfinite().all() for value in wanted)
    assert not equal(wanted[MICRO_BATCHES:], snapshot(network())), "it has updated nothing"


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in NOT_BFLOAT16])
def test_bfloat16_equals_float32_sums_by_hand(name: str) -> None:
    make = OPTIMIZERS[name]
    wanted = by_hand(make, network(torch.bfloat16))
    assert equal(counted(make, network(torch.bfloat16)), wanted)
    assert all(value.isfinite().all() for value in wanted)


def test_lists_are_complete() -> None:
    assert set(pytorch_optimizer.get_supported_optimizers()) >= OTHERS
    assert len(PLAIN) >= 109
    mine = {name for name, kind in vars(torch.optim).items() if _is_optimizer(kind)}
    assert mine == {*TORCH, "Muon", "LBFGS", "SparseAdam", "Optimizer"}
    mine = {name for name, kind in vars(optimi).items() if _is_optimizer(kind)}
    assert mine == set(OPTIMI)
    mine = {name for name, kind in vars(schedulefree).items() if _is_optimizer(kind)}
    assert {name for name in mine if not name.endswith("Closure")} == set(SCHEDULE_FREE)


def _is_optimizer(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)


# Checkpoints

#: Whose state_dict has not torch's form.
APART = ["magma", "Lookahead", "Magma", "ScheduleFreeWrapper"]
#: Whose state_dict is their own and has it.
OWN = ["flashadamw", "spam", "stablespam", "ranger21", "OrthoGrad", "PCGrad", "TRAC"]


def test_which_state_dicts_have_not_torchs_form() -> None:
    apart, own = set(), set()
    for name, make in OPTIMIZERS.items():
        kind = make(network(bias=False))
        if not {"state", "param_groups"} <= kind.state_dict().keys():
            apart.add(name)
        elif type(kind).state_dict is not torch.optim.Optimizer.state_dict:
            own.add(name)
    assert apart == {f"pytorch_optimizer.{name}" for name in APART}
    assert own == {f"pytorch_optimizer.{name}" for name in OWN}


class Resumable:
    """A model in a counted loop of four."""

    def __init__(self, name: str) -> None:
        self.model = network()
        self.optimizer: Any = fusedacc.AccumulatingOptimizer(
            OPTIMIZERS[f"pytorch_optimizer.{name}"](self.model), 4
        )
        if hasattr(self.optimizer.optimizer, "train"):
            self.optimizer.train()

    def train(self, begin: int, end: int) -> None:
        for index, x in enumerate(inputs()[begin:end], begin):
            torch.manual_seed(index)
            numpy.random.seed(index)
            loss_of(self.model, x).backward()
            self.optimizer.step(), self.optimizer.zero_grad()

    def state(self) -> list[Any]:
        return copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()])

    def load(self, state: list[Any]) -> None:
        model, optimizer = through_file(state)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


@pytest.mark.parametrize("done", [4, 6])
@pytest.mark.parametrize("name", [*APART, *OWN])
def test_own_state_dicts_resume_bit_for_bit(name: str, done: int) -> None:
    """At a window's end, and in the middle of one."""
    run, resumed = Resumable(name), Resumable(name)
    run.train(0, done)
    resumed.train(8, 9)
    resumed.load(run.state())
    assert identical(resumed.state(), run.state())
    run.train(done, 22)
    resumed.train(done, 22)
    assert identical(resumed.state(), run.state())


@pytest.mark.parametrize("key", ["base_optimizer", "lookahead_state", "fusedacc_state"])
def test_a_damaged_checkpoint_of_lookahead_changes_nothing(key: str) -> None:
    run, other = Resumable("Lookahead"), Resumable("Lookahead")
    run.train(0, 6)
    other.train(0, 9)
    before, damaged = run.state(), other.state()[1]
    del damaged[key]
    with pytest.raises(ValueError, match=r"damaged|does not fit Lookahead"):
        run.optimizer.load_state_dict(damaged)
    assert identical(run.state(), before)


@pytest.mark.parametrize("name", ["Lookahead", "OrthoGrad", "PCGrad"])
def test_a_checkpoint_of_a_base_with_other_groups_changes_nothing(name: str) -> None:
    run, other = Resumable(name), Resumable(name)
    run.train(0, 6)
    other.optimizer.optimizer.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    before, wrong = run.state(), other.optimizer.optimizer.state_dict()
    with pytest.raises(ValueError, match="group"):
        run.optimizer.load_state_dict(wrong)
    assert identical(run.state(), before)


# Optimizers that take a closure

SGD = torch.optim.SGD
WITH_CLOSURE: dict[str, Make] = {
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), max_iter=3),
    "pytorch_optimizer.lbfgs": lambda model: load("lbfgs")(model.parameters(), max_iter=3),
    "AdamWScheduleFreeClosure": plain(schedulefree.AdamWScheduleFreeClosure),
    "RAdamScheduleFreeClosure": plain(schedulefree.RAdamScheduleFreeClosure),
    "SGDScheduleFreeClosure": plain(schedulefree.SGDScheduleFreeClosure),
}
#: A first backward comes before `step(closure)`.
SHARPNESS: dict[str, Make] = {
    "SAM": lambda model: pytorch_optimizer.SAM(model.parameters(), SGD, lr=0.1),
    "WSAM": lambda model: pytorch_optimizer.WSAM(model, model.parameters(), SGD, lr=0.1),
    "LookSAM": lambda model: pytorch_optimizer.LookSAM(model.parameters(), SGD, lr=0.1),
    "FriendlySAM": lambda model: pytorch_optimizer.FriendlySAM(model.parameters(), SGD, lr=0.1),
    "BSAM": lambda model: pytorch_optimizer.BSAM(model.parameters(), num_data=50, lr=0.1),
}


def with_closure(make: Make, before: bool, wrap: Callable[[Any], Any] = lambda bare: bare) -> list[Any]:
    """A loop whose closure accumulates over two micro-batches; `before`: once before step() too."""
    model, data = network(), inputs()
    optimizer = wrap(make(model))
    torch.manual_seed(2)
    for start in range(0, 20, 2):

        def closure(start: int = start) -> torch.Tensor:
            optimizer.zero_grad()
            losses = [loss_of(model, x) / 2 for x in data[start : start + 2]]
            for loss in losses:
                loss.backward()
            return losses[0].detach() + losses[1].detach()

        if before:
            closure()
        optimizer.step(closure)
    return snapshot(model)


@pytest.mark.parametrize("name", [*WITH_CLOSURE, *SHARPNESS])
def test_closures_that_accumulate_in_a_manual_loop(name: str) -> None:
    make = (WITH_CLOSURE | SHARPNESS)[name]
    wanted = with_closure(make, name in SHARPNESS)
    assert equal(with_closure(make, name in SHARPNESS, fusedacc.AccumulatingOptimizer), wanted)
    assert all(value.isfinite().all() for value in wanted)


@pytest.mark.parametrize("name", [*WITH_CLOSURE, *SHARPNESS])
def test_closures_cannot_be_counted_and_nothing_is_updated(name: str) -> None:
    """The wrapper runs a counted closure itself, once; what needs one in its own step() says so."""
    model = network()
    before = snapshot(model)
    errors = (TypeError, ValueError, RuntimeError, pytorch_optimizer.base.exception.NoClosureError)
    with pytest.raises(errors, match=r"closure|zero_grad\(\) after a backward"):  # noqa: PT012
        optimizer = fusedacc.AccumulatingOptimizer((WITH_CLOSURE | SHARPNESS)[name](model), STEPS)
        for x in inputs():

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, x)
                loss.backward()
                return loss

            if name in SHARPNESS:
                closure()
            optimizer.step(closure)
    assert equal(snapshot(model), before)


@pytest.mark.parametrize("name", SHARPNESS)
def test_the_audit_of_closures_that_accumulate(name: str) -> None:
    """These optimizers evaluate several times in an update, and some change p.grad before they use it."""
    for wrap in (lambda bare: bare, fusedacc.AccumulatingOptimizer):
        with fusedacc.audit(output=io.StringIO()) as report:
            with_closure(SHARPNESS[name], True, wrap)
        report.check()


def test_the_audit_of_orthogonal_gradients() -> None:
    for train in (stock, counted):
        with fusedacc.audit(output=io.StringIO()) as report:
            train(OPTIMIZERS["pytorch_optimizer.OrthoGrad"], network())
        report.check()


def test_the_page_runs():
    found = pages.run("optimizers", model=torch.nn.Linear(4, 2))
    assert found["optimizer"].param_groups[0]["train_mode"]
