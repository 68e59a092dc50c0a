"""Lightning's Trainer with an optimizer that accumulates: the same updates as from each whole batch."""

import contextlib
from pathlib import Path

import case_lightning as case
import lightning.pytorch as lightning
import pages
import pytest
import torch
from bigrams import assert_near, tolerance
from comparison import difference, equal, snapshot
from example_scripts import assert_learns_digits
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.tuner import Tuner
from rank_scripts import run_on_two_ranks
from torch.utils.data import DataLoader

import fusedacc
from fusedacc.integrations.lightning import AccumulationCallback

#: Ten micro-batches: an epoch is two windows of four, and one of two.
DATA = case.batches([6] * 10)
EPOCHS = 3


def fit(module, *callbacks, epochs=1, data=DATA, path=None, **options):
    """The Trainer after these epochs, with our callback before these."""
    runner = case.trainer(epochs, callbacks=[AccumulationCallback(), *callbacks], **options)
    loader = data if isinstance(data, DataLoader) else case.loader(data)
    runner.fit(module, loader, ckpt_path=path)
    return runner


def made(kind=case.Module, steps=4, **options):
    return kind(case.network(), steps=steps, **options)


def updates(runner):
    """How many, as the Trainer, the optimizer and the scheduler count them."""
    last_epoch = runner.lr_scheduler_configs[0].scheduler.last_epoch
    (count,) = {runner.global_step, runner.optimizers[0].num_updates, last_epoch}
    return count


def assert_exact(module, epochs=EPOCHS, data=DATA):
    """Check that the network equals one that is trained on whole batches."""
    assert_near(module.net, case.reference(data, epochs), epochs * -(-len(data) // 4))


def test_ours_is_exact_and_lightnings_own_where_all_windows_are_full():
    for row in case.compare():
        allowed = tolerance(row.updates, 40)
        assert row.our_updates == row.their_updates == row.updates >= 20, row
        assert row.ours < allowed, row
        assert (row.theirs < allowed) if row.case == "full windows" else (row.theirs > 0.1), row


def test_each_update_is_clipped_once():
    ours, _ = case.fit_ours(DATA, EPOCHS, max_grad_norm=0.1)
    exact = case.reference(DATA, EPOCHS, max_norm=0.1)
    assert_near(ours, exact, 9)
    start = snapshot(case.network())
    assert difference(snapshot(case.reference(DATA, EPOCHS)), snapshot(exact), start) > 0.1


class Watch(lightning.Callback):
    """What else is called, and when."""

    def __init__(self):
        self.before_steps, self.validations = [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.before_steps.append(trainer.fit_loop.epoch_loop.total_batch_idx)

    def on_validation_start(self, trainer, pl_module):
        (optimizer,) = trainer.optimizers
        self.validations.append((trainer.global_step, optimizer.num_updates, optimizer.micro_step))


class Cleared(lightning.Callback):
    """When gradients are cleared: the batch, and the updates before; and an average of the weights then."""

    def __init__(self):
        self.seen, self.average = [], None

    def on_fit_start(self, trainer, pl_module):
        self.average = torch.optim.swa_utils.AveragedModel(pl_module.net)

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.seen.append((trainer.fit_loop.epoch_loop.total_batch_idx, trainer.global_step))
        self.average.update_parameters(pl_module.net)


class CountsClearing(case.Module):
    cleared = 0

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.cleared += 1
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)


def test_gradients_are_cleared_once_a_window_as_by_the_trainers_own_accumulation():
    data, found = case.loader(case.batches([6] * 8)), []
    for steps in (None, 4):
        watch, module = Cleared(), made(CountsClearing, steps)
        averages = EMAWeightAveraging(decay=0.5), WeightAveraging()
        ours = {"callbacks": [*averages, watch, AccumulationCallback()]}
        theirs = {"callbacks": [*averages, watch], "accumulate_grad_batches": 4}
        runner = case.trainer(2, **(ours if steps else theirs))
        runner.fit(module, data)
        progress = runner.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer
        assert watch.seen == [(0, 0), (4, 1), (8, 2), (12, 3)]
        assert module.cleared == progress.zero_grad.total.completed == progress.step.total.completed == 4
        assert watch.average.n_averaged == 4
        assert [average._average_model.n_averaged.item() for average in averages] == [4, 4]
        averaged = [average._average_model.module.net for average in averages]
        found.append((module.net, watch.average.module, *averaged))
    for theirs, ours in zip(*found, strict=True):
        assert_near(ours, theirs, 4)


class WithoutLoss(CountsClearing):
    """Its training step returns None for some batches."""

    skipped = (0, 5)

    def training_step(self, batch, batch_idx):
        return None if batch_idx in self.skipped else super().training_step(batch, batch_idx)


@pytest.mark.parametrize("skipped", [1, 3, 9])
def test_a_training_step_without_a_loss_does_not_count(skipped):
    module = made(WithoutLoss)
    module.skipped = (skipped,)
    assert updates(fit(module, epochs=2)) == 6
    assert_exact(module, 2, [*DATA[:skipped], *DATA[skipped + 1 :]])


class ByHand(case.Module):
    """A manual loop inside the Trainer's own accumulation."""

    def configure_optimizers(self):
        optimizer = fusedacc.AccumulatingOptimizer(self.make(self.net.parameters()))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class WithValidation(case.Module):
    def validation_step(self, batch, batch_idx):
        pass

    def val_dataloader(self):
        return case.loader(DATA)


def test_everything_counts_updates(tmp_path):
    watch, module = Watch(), made(WithValidation)
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    options = {"enable_checkpointing": True, "num_sanity_val_steps": 0}
    assert updates(fit(module, watch, saves, epochs=2, **options)) == 6
    assert module.rates == pytest.approx([0.2 * 0.98**i for i in range(6)])
    assert watch.before_steps == [3, 7, 9, 13, 17, 19]
    # An epoch is validated with its last, partly filled window in the parameters.
    assert watch.validations == [(3, 3, 0), (6, 6, 0)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]


def test_a_schedule_of_steps():
    """Windows of 1, 2, 3 and then 4 micro-batches, over epochs of 10."""
    watch, module = Watch(), made(steps=lambda updates: min(updates + 1, 4))
    assert updates(fit(module, watch, epochs=2)) == len(module.rates) == 7
    assert watch.before_steps == [0, 2, 5, 9, 13, 17, 19]


class StopsAfterSix(lightning.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = batch_idx == 5


class SkipsTheRest(case.Module):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 6 else None


@pytest.mark.parametrize(("kind", "callbacks"), [(case.Module, [StopsAfterSix()]), (SkipsTheRest, [])])
def test_an_epoch_that_ends_early_flushes(kind, callbacks):
    module = made(kind)
    assert updates(fit(module, *callbacks, min_epochs=0)) == 2
    assert_exact(module, 1, DATA[:6])


def scaler() -> fusedacc.amp.GradScaler:
    """Its first updates overflow, and it grows again."""
    return fusedacc.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)


class Resumable(DataLoader):
    """Goes on where it was saved: Lightning leaves that to the loader."""

    position = 0

    def __iter__(self):
        self.position %= len(self.dataset)
        while self.position < len(self.dataset):
            self.position += 1
            yield self.dataset[self.position - 1]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class SavesAt(lightning.Callback):
    def __init__(self, batch: int, path: Path) -> None:
        self.batch, self.path = batch, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.batch:
            trainer.save_checkpoint(self.path)


@pytest.mark.sweep
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-mixed"])
@pytest.mark.parametrize("batch", [1, 15, 17, 19])
@pytest.mark.parametrize("reduction", ["mean", "weighted"])
def test_resume_is_bit_identical(tmp_path, precision, batch, reduction):
    """In the first window, in mid-window of the second epoch, after an update, after the flush."""
    data = case.batches([3, 7, 5, 9, 2, 6, 4, 8, 3, 5])
    weight = case.tokens if reduction == "weighted" else None

    def run(callbacks=(), path=None):
        module = case.Module(case.network(), torch.optim.AdamW, steps=4, reduction=reduction)
        options = {"precision": precision}
        if precision == "16-mixed":
            options = {"plugins": MixedPrecision(precision, "cpu", scaler())}
        runner = case.trainer(3, callbacks=[AccumulationCallback(weight), *callbacks], **options)
        runner.fit(module, Resumable(data, batch_size=None), ckpt_path=path)
        # The last one counts the steps of loggers.
        assert updates(runner) == runner.fit_loop.epoch_loop._batches_that_stepped == 9
        return module

    whole = run([SavesAt(batch, tmp_path / "saved.ckpt")])
    resumed = run(path=tmp_path / "saved.ckpt")
    assert 0 < len(resumed.rates) <= len(whole.rates)
    assert equal(whole, resumed)


def test_a_scaler_of_ours_goes_with_16_mixed():
    """Against the loop written by hand: the same bits."""
    plugin = MixedPrecision("16-mixed", "cpu", scaler())
    module = made(max_grad_norm=0.1)
    runner = fit(module, epochs=3, plugins=plugin)

    net = case.network()
    optimizer = fusedacc.AccumulatingOptimizer(case.sgd(net.parameters()), 4, max_grad_norm=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    own = scaler()
    for _ in range(3):
        for i, batch in enumerate(DATA):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = case.loss_of(net, batch)
            own.scale(loss).backward()
            for act in (own.step, own.flush) if i == 9 else (own.step,):
                act(optimizer)
                updated = optimizer.has_updated
                own.update()
            if updated:
                scheduler.step()
    assert equal(module.net, net)
    assert updates(runner) == optimizer.num_updates == 9
    assert plugin.scaler.get_scale() == own.get_scale() != 2.0**20


class Manual(case.Module):
    """The same training by hand; `step()` on every micro-batch."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(case.loss_of(self.net, batch))
        optimizer.step()

    def on_train_batch_end(self, *_):
        if self.optimizers().has_updated:
            self.lr_schedulers().step()


def test_manual_optimization():
    module = made(Manual)
    assert updates(fit(module, epochs=EPOCHS)) == 9
    assert module.rates == pytest.approx([0.2 * 0.98**i for i in range(9)])
    assert_exact(module)


def test_a_manual_loop_wrapper_runs_under_the_trainers_own_accumulation():
    """As stock does, wrong last window included: the Trainer divides the loss."""
    theirs, _ = case.fit_theirs(DATA, 2)
    module = ByHand(case.network())
    case.trainer(2, accumulate_grad_batches=4).fit(module, case.loader(DATA))
    assert equal(module.net, theirs)


def unscaled():
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


class NotWrapped(case.Module):
    def configure_optimizers(self):
        return self.make(self.net.parameters())


class Accumulates(SingleDeviceStrategy):
    handles_gradient_accumulation = True


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"accumulate_grad_batches": 2}, ValueError, r"accumulate_grad_batches=2\).*allowed: 1"),
        ({"gradient_clip_val": 0.5}, ValueError, r"gradient_clip_val=0\.5.*max_grad_norm="),
        ({"plugins": unscaled}, ValueError, r"fusedacc\.amp\.GradScaler"),
        ({"strategy": Accumulates}, ValueError, "with 1 processes.*allowed: one process"),
        ({"scheduler": True}, ValueError, r"GradientAccumulationScheduler.*pass a callable"),
        ({"kind": NotWrapped}, TypeError, "returned a SGD.*fusedacc.AccumulatingOptimizer"),
        ({"kind": ByHand}, ValueError, "that counts"),
    ],
)
def test_what_does_not_fit_is_refused(options, error, message):
    options = dict(options)
    module = made(options.pop("kind", case.Module))
    before = snapshot(module.net)
    callbacks = [GradientAccumulationScheduler({3: 2})] if options.pop("scheduler", False) else []
    options = {key: value() if callable(value) else value for key, value in options.items()}
    with pytest.raises(error, match=message):
        fit(module, *callbacks, **options)
    assert all(map(torch.equal, before, snapshot(module.net)))


def test_two_processes_without_ddp_are_refused(monkeypatch):
    monkeypatch.setattr(lightning.Trainer, "world_size", 2)
    with pytest.raises(ValueError, match=r"with 2 processes.*allowed: one process"):
        fit(made(), strategy=SingleDeviceStrategy())


def test_two_ranks_train_as_one_by_the_trainer_and_by_fabric():
    run_on_two_ranks("rank_lightning")


def test_a_module_can_be_fitted_again_after_an_exception_and_after_a_fit(tmp_path):
    class Fails(case.Module):
        fails = True

        def training_step(self, batch, batch_idx):
            if self.fails and batch_idx == 5:
                raise KeyError("in mid-window")
            return super().training_step(batch, batch_idx)

    module = made(Fails)
    with contextlib.suppress(KeyError):
        fit(module)
    module.fails = False
    second = fit(module)
    assert second.global_step == 3
    second.save_checkpoint(tmp_path / "after.ckpt")
    second.fit_loop.max_epochs = 2
    second.fit(module, case.loader(DATA))
    assert second.global_step == 6

    # Nothing of ours is left on the module.
    case.loss_of(module.net, DATA[0]).backward()
    assert all(parameter.grad is not None for parameter in module.net.parameters())
    assert fit(module, epochs=2, path=tmp_path / "after.ckpt").global_step == 6


def test_a_fit_after_the_tuner(tmp_path):
    module = made()
    runner = case.trainer(EPOCHS, callbacks=[AccumulationCallback()], default_root_dir=tmp_path)
    Tuner(runner).lr_find(module, case.loader(DATA), num_training=10, update_attr=False)
    runner.fit(module, case.loader(DATA))
    assert runner.global_step == 9
    assert_exact(module)


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the Trainer's logs
    found = pages.run("lightning", torch=torch)

    class Module(found["Module"], case.Module):
        pass

    found["trainer"].fit(Module(case.network()), case.loader(DATA))
    assert found["trainer"].global_step == 2 * 3


def test_the_example_learns_digits():
    assert_learns_digits("lightning_digits.py", 20)
