"""All of torch's schedulers count updates, stepped if `has_updated` or through `UpdateScheduler`."""

import copy
import functools
import inspect
import itertools
import pickle
import warnings

import pytest
import torch
from loops import cleared_micro_batch, loss_of, network, scalar, through_file, wrap_momentum
from torch.optim import lr_scheduler, swa_utils
from torch.optim.lr_scheduler import LRScheduler

import fusedacc
from fusedacc.integrations.scheduler import COUNTED, UpdateScheduler

K, UPDATES = 2, 8

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda update: 0.9**update),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda update: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], gamma=0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.1, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=8),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=10, power=2.0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=12),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=4), lr_scheduler.CosineAnnealingLR(o, 8)], milestones=[4]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=5), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=8),
}
INNERS = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.02),
}
every_scheduler = pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())


def test_all_of_torchs_schedulers_are_tested():
    found = {
        name
        for module in (lr_scheduler, swa_utils)
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, LRScheduler) and not name.startswith("_")
    }
    assert found - {"LRScheduler"} == SCHEDULERS.keys()


def advance(scheduler) -> None:
    """Step a scheduler, with a metric that does not improve if it needs one."""
    inner = scheduler.scheduler if isinstance(scheduler, UpdateScheduler) else scheduler
    scheduler.step(1.0) if isinstance(inner, lr_scheduler.ReduceLROnPlateau) else scheduler.step()


def settings(optimizer) -> list:
    return [
        [group[name] for name in ("lr", "momentum", "betas", "initial_lr") if name in group]
        for group in optimizer.param_groups
    ]


def groups(model) -> list[dict]:
    return [{"params": model[0].parameters()}, {"params": model[2].parameters()}]


def bare_run(make, inner) -> tuple[list, list[torch.Tensor]]:
    """Train in stock PyTorch: divide the loss, and step optimizer and scheduler every K micro-batches."""
    model = network()
    optimizer = inner(groups(model))
    scheduler, seen = make(optimizer), []
    for seed in range(K * UPDATES):
        (loss_of(model, seed) / K).backward()
        if (seed + 1) % K == 0:
            optimizer.step(), optimizer.zero_grad()
            advance(scheduler)
            seen.append(settings(optimizer))
    return seen, [p.detach() for p in model.parameters()]


def wrapped_run(make, inner, way: str) -> tuple[list, list[torch.Tensor]]:
    """Train in a counted loop. "by hand": step the scheduler if `has_updated`, else an UpdateScheduler."""
    model = network()
    optimizer = fusedacc.AccumulatingOptimizer(inner(groups(model)), K)
    scheduler = make(optimizer.optimizer if way == "on the inner optimizer" else optimizer)
    if way != "by hand":
        scheduler = UpdateScheduler(scheduler, optimizer)
    seen = []
    for seed in range(K * UPDATES):
        cleared_micro_batch(model, optimizer, seed)
        if way != "by hand" or optimizer.has_updated:
            advance(scheduler)
        if optimizer.has_updated:
            seen.append(settings(optimizer))
    return seen, [p.detach() for p in model.parameters()]


@pytest.mark.sweep
@every_scheduler
@pytest.mark.parametrize("inner", INNERS.values(), ids=INNERS.keys())
@pytest.mark.parametrize("way", ["by hand", "wrapped", "on the inner optimizer"])
def test_rates_and_weights_equal_those_of_the_bare_optimizer(make, inner, way):
    """Also check that PyTorch warns of no wrong order of calls."""
    rates, weights = bare_run(make, inner)
    assert len({str(each) for each in rates}) > 1, "the schedule changed nothing"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, ours = wrapped_run(make, inner, way)
    assert found == rates
    assert all(map(torch.equal, weights, ours))
    assert not [w for w in caught if "optimizer.step()" in str(w.message)]


@pytest.mark.sweep
@every_scheduler
@pytest.mark.parametrize("first", ["scheduler", "optimizer"])
def test_a_schedule_resumes_inside_a_window(make, first):
    """The state dicts are loaded in either order, through a file."""

    def build():
        model = network()
        optimizer = wrap_momentum(model, K)
        return model, optimizer, UpdateScheduler(make(optimizer))

    def train(model, optimizer, scheduler, seeds) -> None:
        for seed in seeds:
            cleared_micro_batch(model, optimizer, seed)
            advance(scheduler)

    alone, resumed = build(), build()
    train(*alone, range(7))
    states = through_file([part.state_dict() for part in alone])
    order = (2, 1) if first == "scheduler" else (1, 2)
    for index in (0, *order):
        resumed[index].load_state_dict(states[index])
    for run in (alone, resumed):
        train(*run, range(7, 20))
    assert settings(alone[1]) == settings(resumed[1])
    assert alone[2].get_last_lr() == resumed[2].get_last_lr()
    assert all(map(torch.equal, alone[0].parameters(), resumed[0].parameters()))


def halving(steps=K, **options):
    """Return a scheduler whose rate shows how often it was stepped."""
    weight, optimizer = scalar(steps, **options)
    return weight, optimizer, UpdateScheduler(lr_scheduler.LambdaLR(optimizer, lambda update: 0.5**update))


def micro_batch(weight, optimizer, scheduler, calls: int = 1) -> None:
    (weight * 1.0).backward()
    optimizer.step(), optimizer.zero_grad()
    for _ in range(calls):
        scheduler.step()


#: Steps, calls ("m": a micro-batch, "s": the scheduler's step, "f": flush), updates, steps of the schedule.
CALLS = {
    "one call after each micro-batch": (K, "ms" * 4, 2, 2),
    "several calls after one update": (K, "msss" * 4, 2, 2),
    "calls before the first update": (K, "ss", 0, 0),
    "a flush after which the loop steps": (3, "ms" * 4 + "fss", 2, 2),
    "a flush after which a framework continues": (3, "ms" * 4 + "fms", 2, 2),
    "a flush and an update": (lambda update: 3 if update == 0 else 1, "msfms", 2, 2),
    "an empty flush": (K, "msms" + "fs", 1, 1),
    "a manual loop": (None, "mss" * 3, 3, 3),
}


class TestCounting:
    """The wrapped scheduler is stepped once per update, however often and whenever `step()` is called."""

    @pytest.mark.parametrize(("steps", "calls", "updates", "epochs"), CALLS.values(), ids=CALLS)
    def test_the_schedule_takes_one_step_per_update(self, steps, calls, updates, epochs):
        parts = halving(steps)
        act = {"m": lambda: micro_batch(*parts, calls=0), "s": parts[2].step, "f": parts[1].flush}
        for call in calls:
            act[call]()
        assert (parts[1].num_updates, parts[2].last_epoch) == (updates, epochs)

    def test_one_metric_is_one_step(self):
        weight, optimizer = scalar(lambda update: 3 if update == 0 else 1)
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
        scheduler = UpdateScheduler(plateau)
        for metrics in (3.0, 2.0):
            (weight * 1.0).backward()
            optimizer.step()
            scheduler.step(metrics=metrics)
            optimizer.flush()
        scheduler.step(metrics=2.5)
        assert (optimizer.num_updates, plateau.last_epoch) == (2, 1)
        assert (plateau.best, plateau.num_bad_epochs) == (2.0, 0)

    def test_a_skipped_update_does_not_count(self):
        weight, optimizer, scheduler = halving(skip_nonfinite=True)
        for value in (1.0, float("inf")):
            (weight * value).backward()
            optimizer.step(), scheduler.step()
        assert (optimizer.num_updates, int(optimizer.num_skipped), scheduler.last_epoch) == (1, 1, 1)

    def test_loading_an_earlier_state_of_the_optimizer_alone_does_not_stop_the_schedule(self):
        parts = halving()
        early = parts[1].state_dict()
        for _ in range(3 * K):
            micro_batch(*parts)
        parts[1].load_state_dict(early)
        for _ in range(2 * K):
            micro_batch(*parts)
        assert (parts[1].num_updates, parts[2].last_epoch) == (2, 5)

    def test_an_update_before_the_schedulers_step_survives_a_checkpoint(self):
        parts = halving(3)
        for _ in range(4):
            micro_batch(*parts)
        parts[1].flush()
        resumed = halving(3)
        resumed[2].load_state_dict(parts[2].state_dict())
        resumed[1].load_state_dict(parts[1].state_dict())
        micro_batch(*resumed)
        assert resumed[2].last_epoch == 2


class TestUpdateScheduler:
    """What frameworks expect of a scheduler."""

    def test_it_is_a_scheduler_of_the_wrapper(self):
        _, optimizer = scalar(K)
        inner = lr_scheduler.OneCycleLR(optimizer.optimizer, max_lr=0.1, total_steps=7)
        scheduler = UpdateScheduler(inner, optimizer)
        assert isinstance(scheduler, LRScheduler)
        assert scheduler.optimizer is optimizer
        assert scheduler.total_steps == 7
        assert scheduler.get_last_lr() == inner.get_last_lr()
        scheduler.last_epoch = 3
        assert inner.last_epoch == 3
        assert not hasattr(scheduler, "no_such_attribute")

    def test_state_is_exchanged_with_a_bare_scheduler(self):
        weight, optimizer, scheduler = halving()
        bare = scheduler.scheduler
        for _ in range(2 * K + 1):
            (weight * 1.0).backward()
            optimizer.step(), optimizer.zero_grad()
            if optimizer.has_updated:
                bare.step()
        for order in itertools.permutations((1, 2)):
            other = halving()
            states = {1: optimizer.state_dict(), 2: bare.state_dict()}
            for index in order:
                other[index].load_state_dict(states[index])
            micro_batch(*other)
            assert other[2].last_epoch == 3
            bare_again = lr_scheduler.LambdaLR(other[1], lambda update: 0.5**update)
            bare_again.load_state_dict(other[2].state_dict())
            assert bare_again.last_epoch == 3

    @pytest.mark.parametrize("damaged", [-1, 1.5, "3", True, [2]])
    def test_a_damaged_count_is_refused(self, damaged):
        parts = halving()
        before = parts[2].state_dict()
        with pytest.raises(ValueError, match=COUNTED):
            parts[2].load_state_dict({**before, "last_epoch": 9, COUNTED: damaged})
        assert parts[2].last_epoch == 0

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
    def test_copies_continue_separately(self, duplicate):
        weight, optimizer = scalar(K)
        parts = weight, optimizer, UpdateScheduler(lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
        for _ in range(3):
            micro_batch(*parts)
        twin = duplicate(parts)
        micro_batch(*twin)
        assert (twin[2].last_epoch, parts[2].last_epoch) == (2, 1)
        assert twin[1].param_groups[0]["lr"] == 0.25
        assert parts[1].param_groups[0]["lr"] == 0.5

    def test_wrong_arguments_are_refused(self):
        _, optimizer = scalar(K)
        _, other = scalar(K)
        bare = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
        inner = lr_scheduler.StepLR(optimizer, 1)
        with pytest.raises(TypeError, match=r"scheduler must be .*LRScheduler.*int"):
            UpdateScheduler(3, optimizer)
        with pytest.raises(TypeError, match="no UpdateScheduler"):
            UpdateScheduler(UpdateScheduler(inner))
        with pytest.raises(TypeError, match=r"AccumulatingOptimizer, got SGD.*optimizer="):
            UpdateScheduler(lr_scheduler.StepLR(bare, 1))
        with pytest.raises(ValueError, match="another optimizer"):
            UpdateScheduler(inner, other)

    def test_a_part_of_a_sequence_is_refused(self):
        _, optimizer = scalar(K)
        parts = [UpdateScheduler(lr_scheduler.StepLR(optimizer, 1)) for _ in range(2)]
        with pytest.raises(TypeError, match="wrap the SequentialLR"):
            lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])
