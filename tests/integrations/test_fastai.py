"""fastai's Learner with an optimizer that accumulates: the same updates as from each whole batch."""

from __future__ import annotations

import pickle
import re
import warnings
from pathlib import Path

import case_fastai as case
import pytest
import torch
from bigrams import tolerance
from comparison import difference, equal, snapshot
from example_scripts import output_of
from fastai.callback.core import Callback, CancelEpochException, CancelFitException
from fastai.callback.fp16 import MixedPrecision, NonNativeMixedPrecision
from fastai.callback.schedule import ParamScheduler
from fastai.callback.training import GradientAccumulation, GradientClip, ShortEpochCallback
from fastai.learner import Learner
from fastai.optimizer import OptimWrapper

import fusedacc
from fusedacc.integrations.fastai import AccumulationCallback, OptFunc

ROOT = Path(__file__).resolve().parent.parent.parent


class TestAgainstWholeBatches:
    @pytest.fixture(scope="class")
    @classmethod
    def rows(cls):
        return {row.case: row for row in case.compare()}

    @pytest.mark.parametrize("name", [name for name, *_ in case.CASES])
    def test_ours_is_exact(self, rows, name):
        row = rows[name]
        assert row.updates >= 20
        assert row.our_updates == row.updates
        assert row.ours < tolerance(row.updates, 40)

    def test_fastai_is_exact_where_all_windows_have_n_acc_samples(self, rows):
        row = rows["full windows"]
        assert row.their_updates == row.updates
        assert row.theirs < tolerance(row.updates, 40)

    def test_fastai_carries_a_part_filled_window_on(self, rows):
        assert rows["ragged micro-batches"].theirs > 0.1
        row = rows["part-filled last window"]
        assert row.their_updates == 8 * 64 // case.SAMPLES == 21 < row.updates
        assert row.theirs > 0.1

    def test_fastai_divides_by_n_acc_whatever_the_window_holds(self):
        data = case.batches([17, 17])  # one window of 34 samples
        start, exact = snapshot(case.network()), snapshot(case.reference(data, 1))
        net, updates = case.fit_theirs(data, 1)
        assert updates == 1
        # The same gradient times 34 / 24.
        found = difference(snapshot(net), exact, start)
        assert found == pytest.approx(34 / case.SAMPLES - 1, rel=0.01)
        ours, _ = case.fit_ours(data, 1)
        assert difference(snapshot(ours), exact, start) < tolerance(1, 40)

    def test_fastai_leaves_gradients_behind(self):
        net, _ = case.fit_theirs(case.batches([8] * 4), 1)
        assert all(parameter.grad is not None for parameter in net.parameters())
        net, _ = case.fit_ours(case.batches([8] * 4), 1)
        assert all(parameter.grad is None for parameter in net.parameters())

    def test_each_update_is_clipped_once(self):
        data = case.batches([3, 17, 9, 40, 5, 28, 11, 2])
        ours, _ = case.fit_ours(data, 6, max_grad_norm=0.1)
        exact = snapshot(case.reference(data, 6, max_norm=0.1))
        start = snapshot(case.network())
        assert difference(snapshot(ours), exact, start) < tolerance(24, 40)
        assert difference(snapshot(case.reference(data, 6)), exact, start) > 0.1

    def test_an_optimizer_that_counts_micro_batches(self):
        data = case.batches([8] * 8)
        func = OptFunc(case.sgd, gradient_accumulation_steps=3)
        learn = case.fit(case.learner(data, func, AccumulationCallback()), 8)
        assert learn.opt.opt.num_updates == 24
        exact = snapshot(case.reference(data, 8))
        assert difference(snapshot(learn.model), exact, snapshot(case.network())) < tolerance(24, 40)

    @pytest.mark.parametrize("steps", [None, 3])
    def test_weights_may_be_tokens(self, steps):
        """A batch of rows counts as many as there are tokens in them; None counts weights up to n_acc."""
        data = [(x[: len(x) // 4 * 4], y[: len(y) // 4 * 4]) for x, y in case.batches([9, 17, 9, 40, 5, 28])]
        rows = [(x.view(-1, 4), y.view(-1, 4)) for x, y in data]

        def tokens(xb, yb):
            return yb[0].numel()

        def loss(prediction, target):
            return case.loss_of(prediction.flatten(0, 1), target.flatten())

        options = {} if steps is None else {"gradient_accumulation_steps": steps, "reduction": "weighted"}
        callback = AccumulationCallback(case.SAMPLES if steps is None else None, weight=tokens)
        learn = case.learner(rows, OptFunc(case.sgd, **options), callback)
        learn.loss_func = loss
        case.fit(learn, 5)
        assert learn.opt.opt.num_updates == (15 if steps is None else 10)
        if steps is None:
            exact = snapshot(case.reference(data, 5))
            assert difference(snapshot(learn.model), exact, snapshot(case.network())) < tolerance(15, 40)


class Rates(Callback):
    """The hyper-parameters of every update."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def before_fit(self):
        hook = self.learn.opt.opt.register_step_pre_hook
        self.handle = hook(lambda inner, *_: self.seen.append(_hypers(inner)))

    def after_fit(self):
        self.handle.remove()


def _hypers(inner):
    return inner.param_groups[0]["lr"], inner.param_groups[0]["momentum"]


@pytest.mark.parametrize("steps", [None, 3])
def test_schedules_change_with_updates(steps):
    """fit_one_cycle over windows is fit_one_cycle over batches that are the windows."""
    data = case.batches([8] * 12)
    options = {} if steps is None else {"gradient_accumulation_steps": steps}
    callback = AccumulationCallback(case.SAMPLES if steps is None else None)
    ours, whole = Rates(), Rates()
    learn = case.fit(
        case.learner(data, OptFunc(case.sgd, **options), [callback, ours]), 5, "fit_one_cycle", lr_max=0.5
    )
    large = case.fit(
        case.learner(list(case.windows(data)), case.theirs, whole), 5, "fit_one_cycle", lr_max=0.5
    )
    assert len(ours.seen) == len(whole.seen) == 20
    torch.testing.assert_close(torch.tensor(ours.seen), torch.tensor(whole.seen), rtol=1e-5, atol=1e-7)
    found = difference(snapshot(learn.model), snapshot(large.model), snapshot(case.network()))
    assert found < tolerance(20, 40)
    assert (learn.train_iter, large.train_iter) == (60, 20)  # fastai itself counts batches


def test_a_window_keeps_the_hyper_parameters_of_its_first_batch():
    rates = Rates()
    schedule = ParamScheduler({"lr": lambda position: 1.0 + position})
    learn = case.learner(
        case.batches([8] * 8), OptFunc(case.sgd), [AccumulationCallback(case.SAMPLES), rates, schedule]
    )
    case.fit(learn, 1)
    assert [lr for lr, _ in rates.seen] == pytest.approx([1.0, 1 + 3 / 8, 1 + 6 / 8])
    assert schedule.hps["lr"] == pytest.approx([1.0] * 3 + [1 + 3 / 8] * 3 + [1 + 6 / 8] * 2)


class SavesAt(Callback):
    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def after_batch(self):
        if self.training and self.learn.train_iter == self.batch + 1:
            self.learn.save("saved")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [0, 1, 4, 5])
@pytest.mark.parametrize("steps", [None, 2])
def test_resume_is_bit_identical(tmp_path, dtype, batch, steps):
    """fastai goes on with the next batch if its loader does: here the loader of what is left."""
    data = case.batches([9, 10, 7, 4, 12, 13, 5])

    def make(micro_batches):
        options = {} if steps is None else {"gradient_accumulation_steps": steps}
        callback = AccumulationCallback(case.SAMPLES if steps is None else None)
        func = OptFunc(torch.optim.AdamW, **options)
        learn = case.learner(micro_batches, func, callback, case.network().to(dtype))
        learn.path = tmp_path
        return learn

    whole = make(data)
    with whole.added_cbs(SavesAt(batch)):
        case.fit(whole, 1)
    resumed = make(data[batch + 1 :])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Could not load")  # all that fastai says of a bad state
        resumed.load("saved")
    case.fit(resumed, 1)
    assert equal(whole.model, resumed.model)
    assert whole.opt.opt.num_updates == resumed.opt.opt.num_updates > 0


class CancelsAt(Callback):
    def __init__(self, batch, error):
        super().__init__()
        self.batch, self.error = batch, error

    def after_batch(self):
        if self.training and self.iter == self.batch:
            raise self.error


def test_a_cancelled_epoch_throws_its_window_away():
    data = case.batches([8] * 8)
    learn = case.learner(data, OptFunc(case.sgd), AccumulationCallback(case.SAMPLES))
    with learn.added_cbs(CancelsAt(4, CancelEpochException())):
        case.fit(learn, 2)
    exact = case.network()
    optimizer = case.sgd(exact.parameters())
    for _ in range(2):  # of five batches, the first three are an update
        (x, y), *_ = case.windows(data)
        optimizer.zero_grad()
        case.loss_of(exact(x), y).backward()
        optimizer.step()
    assert learn.opt.opt.num_updates == 2
    assert difference(snapshot(learn.model), snapshot(exact), snapshot(case.network())) < tolerance(2, 40)


def test_a_cancelled_fit_throws_its_window_away():
    learn = case.learner(case.batches([8] * 8), OptFunc(case.sgd), AccumulationCallback(case.SAMPLES))
    with learn.added_cbs(CancelsAt(4, CancelFitException())):
        case.fit(learn, 1)
    optimizer = learn.opt.opt
    assert (optimizer.num_updates, optimizer.micro_step) == (1, 0)
    assert all(parameter.grad is None for parameter in learn.model.parameters())


def test_a_short_epoch_flushes():
    data = case.batches([8] * 8)
    learn = case.learner(
        data, OptFunc(case.sgd), [AccumulationCallback(case.SAMPLES), ShortEpochCallback(0.6)]
    )
    case.fit(learn, 1)
    exact = snapshot(case.reference(data[:6], 1))
    assert learn.opt.opt.num_updates == 2
    assert difference(snapshot(learn.model), exact, snapshot(case.network())) < tolerance(2, 40)


@pytest.mark.parametrize("steps", [None, 3])
def test_lr_find_leaves_the_training_as_it_was(tmp_path, steps):
    options = {} if steps is None else {"gradient_accumulation_steps": steps}
    callback = AccumulationCallback(case.SAMPLES if steps is None else None)
    learn = case.learner(case.batches([8] * 8), OptFunc(case.sgd, **options), callback)
    learn.path = tmp_path
    learn.create_opt()
    before = snapshot(learn.model)
    with learn.no_bar(), learn.no_logging():
        learn.lr_find(num_it=10, show_plot=False, suggest_funcs=None)
    assert all(map(torch.equal, before, snapshot(learn.model)))
    assert (learn.opt.opt.num_updates, learn.opt.opt.micro_step) == (0, 0)
    case.fit(learn, 1)
    assert learn.opt.opt.num_updates == 3


def test_a_fit_after_an_exception_in_a_backward():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise KeyError("in the backward")

    data = case.batches([8] * 8)
    learn = case.learner(data, OptFunc(case.sgd), AccumulationCallback(case.SAMPLES))
    # The second layer's gradients have come by then; they were not in the sums yet.
    handle = learn.model[0].register_forward_hook(lambda module, inputs, output: Fails.apply(output))
    with pytest.raises(KeyError):
        case.fit(learn, 1)
    handle.remove()
    case.fit(learn, 8)
    exact = snapshot(case.reference(data, 8))
    assert difference(snapshot(learn.model), exact, snapshot(case.network())) < tolerance(24, 40)


def test_an_optimizer_is_made_anew_by_reset_opt():
    learn = case.learner(case.batches([8] * 3), OptFunc(case.sgd), AccumulationCallback(case.SAMPLES))
    case.fit(learn, 2)
    first = learn.opt.opt
    case.fit(learn, 1, reset_opt=True)
    assert learn.opt.opt is not first
    assert learn.opt.opt.num_updates == 1
    other = case.learner(
        case.batches([8] * 3), OptFunc(case.sgd), AccumulationCallback(case.SAMPLES), learn.model
    )
    case.fit(other, 1)  # a second Learner of the model takes its parameters over
    assert other.opt.opt.num_updates == 1


def test_a_wrapper_that_the_user_has_made():
    data, net = case.batches([8] * 8), case.network()
    optimizer = fusedacc.AccumulatingOptimizer(case.sgd(net.parameters()), reduction="weighted")
    learn = case.learner(data, OptimWrapper(opt=optimizer), AccumulationCallback(case.SAMPLES), net)
    case.fit(learn, 8)
    exact = snapshot(case.reference(data, 8))
    assert difference(snapshot(net), exact, snapshot(case.network())) < tolerance(24, 40)


def test_bf16_mixed_precision_is_let_through():
    learn = case.learner(case.batches([8] * 8), OptFunc(case.sgd), AccumulationCallback(case.SAMPLES))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="CUDA is not available")  # fastai's autocast is CUDA's
        case.fit(learn.to_bf16(), 1)
    assert learn.opt.opt.num_updates == 3


def test_discriminative_rates_and_frozen_layers():
    def split(net):
        return [list(part.parameters()) for part in net]

    data = case.batches([8] * 6)
    nets = []
    for micro_batches, func, cbs in (
        (data, OptFunc(case.sgd), AccumulationCallback(case.SAMPLES)),
        (list(case.windows(data)), case.theirs, None),
    ):
        learn = case.learner(micro_batches, func, cbs)
        learn.splitter = split
        with learn.no_bar(), learn.no_logging():
            learn.freeze()
            learn.fit(2, lr=slice(0.1))
            learn.unfreeze()
            learn.fit(2, lr=slice(0.05, 0.2))
        nets.append(learn.model)
    assert difference(*map(snapshot, nets), snapshot(case.network())) < tolerance(8, 40)


def test_the_callback_and_opt_func_are_pickled():
    func, callback = pickle.loads(
        pickle.dumps((OptFunc(torch.optim.AdamW, max_grad_norm=1.0), AccumulationCallback(case.SAMPLES)))
    )
    learn = case.fit(case.learner(case.batches([8] * 6), func, callback), 1)
    assert learn.opt.opt.num_updates == 2


REFUSED = {
    "accumulates": (
        GradientAccumulation(16),
        r"GradientAccumulation\(n_acc=16\).*n_acc= to AccumulationCallback",
    ),
    "clips": (GradientClip(0.5), r"GradientClip\(max_norm=0\.5\).*max_grad_norm="),
    "scales": (MixedPrecision(), r"MixedPrecision scales.*allowed: to_bf16\(\)"),
    "scales by hand": (NonNativeMixedPrecision(), r"NonNativeMixedPrecision scales"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_compound_is_refused(name):
    callback, message = REFUSED[name]
    net = case.network()
    before = snapshot(net)
    learn = case.learner(
        case.batches([8] * 3), OptFunc(case.sgd), [AccumulationCallback(case.SAMPLES), callback], net
    )
    with pytest.raises(ValueError, match=message):
        case.fit(learn, 1)
    assert all(map(torch.equal, before, snapshot(net)))


def test_several_processes_are_refused(monkeypatch):
    learn = case.learner(case.batches([8] * 3), OptFunc(case.sgd), AccumulationCallback(case.SAMPLES))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2.*allowed: 1"):
        case.fit(learn, 1)


@pytest.mark.parametrize(
    ("func", "n_acc", "error", "message"),
    [
        (case.theirs, 24, TypeError, "optimizer is a SGD.*OptFunc"),
        (OptFunc(case.sgd, gradient_accumulation_steps=2), 24, ValueError, "n_acc=24 does not go with"),
        (OptFunc(case.sgd, reduction="sum"), 24, ValueError, "n_acc=24 does not go with"),
        (OptFunc(case.sgd), None, ValueError, "n_acc=None needs gradient_accumulation_steps=k"),
    ],
)
def test_an_optimizer_that_does_not_fit_is_refused(func, n_acc, error, message):
    with pytest.raises(error, match=message):
        case.fit(case.learner(case.batches([8] * 3), func, AccumulationCallback(n_acc)), 1)


@pytest.mark.parametrize("n_acc", [0, -1, 2.5, True, "8"])
def test_n_acc_is_checked(n_acc):
    with pytest.raises(ValueError, match=r"n_acc must be an int of at least 1, or None, got"):
        AccumulationCallback(n_acc)


def test_without_the_callback_a_counted_optimizer_runs_too():
    """The loop of a Learner is an ordinary one; nobody flushes then."""
    func = OptFunc(case.sgd, gradient_accumulation_steps=3)
    learn = case.fit(case.learner(case.batches([8] * 8), func), 1)
    assert isinstance(learn, Learner)
    assert isinstance(learn.opt.opt, fusedacc.AccumulatingOptimizer)
    assert (learn.opt.opt.num_updates, learn.opt.opt.micro_step) == (2, 2)


def test_the_example():
    printed = output_of("fastai_digits.py")
    updates, accuracy = re.search(r"(\d+) updates, accuracy .*: ([\d.]+)%", printed).groups()
    assert int(updates) == 20 * 24  # 47 batches are 23 windows of 64 samples, and one of 28
    assert float(accuracy) > 85
