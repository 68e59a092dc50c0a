"""Lightning's Trainer with `AccumulationCallback(carry_over=True)`: windows continue across epochs."""

import case_lightning as case
import lightning.pytorch as lightning
import pytest
import torch
from bigrams import assert_near
from comparison import equal
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision

import fusedacc
from fusedacc.integrations.lightning import AccumulationCallback

#: Ten micro-batches an epoch, and windows of four.
DATA = case.batches([6] * 10)
#: An epoch that is shorter than a window.
SHORT = case.batches([6] * 3)


def fit(module, *callbacks, epochs=3, data=DATA, path=None, weight=None, **options):
    ours = AccumulationCallback(weight, carry_over=True)
    runner = case.trainer(epochs, callbacks=[ours, *callbacks], **options)
    runner.fit(module, case.loader(data), ckpt_path=path)
    return runner


def made(kind=case.Module, steps=4, **options):
    return kind(case.network(), steps=steps, **options)


def updates(runner):
    """How many, as the Trainer, the optimizer and the scheduler count them."""
    last_epoch = runner.lr_scheduler_configs[0].scheduler.last_epoch
    (count,) = {runner.global_step, runner.optimizers[0].num_updates, last_epoch}
    return count


def assert_exact(module, stream, **options):
    """Check that the network equals one that is trained on the windows of one long epoch."""
    assert_near(module.net, case.reference(stream, 1, **options), -(-len(stream) // 4))


@pytest.mark.parametrize(
    ("data", "epochs", "count"), [(DATA, 3, 8), (SHORT, 5, 4), (SHORT, 1, 1), (DATA, 2, 5)]
)
def test_windows_continue_in_the_next_epoch(data, epochs, count):
    module = made(max_grad_norm=0.1)
    assert updates(fit(module, epochs=epochs, data=data)) == len(module.rates) == count
    assert_exact(module, data * epochs, max_norm=0.1)


def test_without_a_remainder_it_changes_nothing():
    whole, data = made(), DATA[:8]
    case.trainer(2, callbacks=[AccumulationCallback()]).fit(whole, case.loader(data))
    module = made()
    assert updates(fit(module, epochs=2, data=data)) == 4
    assert equal(whole, module)


def test_weights_are_carried_too():
    data = case.batches([3, 17, 9, 40, 5, 28])
    module = made(reduction="weighted")
    assert updates(fit(module, data=data, weight=case.tokens)) == 5
    assert_exact(module, data * 3)


class Validates(case.Module):
    def validation_step(self, batch, batch_idx):
        pass

    def val_dataloader(self):
        return case.loader(DATA)


class Watch(lightning.Callback):
    """What the optimizer has done at each validation, at the end of each epoch and of training."""

    def __init__(self):
        self.validations, self.epochs, self.end = [], [], None

    def state(self, trainer):
        (optimizer,) = trainer.optimizers
        assert trainer.global_step == optimizer.num_updates
        return optimizer.num_updates, optimizer.micro_step

    def on_validation_start(self, trainer, pl_module):
        self.validations.append(self.state(trainer))

    def on_train_epoch_end(self, trainer, pl_module):
        self.epochs.append(self.state(trainer))

    def on_train_end(self, trainer, pl_module):
        self.end = self.state(trainer)


def test_the_last_epoch_is_updated_before_it_is_validated_and_saved(tmp_path):
    watch, module = Watch(), made(Validates)
    saves = ModelCheckpoint(tmp_path, "{epoch}-{step}", save_top_k=-1)
    options = {"enable_checkpointing": True, "num_sanity_val_steps": 0}
    fit(module, watch, saves, **options)
    assert watch.validations == watch.epochs == [(2, 2), (5, 0), (8, 0)]
    assert watch.end == (8, 0)
    assert_exact(module, DATA * 3)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["epoch=0-step=2.ckpt", "epoch=1-step=5.ckpt", "epoch=2-step=8.ckpt"]


def test_validation_inside_an_epoch():
    watch, module = Watch(), made(Validates)
    fit(module, watch, epochs=2, val_check_interval=5, num_sanity_val_steps=0)
    assert watch.validations == [(1, 1), (2, 2), (3, 3), (5, 0)]
    assert_exact(module, DATA * 2)


class ByEpoch(case.Module):
    """Its scheduler steps once an epoch."""

    def configure_optimizers(self):
        optimizers, (config,) = super().configure_optimizers()
        return optimizers, [config | {"interval": "epoch"}]


def test_a_scheduler_of_epochs():
    module = made(ByEpoch)
    runner = fit(module, data=SHORT, epochs=5)
    assert runner.lr_scheduler_configs[0].scheduler.last_epoch == 5
    assert runner.global_step == 4
    # The epochs in which the four updates are made; the last one is before its scheduler's step.
    assert module.rates == pytest.approx([0.2 * 0.98**epoch for epoch in (1, 2, 3, 4)])


def test_max_steps():
    watch, module = Watch(), made()
    runner = fit(module, watch, epochs=-1, max_steps=7)
    assert updates(runner) == 7
    assert watch.epochs == [(2, 2), (5, 0), (7, 0)]
    assert_exact(module, (DATA * 3)[:28])


class StopsAfter(lightning.Callback):
    """Stops in a batch, or at the end of an epoch."""

    def __init__(self, batch=None, epoch=None):
        self.batch, self.epoch = batch, epoch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.batch:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == self.epoch:
            trainer.should_stop = True


@pytest.mark.parametrize(
    ("stop", "batches", "before"),
    [
        (StopsAfter(batch=16), 17, [(2, 2), (5, 0)]),  # the epoch's end updates
        (StopsAfter(epoch=0), 10, [(2, 2)]),  # only the training's end does
        (StopsAfter(batch=13, epoch=0), 10, [(2, 2)]),
    ],
)
def test_a_training_that_stops_early_updates(stop, batches, before):
    watch, module = Watch(), made()
    runner = fit(module, stop, watch, min_epochs=0)
    assert updates(runner) == len(module.rates) == -(-batches // 4)
    assert watch.epochs == before
    assert watch.end == (-(-batches // 4), 0)
    assert_exact(module, (DATA * 3)[:batches])


class Worsens(Validates):
    def validation_step(self, batch, batch_idx):
        self.log("loss", float(self.current_epoch))


def test_early_stopping_and_min_epochs():
    """Training goes on until `min_epochs`, although EarlyStopping asks to stop after the second epoch."""
    for min_epochs, epochs in ((0, 2), (3, 3)):
        module = made(Worsens)
        runner = fit(module, EarlyStopping("loss", patience=1), epochs=5, min_epochs=min_epochs, data=SHORT)
        assert runner.current_epoch == epochs
        assert updates(runner) == -(-3 * epochs // 4)
        assert_exact(module, SHORT * epochs)


def scaler():
    return fusedacc.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("reduction", ["mean", "weighted"])
def test_a_checkpoint_between_epochs_resumes_bit_for_bit(tmp_path, precision, reduction):
    weight = case.tokens if reduction == "weighted" else None
    data = case.batches([3, 7, 5, 9, 2, 6])

    def run(path=None, *callbacks):
        module = case.Module(case.network(), torch.optim.AdamW, steps=4, reduction=reduction)
        options = {"precision": precision}
        if precision == "16-mixed":
            options = {"plugins": MixedPrecision(precision, "cpu", scaler())}
        options["enable_checkpointing"] = True
        runner = fit(module, *callbacks, data=data, path=path, weight=weight, epochs=5, **options)
        assert updates(runner) == runner.fit_loop.epoch_loop._batches_that_stepped == 8
        return module

    saves = ModelCheckpoint(tmp_path, "{epoch}", every_n_epochs=1, save_top_k=-1)
    whole = run(None, saves)
    assert {path.name for path in tmp_path.iterdir()} == {f"epoch={epoch}.ckpt" for epoch in range(5)}
    for epoch in range(4):  # micro-batches in the window: 2, 0, 2, 0
        resumed = run(tmp_path / f"epoch={epoch}.ckpt")
        assert 0 < len(resumed.rates) <= len(whole.rates)
        assert equal(whole, resumed), epoch


def test_more_epochs_after_the_end(tmp_path):
    """The end of a training ends its last window; the next training begins one."""
    module = made()
    runner = fit(module, epochs=1)
    runner.save_checkpoint(tmp_path / "after.ckpt")
    assert updates(runner) == 3
    again = made()
    assert updates(fit(again, epochs=2, path=tmp_path / "after.ckpt")) == 6


class Manual(case.Module):
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
    watch, module = Watch(), made(Manual)
    assert updates(fit(module, watch)) == 8
    assert watch.epochs == [(2, 2), (5, 0), (8, 0)]
    assert_exact(module, DATA * 3)


class Fails(case.Module):
    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            raise KeyError("between epochs")


def test_an_exception_does_not_update():
    module = made(Fails)
    with pytest.raises(KeyError):
        fit(module)
    assert len(module.rates) == 2
    again = fit(made())
    assert updates(again) == 8
