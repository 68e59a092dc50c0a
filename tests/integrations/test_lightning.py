"""Lightning's Trainer with an optimizer that accumulates: the same updates as from each whole batch."""

from __future__ import annotations

import contextlib
import csv
import re
from pathlib import Path

import case_lightning as case
import lightning.pytorch as lightning
import pytest
import torch
from bigrams import tolerance
from comparison import difference, equal, snapshot
from example_scripts import output_of
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.tuner import Tuner
from rank_scripts import run_on_two_ranks
from torch.utils.data import DataLoader, IterableDataset

import fusedacc
from fusedacc.integrations.lightning import AccumulationCallback

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

    def test_lightning_is_exact_where_all_windows_are_full(self, rows):
        row = rows["full windows"]
        assert row.theirs < tolerance(row.updates, 40)

    def test_lightning_divides_a_part_filled_window_by_k(self, rows):
        row = rows["part-filled last window"]
        assert row.their_updates == row.updates
        assert row.theirs > 0.1

    def test_lightning_takes_the_mean_of_means(self, rows):
        assert rows["token-weighted loss, ragged lengths"].theirs > 0.1

    def test_each_update_is_clipped_once(self):
        data = case.batches([6] * 10)
        ours, _ = case.fit_ours(data, 8, max_grad_norm=0.1)
        exact = case.reference(data, 8, max_norm=0.1)
        start = snapshot(case.network())
        assert difference(snapshot(ours), snapshot(exact), start) < tolerance(24, 40)
        assert difference(snapshot(case.reference(data, 8)), snapshot(exact), start) > 0.1


class Watch(lightning.Callback):
    """What else is called, and when: (batch, global_step)."""

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
        watch, module = Cleared(), CountsClearing(case.network(), steps=steps)
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
        found.append(
            (module.net, watch.average.module, *(each._average_model.module.net for each in averages))
        )
    start = snapshot(case.network())
    for theirs, ours in zip(*found, strict=True):
        assert difference(snapshot(ours), snapshot(theirs), start) < tolerance(4, 40)


def test_a_batch_without_a_loss_clears_nothing_twice():
    class Sometimes(CountsClearing):
        def training_step(self, batch, batch_idx):
            return None if batch_idx in (0, 5) else super().training_step(batch, batch_idx)

    module = Sometimes(case.network(), steps=4)
    runner = case.trainer(1, callbacks=[AccumulationCallback()])
    runner.fit(module, case.loader(case.batches([6] * 10)))
    assert module.cleared == runner.global_step == 2


@pytest.mark.parametrize("steps", [None, 4])
@pytest.mark.parametrize("scheduled", [True, False])
def test_learning_rates_are_logged_once(tmp_path, scheduled, steps):
    class Maybe(case.Module):
        def configure_optimizers(self):
            optimizers, schedulers = super().configure_optimizers()
            if steps is None:  # a manual loop inside the Trainer's own accumulation
                optimizers = [fusedacc.AccumulatingOptimizer(optimizers[0])]
                schedulers[0]["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.98)
            return optimizers, schedulers if scheduled else []

    options = {"accumulate_grad_batches": 4} if steps is None else {}
    callbacks = [AccumulationCallback()] if steps else []
    monitor = LearningRateMonitor("step", log_momentum=True)
    module = Maybe(case.network(), steps=steps)
    runner = case.trainer(
        1, logger=CSVLogger(tmp_path), log_every_n_steps=1, callbacks=[monitor, *callbacks], **options
    )
    runner.fit(module, case.loader(case.batches([6] * 12)))
    assert list(monitor.lrs) == ["lr-AccumulatingOptimizer"]
    # At each batch, as for an optimizer that is not wrapped; Lightning logs where a step of loggers begins.
    rates = sorted(set(monitor.lrs["lr-AccumulatingOptimizer"]), reverse=True)
    assert rates == pytest.approx([0.2 * 0.98**i for i in range(3)] if scheduled else [0.2])
    assert monitor.last_momentum_values == {"lr-AccumulatingOptimizer-momentum": 0.5}
    assert isinstance(runner.optimizers[0].optimizer, torch.optim.SGD)


class WithValidation(case.Module):
    def validation_step(self, batch, batch_idx):
        pass


def test_everything_counts_updates(tmp_path):
    data = case.loader(case.batches([6] * 10))
    watch = Watch()
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    module = WithValidation(case.network(), steps=4)
    options = {"enable_checkpointing": True, "num_sanity_val_steps": 0}
    runner = case.trainer(2, callbacks=[AccumulationCallback(), watch, saves], **options)
    runner.fit(module, data, data)
    assert runner.global_step == runner.optimizers[0].num_updates == 6
    assert module.rates == pytest.approx([0.2 * 0.98**i for i in range(6)])
    assert runner.lr_scheduler_configs[0].scheduler.last_epoch == 6
    assert watch.before_steps == [3, 7, 9, 13, 17, 19]
    # An epoch is validated with its last, part-filled window in the parameters.
    assert watch.validations == [(3, 3, 0), (6, 6, 0)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]


@pytest.mark.parametrize("steps", [None, 4])
def test_loggers_get_a_row_for_each_update(tmp_path, steps):
    class Logs(case.Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    options = {"accumulate_grad_batches": 4} if steps is None else {"callbacks": [AccumulationCallback()]}
    logger = CSVLogger(tmp_path)
    runner = case.trainer(2, logger=logger, log_every_n_steps=1, **options)
    runner.fit(Logs(case.network(), steps=steps), case.loader(case.batches([6] * 10)))
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        assert [row["step"] for row in csv.DictReader(file)] == list("012345")


def test_max_steps_are_updates():
    runner = case.trainer(-1, max_steps=5, callbacks=[AccumulationCallback()])
    runner.fit(case.Module(case.network(), steps=4), case.loader(case.batches([6] * 10)))
    assert runner.global_step == runner.optimizers[0].num_updates == 5
    assert runner.fit_loop.epoch_loop.total_batch_idx == 17


def test_a_scheduler_of_epochs_steps_after_the_last_update_of_each():
    class ByEpoch(case.Module):
        def configure_optimizers(self):
            optimizers, (config,) = super().configure_optimizers()
            return optimizers, [config | {"interval": "epoch"}]

    module = ByEpoch(case.network(), steps=4)
    case.trainer(2, callbacks=[AccumulationCallback()]).fit(module, case.loader(case.batches([6] * 10)))
    assert module.rates == pytest.approx([0.2] * 3 + [0.2 * 0.98] * 3)


class StopsAfterSix(lightning.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = batch_idx == 5


def test_a_plateau_scheduler_of_steps_steps_on_updates():
    class Plateau(case.Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            (optimizer,), _ = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            config = {"scheduler": scheduler, "interval": "step", "monitor": "loss"}
            return [optimizer], [config]

    module = Plateau(case.network(), steps=4)
    runner = case.trainer(2, callbacks=[AccumulationCallback()])
    runner.fit(module, case.loader(case.batches([6] * 10)))
    assert runner.lr_scheduler_configs[0].scheduler.last_epoch == runner.global_step == 6


@pytest.mark.parametrize("interval", [1, 3, 5])
def test_validation_in_mid_window_changes_nothing(interval):
    data = case.batches([6] * 10)
    module = WithValidation(case.network(), steps=4)
    options = {"val_check_interval": interval, "num_sanity_val_steps": 0}
    case.trainer(8, callbacks=[AccumulationCallback()], **options).fit(module, *[case.loader(data)] * 2)
    exact = case.reference(data, 8)
    assert difference(snapshot(module.net), snapshot(exact), snapshot(case.network())) < tolerance(24, 40)


class Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


def test_an_epoch_of_unknown_length_flushes():
    data = case.batches([6] * 10)
    module = case.Module(case.network(), steps=4)
    runner = case.trainer(8, callbacks=[AccumulationCallback()])
    runner.fit(module, DataLoader(Stream(data), batch_size=None))
    assert runner.global_step == 24
    exact = case.reference(data, 8)
    assert difference(snapshot(module.net), snapshot(exact), snapshot(case.network())) < tolerance(24, 40)


def test_gradients_that_are_never_written():
    class Inside(case.Module):
        def configure_optimizers(self):
            self.options = {"model": self.net}
            return super().configure_optimizers()

    data = case.batches([6] * 10)
    module = Inside(case.network(), steps=4)
    case.trainer(8, callbacks=[AccumulationCallback()]).fit(module, case.loader(data))
    exact = case.reference(data, 8)
    assert difference(snapshot(module.net), snapshot(exact), snapshot(case.network())) < tolerance(24, 40)


def test_a_schedule_of_steps():
    """Windows of 1, 2, 3 and then 4 micro-batches, over epochs of 10."""
    module = case.Module(case.network(), steps=lambda updates: min(updates + 1, 4))
    runner = case.trainer(2, callbacks=[AccumulationCallback(), watch := Watch()])
    runner.fit(module, case.loader(case.batches([6] * 10)))
    assert watch.before_steps == [0, 2, 5, 9, 13, 17, 19]
    assert runner.global_step == len(module.rates) == 7


def test_an_epoch_that_is_stopped_early_flushes():
    data = case.batches([6] * 10)
    module = case.Module(case.network(), steps=4)
    runner = case.trainer(1, callbacks=[AccumulationCallback(), StopsAfterSix()], min_epochs=0)
    runner.fit(module, case.loader(data))
    assert runner.global_step == runner.optimizers[0].num_updates == 2
    assert runner.lr_scheduler_configs[0].scheduler.last_epoch == 2
    exact = case.reference(data[:6], 1)
    assert difference(snapshot(module.net), snapshot(exact), snapshot(case.network())) < tolerance(2, 40)


def test_an_epoch_whose_rest_the_module_skips_flushes():
    class Skips(case.Module):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 6 else None

    module = Skips(case.network(), steps=4)
    runner = case.trainer(1, callbacks=[AccumulationCallback()])
    runner.fit(module, case.loader(case.batches([6] * 10)))
    assert runner.global_step == runner.optimizers[0].num_updates == 2
    assert runner.lr_scheduler_configs[0].scheduler.last_epoch == 2


@pytest.mark.parametrize("skipped", [1, 3, 9])
def test_a_training_step_without_a_loss_does_not_count(skipped):
    class Sometimes(case.Module):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == skipped else super().training_step(batch, batch_idx)

    data = case.batches([6] * 10)
    module = Sometimes(case.network(), steps=4)
    runner = case.trainer(2, callbacks=[AccumulationCallback()])
    runner.fit(module, case.loader(data))
    del data[skipped]
    assert runner.global_step == runner.optimizers[0].num_updates == 6
    assert runner.lr_scheduler_configs[0].scheduler.last_epoch == 6
    exact = case.reference(data, 2)
    assert difference(snapshot(module.net), snapshot(exact), snapshot(case.network())) < tolerance(6, 40)


def scaled() -> MixedPrecision:
    """float16 by a scaler whose first updates overflow, and which grows again."""
    return MixedPrecision("16-mixed", "cpu", scaler())


def scaler() -> fusedacc.amp.GradScaler:
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


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-mixed"])
@pytest.mark.parametrize("batch", [1, 15, 17, 19])
@pytest.mark.parametrize("reduction", ["mean", "weighted"])
def test_resume_is_bit_identical(tmp_path, precision, batch, reduction):
    """In the first window, in mid-window of the second epoch, after an update, after the flush."""
    data = case.batches([3, 7, 5, 9, 2, 6, 4, 8, 3, 5])
    weight = case.tokens if reduction == "weighted" else None

    def run(callbacks=(), path=None):
        module = case.Module(case.network(), torch.optim.AdamW, steps=4, reduction=reduction)
        options = {"plugins": scaled()} if precision == "16-mixed" else {"precision": precision}
        runner = case.trainer(3, callbacks=[AccumulationCallback(weight), *callbacks], **options)
        runner.fit(module, Resumable(data, batch_size=None), ckpt_path=path)
        assert runner.global_step == runner.optimizers[0].num_updates == 9
        assert runner.lr_scheduler_configs[0].scheduler.last_epoch == 9
        assert runner.fit_loop.epoch_loop._batches_that_stepped == 9  # the step of loggers
        return module

    whole = run([SavesAt(batch, tmp_path / "saved.ckpt")])
    resumed = run(path=tmp_path / "saved.ckpt")
    assert 0 < len(resumed.rates) <= len(whole.rates)
    assert equal(whole, resumed)


def test_bf16_parameters_have_float32_sums():
    """Against the exact sum of bfloat16 gradients: sums in bfloat16 would be 2^16 times as far off."""
    seen = []

    class Sums(lightning.Callback):
        def on_after_backward(self, trainer, pl_module):
            seen.append({slot.accumulate_dtype for slot in trainer.optimizers[0]._slots})

    runner = case.trainer(1, precision="bf16-true", callbacks=[AccumulationCallback(), Sums()])
    runner.fit(case.Module(case.network(), steps=4), case.loader(case.batches([6] * 4)))
    assert seen == [{torch.float32}] * 4


def test_a_scaler_of_ours_goes_with_16_mixed():
    """Against the loop written by hand: the same bits."""
    data = case.batches([6] * 10)
    plugin = scaled()
    module = case.Module(case.network(), steps=4, max_grad_norm=0.1)
    runner = case.trainer(3, plugins=plugin, callbacks=[AccumulationCallback()])
    runner.fit(module, case.loader(data))

    net = case.network()
    optimizer = fusedacc.AccumulatingOptimizer(case.sgd(net.parameters()), 4, max_grad_norm=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    own = scaler()
    for _ in range(3):
        for i, batch in enumerate(data):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = case.loss_of(net, batch)
            own.scale(loss).backward()
            own.step(optimizer)
            updated = optimizer.has_updated
            own.update()
            if i == 9:
                own.flush(optimizer)
                updated = optimizer.has_updated
                own.update()
            if updated:
                scheduler.step()
    assert equal(module.net, net)
    assert runner.global_step == optimizer.num_updates == 9
    assert plugin.scaler.get_scale() == own.get_scale() != 2.0**20


class Manual(case.Module):
    """The same training by hand; `step()` on every micro-batch."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(case.loss_of(self.net, batch))
        optimizer.step()

    def on_train_batch_end(self, *_):
        if self.optimizers().has_updated:
            self.lr_schedulers().step()


def test_manual_optimization():
    data = case.batches([6] * 10)
    module = Manual(case.network(), steps=4)
    module.automatic_optimization = False
    runner = case.trainer(8, callbacks=[AccumulationCallback()])
    runner.fit(module, case.loader(data))
    assert runner.global_step == runner.optimizers[0].num_updates == 24
    assert module.rates == pytest.approx([0.2 * 0.98**i for i in range(24)])
    exact = case.reference(data, 8)
    assert difference(snapshot(module.net), snapshot(exact), snapshot(case.network())) < tolerance(24, 40)


def test_manual_optimization_of_two_with_windows_of_their_own():
    class Two(case.Module):
        def __init__(self):
            super().__init__(case.network())
            self.automatic_optimization = False

        def configure_optimizers(self):
            embedding, linear = (case.sgd(part.parameters()) for part in self.net)
            return fusedacc.AccumulatingOptimizer(embedding, 4), fusedacc.AccumulatingOptimizer(linear, 2)

        def training_step(self, batch, batch_idx):
            self.manual_backward(case.loss_of(self.net, batch))
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

    module = Two()
    runner = case.trainer(2, callbacks=[AccumulationCallback()])
    data = case.batches([6] * 9)
    runner.fit(module, case.loader(data))
    assert [optimizer.num_updates for optimizer in runner.optimizers] == [6, 10]
    assert runner.global_step == 16

    net = case.network()
    optimizers = [case.sgd(part.parameters()) for part in net]
    for _ in range(2):
        held = [[], []]
        for i, batch in enumerate(data):
            gradients = torch.autograd.grad(case.loss_of(net, batch), list(net.parameters()))
            held[0].append(gradients[:1])
            held[1].append(gradients[1:])
            for part, steps, optimizer, seen in zip(net, (4, 2), optimizers, held, strict=True):
                if len(seen) == steps or i == 8:
                    for parameter, *each in zip(part.parameters(), *seen, strict=True):
                        parameter.grad = sum(each) / len(each)
                    optimizer.step()
                    seen.clear()
    assert difference(snapshot(module.net), snapshot(net), snapshot(case.network())) < tolerance(10, 40)


def test_a_manual_loop_wrapper_runs_under_the_trainers_own_accumulation():
    """As stock does, wrong last window included: the Trainer divides the loss."""
    data = case.batches([6] * 10)
    theirs, _ = case.fit_theirs(data, 2)

    class Wrapped(case.Module):
        def configure_optimizers(self):
            optimizer = fusedacc.AccumulatingOptimizer(self.make(self.net.parameters()))
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    module = Wrapped(case.network())
    case.trainer(2, accumulate_grad_batches=4).fit(module, case.loader(data))
    assert equal(module.net, theirs)


REFUSED = {
    "accumulates": ({"accumulate_grad_batches": 2}, r"accumulate_grad_batches=2\).*allowed: 1"),
    "clips": ({"gradient_clip_val": 0.5}, r"gradient_clip_val=0\.5.*max_grad_norm="),
    "scales": (
        {"plugins": lambda: MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))},
        r"fusedacc\.amp\.GradScaler",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_compound_is_refused(name):
    options, message = REFUSED[name]
    options = {key: value() if callable(value) else value for key, value in options.items()}
    net = case.network()
    before = snapshot(net)
    runner = case.trainer(1, callbacks=[AccumulationCallback()], **options)
    with pytest.raises(ValueError, match=message):
        runner.fit(case.Module(net, steps=4), case.loader(case.batches([6] * 4)))
    assert all(map(torch.equal, before, snapshot(net)))


class Accumulates(SingleDeviceStrategy):
    handles_gradient_accumulation = True


@pytest.mark.parametrize("processes", [1, 2])
def test_other_strategies_are_refused(monkeypatch, processes):
    strategy = Accumulates() if processes == 1 else SingleDeviceStrategy()
    runner = case.trainer(1, callbacks=[AccumulationCallback()], strategy=strategy)
    monkeypatch.setattr(lightning.Trainer, "world_size", processes)
    with pytest.raises(ValueError, match=rf"with {processes} processes.*allowed: one process"):
        runner.fit(case.Module(case.network(), steps=4), case.loader(case.batches([6] * 4)))


def test_two_ranks_train_as_one_by_the_trainer_and_by_fabric():
    run_on_two_ranks("rank_lightning")


def test_a_gradient_accumulation_scheduler_is_refused():
    callbacks = [AccumulationCallback(), GradientAccumulationScheduler({3: 2})]
    with pytest.raises(ValueError, match=r"GradientAccumulationScheduler.*pass a callable"):
        case.trainer(1, callbacks=callbacks).fit(
            case.Module(case.network(), steps=4), case.loader(case.batches([6] * 4))
        )


@pytest.mark.parametrize(
    ("steps", "error", "message"),
    [(None, TypeError, "returned a SGD.*fusedacc.AccumulatingOptimizer"), (0, ValueError, "that counts")],
)
def test_an_optimizer_that_does_not_count_is_refused(steps, error, message):
    class NotCounting(case.Module):
        def configure_optimizers(self):
            inner = self.make(self.net.parameters())
            return inner if steps is None else fusedacc.AccumulatingOptimizer(inner)

    with pytest.raises(error, match=message):
        case.trainer(1, callbacks=[AccumulationCallback()]).fit(
            NotCounting(case.network()), case.loader(case.batches([6] * 4))
        )


def test_a_module_can_be_fitted_again_after_an_exception_and_after_a_fit(tmp_path):
    class Fails(case.Module):
        fails = True

        def training_step(self, batch, batch_idx):
            if self.fails and batch_idx == 5:
                raise KeyError("in mid-window")
            return super().training_step(batch, batch_idx)

    data = case.loader(case.batches([6] * 10))
    module = Fails(case.network(), steps=4)
    first = case.trainer(1, callbacks=[AccumulationCallback()])
    with contextlib.suppress(KeyError):
        first.fit(module, data)
    module.fails = False
    second = case.trainer(1, callbacks=[AccumulationCallback()])
    second.fit(module, data)
    assert second.global_step == 3
    second.save_checkpoint(tmp_path / "after.ckpt")
    second.fit_loop.max_epochs = 2
    second.fit(module, data)
    assert second.global_step == 6

    # Nothing of ours is left on the module.
    case.loss_of(module.net, case.batches([6])[0]).backward()
    assert all(parameter.grad is not None for parameter in module.net.parameters())

    third = case.trainer(2, callbacks=[AccumulationCallback()])
    third.fit(module, data, ckpt_path=tmp_path / "after.ckpt")
    assert third.global_step == 6


def test_a_fit_after_the_tuner(tmp_path):
    data = case.batches([6] * 10)
    module = case.Module(case.network(), steps=4)
    runner = case.trainer(8, callbacks=[AccumulationCallback()], default_root_dir=tmp_path)
    Tuner(runner).lr_find(module, case.loader(data), num_training=10, update_attr=False)
    module.rates.clear()
    runner.fit(module, case.loader(data))
    assert runner.global_step == 24
    exact = case.reference(data, 8)
    assert difference(snapshot(module.net), snapshot(exact), snapshot(case.network())) < tolerance(24, 40)


def test_the_example():
    printed = output_of("lightning_digits.py")
    updates, accuracy = re.search(r"(\d+) updates, accuracy .*: ([\d.]+)%", printed).groups()
    assert int(updates) == 20 * 24  # 47 micro-batches are 23 windows of two, and one of one
    assert float(accuracy) > 85
