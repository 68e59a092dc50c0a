"""fastai's Learner with an optimizer that accumulates: the same updates as from each whole batch."""

import warnings

import case_fastai as case
import pages
import pytest
import torch
from bigrams import assert_near, tolerance
from comparison import difference, equal, snapshot
from example_scripts import assert_learns_digits
from fastai.callback.core import Callback, CancelEpochException, CancelFitException
from fastai.callback.fp16 import MixedPrecision, NonNativeMixedPrecision
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from loops import with_backward

from fusedacc.integrations.fastai import AccumulationCallback, OptFunc

#: Eight micro-batches: windows of `case.SAMPLES` samples are of three, three and two of them.
DATA = case.batches([8] * 8)
EPOCHS = 3


def accumulating(steps=None, make=case.sgd, **options):
    """What makes the optimizer, and the callback: windows of so many micro-batches, None: of samples."""
    if steps is None:
        return OptFunc(make, **options), AccumulationCallback(case.SAMPLES)
    return OptFunc(make, gradient_accumulation_steps=steps, **options), AccumulationCallback()


def learner(*callbacks, data=DATA, steps=None, net=None, **options):
    """A Learner with our callback before these."""
    func, callback = accumulating(steps, **options)
    return case.learner(data, func, [callback, *callbacks], net)


def assert_exact(net, epochs=EPOCHS, data=DATA, **options):
    """Check that the network equals one that is trained on whole batches."""
    assert_near(net, case.reference(data, epochs, **options), epochs * len(list(case.windows(data))))


def test_ours_is_exact_and_fastais_own_where_all_windows_have_n_acc_samples():
    for row in case.compare():
        allowed = tolerance(row.updates, 40)
        assert row.our_updates == row.updates >= 20, row
        assert row.ours < allowed, row
        if row.case == "full windows":
            assert row.their_updates == row.updates
            assert row.theirs < allowed
        else:
            assert row.theirs > 0.1, row
        if row.case == "partly filled last window":  # it carries that window on
            assert row.their_updates == 8 * 64 // case.SAMPLES == 21 < row.updates


def test_each_update_is_clipped_once():
    data = case.batches([3, 17, 9, 40, 5, 28, 11, 2])
    ours, _ = case.fit_ours(data, EPOCHS, max_grad_norm=0.1)
    assert_exact(ours, EPOCHS, data, max_norm=0.1)
    exact, start = snapshot(case.reference(data, EPOCHS, max_norm=0.1)), snapshot(case.network())
    assert difference(snapshot(case.reference(data, EPOCHS)), exact, start) > 0.1


@pytest.mark.parametrize("steps", [None, 3])
def test_weights_may_be_tokens(steps):
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
        assert_exact(learn.model, 5, data)


class Rates(Callback):
    """The hyper-parameters of every update."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def before_fit(self):
        def look(inner, *_):
            group = inner.param_groups[0]
            self.seen.append((group["lr"], group["momentum"]))

        self.handle = self.learn.opt.opt.register_step_pre_hook(look)

    def after_fit(self):
        self.handle.remove()


@pytest.mark.parametrize("steps", [None, 3])
def test_schedules_change_with_updates(steps):
    """fit_one_cycle over windows is fit_one_cycle over batches that are the windows."""
    data = case.batches([8] * 12)
    ours, whole = Rates(), Rates()
    learn = case.fit(learner(ours, data=data, steps=steps), 3, "fit_one_cycle", lr_max=0.5)
    large = case.learner(list(case.windows(data)), case.theirs, whole)
    case.fit(large, 3, "fit_one_cycle", lr_max=0.5)
    assert len(ours.seen) == len(whole.seen) == 12
    torch.testing.assert_close(torch.tensor(ours.seen), torch.tensor(whole.seen), rtol=1e-5, atol=1e-7)
    assert_near(learn.model, large.model, 12)
    assert (learn.train_iter, large.train_iter) == (36, 12)  # fastai itself counts batches


class SavesAt(Callback):
    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def after_batch(self):
        if self.training and self.learn.train_iter == self.batch + 1:
            self.learn.save("saved")


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [0, 1, 4, 5])
@pytest.mark.parametrize("steps", [None, 2])
def test_resume_is_bit_identical(tmp_path, dtype, batch, steps):
    """fastai goes on with the next batch if its loader does: here the loader of what is left."""
    data = case.batches([9, 10, 7, 4, 12, 13, 5])

    def make(micro_batches):
        net = case.network().to(dtype)
        learn = learner(data=micro_batches, steps=steps, net=net, make=torch.optim.AdamW)
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


@pytest.mark.parametrize(("error", "epochs"), [(CancelEpochException(), 2), (CancelFitException(), 1)])
def test_a_cancelled_window_is_thrown_away(error, epochs):
    learn = learner()
    with learn.added_cbs(CancelsAt(4, error)):
        case.fit(learn, epochs)
    # Of five batches, the first three are an update.
    assert (learn.opt.opt.num_updates, learn.opt.opt.micro_step) == (epochs, 0)
    assert all(parameter.grad is None for parameter in learn.model.parameters())
    assert_exact(learn.model, epochs, DATA[:3])


@pytest.mark.parametrize("steps", [None, 3])
def test_lr_find_leaves_the_training_as_it_was(tmp_path, steps):
    learn = learner(steps=steps)
    learn.path = tmp_path
    learn.create_opt()
    before = snapshot(learn.model)
    with learn.no_bar(), learn.no_logging():
        learn.lr_find(num_it=10, show_plot=False, suggest_funcs=None)
    assert all(map(torch.equal, before, snapshot(learn.model)))
    assert (learn.opt.opt.num_updates, learn.opt.opt.micro_step) == (0, 0)
    case.fit(learn, 1)
    assert learn.opt.opt.num_updates == 3


@pytest.mark.parametrize("steps", [None, 3])
def test_a_fit_after_an_exception_in_a_backward(steps):
    def fail(gradient):
        raise KeyError("in the backward")

    learn = learner(steps=steps)
    # The second layer's gradients are in the sums by then, so the window must be dropped.
    handle = learn.model[0].register_forward_hook(lambda module, inputs, output: with_backward(output, fail))
    with pytest.raises(KeyError):
        case.fit(learn, 1)
    handle.remove()
    case.fit(learn, EPOCHS)
    assert_exact(learn.model)


def test_another_optimizer_takes_the_place_of_the_first():
    learn = case.fit(learner(data=DATA[:3]), 2)
    first = learn.opt.opt
    case.fit(learn, 1, reset_opt=True)
    assert learn.opt.opt is not first
    assert learn.opt.opt.num_updates == 1
    other = case.fit(learner(data=DATA[:3], net=learn.model), 1)  # a second Learner takes the parameters over
    assert other.opt.opt.num_updates == 1


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (GradientAccumulation(16), r"GradientAccumulation\(n_acc=16\).*n_acc= to AccumulationCallback"),
        (GradientClip(0.5), r"GradientClip\(max_norm=0\.5\).*max_grad_norm="),
        (MixedPrecision(), r"MixedPrecision scales.*allowed: to_bf16\(\)"),
        (NonNativeMixedPrecision(), r"NonNativeMixedPrecision scales"),
    ],
)
def test_what_would_compound_is_refused(callback, message):
    net = case.network()
    before = snapshot(net)
    with pytest.raises(ValueError, match=message):
        case.fit(learner(callback, net=net), 1)
    assert all(map(torch.equal, before, snapshot(net)))


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2.*allowed: 1"):
        case.fit(learner(), 1)


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
        case.fit(case.learner(DATA[:3], func, AccumulationCallback(n_acc)), 1)


@pytest.mark.parametrize("n_acc", [0, -1, 2.5, True, "8"])
def test_n_acc_is_checked(n_acc):
    with pytest.raises(ValueError, match=r"n_acc must be an int of at least 1, or None, got"):
        AccumulationCallback(n_acc)


def test_the_page_runs():
    loaders = DataLoaders(case.Batches(case.batches([32] * 5)), case.Batches(), device="cpu")
    found = pages.run("fastai", torch=torch, dls=loaders, model=case.network(), criterion=case.loss_of)
    assert found["learn"].opt.opt.num_updates == 2 * 3


def test_the_example_learns_digits():
    assert_learns_digits("fastai_digits.py", 20)
