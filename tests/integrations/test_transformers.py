"""The wrapper inside the Trainer: windows, counting, checkpoints, clipping, and what is refused."""

import copy
import re
import warnings

import case_transformers as case
import pages
import pytest
import torch
from comparison import equal
from example_scripts import printed_by
from torch import nn
from transformers import Trainer, TrainerCallback

import fusedacc
from fusedacc.integrations.transformers import AccumulationCallback

#: Of the runs below.
UPDATES = 2 * case.UPDATES_PER_EPOCH


@pytest.fixture(autouse=True)
def _two_epochs(monkeypatch):
    monkeypatch.setattr(case, "EPOCHS", 2)


def adamw(net: nn.Module, **options) -> fusedacc.AccumulatingOptimizer:
    return fusedacc.AccumulatingOptimizer(torch.optim.AdamW(net.parameters(), lr=1e-2), **options)


def inner(trainer: Trainer) -> fusedacc.AccumulatingOptimizer:
    return trainer.optimizer.optimizer


def test_ours_is_exact_where_the_trainer_is_and_where_it_is_not(monkeypatch):
    monkeypatch.setattr(case, "EPOCHS", 4)
    right, endless, means, miscounted = rows = case.compare()
    allowed = case.tolerance()
    assert all(row.updates == row.our_updates == 24 for row in rows)
    assert max(right.theirs, right.ours, endless.ours) < allowed
    assert min(endless.theirs, means.theirs, miscounted.theirs) > 10 * allowed
    # The Trainer scales the losses, and the wrapper adds what it is given.
    assert (means.ours, miscounted.ours) == (means.theirs, miscounted.theirs)
    assert endless.their_updates == 20  # the last gradients of each pass are in the next pass's first update


@pytest.mark.parametrize("make", [case.gpt2, case.llama])
@pytest.mark.parametrize("fused", [False, True], ids=["", "model="])
def test_same_as_the_trainers_own_where_that_is_right(make, fused):
    """With clipping; a plain wrapper does the same arithmetic in the same order."""
    stock, ours = make(), make()
    theirs = case.train(stock, torch.optim.AdamW(stock.parameters(), lr=1e-2), max_grad_norm=0.5)
    optimizer = adamw(ours, model=ours if fused else None)
    trainer = case.train_ours(ours, optimizer=optimizer, max_grad_norm=0.5)
    assert trainer.state.global_step == theirs.state.global_step == inner(trainer).num_updates == UPDATES
    if not fused:
        assert equal(stock, ours)
        return
    # AdamW divides tiny gradients by their own size; compare what the models say.
    batch = case.collate(case.lines())
    with torch.no_grad():
        torch.testing.assert_close(ours(**batch).loss, stock(**batch).loss, rtol=1e-4, atol=0)


class Recorder(TrainerCallback):
    """After each update: the step, the learning rate, and whether p.grad held a float32 sum before it."""

    def __init__(self):
        self.steps, self.rates, self.sums = [], [], []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.sums.append({parameter.grad.dtype for parameter in model.parameters()})

    def on_step_end(self, args, state, control, lr_scheduler, **kwargs):
        self.steps.append(state.global_step)
        self.rates.append(lr_scheduler.get_last_lr()[0])


def test_global_step_and_schedule_count_updates():
    model, recorder = case.llama(), Recorder()
    options = {"warmup_steps": 4, "logging_strategy": "steps", "logging_steps": 4}
    trainer = case.train_ours(model, callbacks=[recorder], **options)
    assert recorder.steps == list(range(1, 13))
    wanted = [min(step / 4, (12 - step) / 8) * case.LR for step in recorder.steps]
    assert recorder.rates == pytest.approx(wanted)
    assert [entry["step"] for entry in trainer.state.log_history] == [4, 8, 12, 12]
    assert inner(trainer).num_updates == trainer.lr_scheduler.last_epoch == UPDATES


def test_sums_of_bfloat16_parameters_are_float32():
    model, recorder = case.llama().to(torch.bfloat16), Recorder()
    case.train_ours(model, callbacks=[recorder], max_grad_norm=1.0, num_train_epochs=1)
    assert recorder.sums == [{torch.float32}] * case.UPDATES_PER_EPOCH


class Save(TrainerCallback):
    """Saves a checkpoint in mid-window, or of a full window before its update, as JIT checkpoints are."""

    def __init__(self, event: str, step: int):
        self.step, self.seen = step, 0
        setattr(self, event, self._save)

    def _save(self, args, state, control, **kwargs):
        self.seen += state.global_step == self.step
        if state.global_step == self.step and self.seen in (1, 2):
            self.trainer._save_checkpoint(self.trainer.model, trial=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("event", ["on_step_end", "on_substep_end", "on_pre_optimizer_step"])
def test_resume_is_bit_identical_wherever_in_a_window_the_checkpoint_was_written(tmp_path, dtype, event):
    class SavingTrainer(Trainer):
        def __init__(self, *args, callbacks, **settings):
            super().__init__(*args, callbacks=callbacks, **settings)
            for callback in callbacks:
                if isinstance(callback, Save):
                    callback.trainer = self

    def run(callbacks, resume=None):
        model = case.llama().to(dtype)
        low = dtype == torch.bfloat16
        optimizer = adamw(model, master_weights=low, model=None if low else model)
        folder = tmp_path / ("resumed" if resume else "first")
        settings = {"optimizer": optimizer, "max_grad_norm": 1.0, "trainer_class": SavingTrainer}
        return model, case.train_ours(model, callbacks, folder=folder, resume=resume, **settings)

    uninterrupted, _ = run([Save(event, 8)])
    saved = torch.load(tmp_path / "first/checkpoint-8/optimizer.pt")
    has_sums = any("fusedacc_sum" in entry for entry in saved["state"].values())
    assert has_sums == (event != "on_step_end")
    resumed, trainer = run([], tmp_path / "first/checkpoint-8")
    assert equal(resumed, uninterrupted)
    assert trainer.state.global_step == UPDATES


def test_a_loader_without_length_flushes_at_the_end_of_each_pass(tmp_path):
    recorder = Recorder()
    settings = {"data": case.Stream(), "max_steps": 12, "save_strategy": "steps", "save_steps": 6}
    model = case.llama()
    trainer = case.train_ours(model, [recorder], folder=tmp_path, max_grad_norm=0.5, **settings)
    # The 6th and 12th update are those of the partly filled windows, saved and stopped at like any other.
    assert recorder.steps == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11]
    assert trainer.state.global_step == trainer.lr_scheduler.last_epoch == inner(trainer).num_updates == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-12", "checkpoint-6"]
    known = case.llama()
    case.train_ours(known, max_grad_norm=0.5)
    assert equal(model, known)


@pytest.mark.parametrize("flag", ["should_epoch_stop", "should_training_stop"])
def test_a_window_that_is_stopped_in_the_middle_is_dropped(flag):
    class Stop(TrainerCallback):
        stopped = False

        def on_substep_end(self, args, state, control, **kwargs):
            if state.global_step == 5 and not self.stopped:
                setattr(control, flag, True)
                self.stopped = True

    stopped, known = case.llama(), case.llama()
    constant = {"lr_scheduler_type": "constant", "warmup_steps": 0}
    trainer = case.train_ours(stopped, [Stop()], num_train_epochs=2, **constant)
    assert all(parameter.grad is None for parameter in stopped.parameters())
    optimizer = case.wrapped(known)
    case.train_ours(known, optimizer=optimizer, data=case.lines()[:40], num_train_epochs=1, **constant)
    if flag == "should_epoch_stop":
        case.train_ours(known, optimizer=optimizer, num_train_epochs=1, **constant)
    assert trainer.state.global_step == optimizer.num_updates
    assert equal(stopped, known)


def test_loss_scale_of_a_flushed_window():
    class Scaled(Trainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)

    plain, scaled = case.llama(), case.llama()
    settings = {"data": case.Stream(), "max_steps": 12}
    case.train_ours(plain, **settings)
    trainer = case.train_ours(scaled, trainer_class=Scaled, **settings)
    assert trainer.accelerator.scaler.get_scale() == 1024.0 * 2**3  # doubled every fourth update
    assert equal(plain, scaled)  # powers of two change no bit


@pytest.mark.parametrize("trainers", [1, 4])
def test_a_counted_wrapper_is_refused(trainers):
    model = case.llama()
    before = copy.deepcopy(model)
    optimizer = case.wrapped(model, gradient_accumulation_steps=4)
    wanted = (
        f"gradient_accumulation_steps=4 and TrainingArguments have gradient_accumulation_steps={trainers}"
    )
    with pytest.raises(ValueError, match=rf"{wanted}.*Allowed: None"):
        case.train_ours(model, optimizer=optimizer, gradient_accumulation_steps=trainers)
    assert equal(model, before)
    assert "initial_lr" not in optimizer.param_groups[0]  # no scheduler has touched it yet


def test_other_optimizers_and_reductions_are_refused():
    model = case.llama()
    with pytest.raises(ValueError, match=r"reduction='weighted'.*allowed: 'sum'"):
        case.train_ours(model, optimizer=case.wrapped(model, reduction="weighted"))
    with pytest.raises(TypeError, match=r"is a SGD; allowed: a fusedacc\.AccumulatingOptimizer"):
        case.train_ours(model, optimizer=case.stock(model))
    with pytest.raises(TypeError, match="is a AdamW; allowed"):  # which the Trainer makes for train()
        case.train(model, None, callbacks=[AccumulationCallback()])


def test_a_model_whose_tokens_the_trainer_miscounts_is_warned_of():
    model = case.unknown_loss()
    with pytest.warns(UserWarning, match=r"GPT2LMHeadModel\.loss_type is None.*Set model\.loss_type"):
        trainer = case.train_ours(model, num_train_epochs=1)
    batch = case.collate(case.lines()[:8])
    targets = int(batch["labels"][:, 1:].ne(-100).sum())
    assert trainer._get_num_items_in_batch([batch], "cpu") == targets + 8
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer = case.train_ours(case.gpt2(), num_train_epochs=1)
    assert trainer._get_num_items_in_batch([batch], "cpu") == targets


def test_example_learns_text():
    printed = printed_by("transformers_text.py")
    updates, before, after = re.search(r"(\d+) updates, loss ([\d.]+) -> ([\d.]+)", printed).groups()
    assert int(updates) == 3 * 19
    assert float(after) < float(before) - 0.5


def test_the_page_runs(tmp_path):
    """43 lines, 8 to a micro-batch and 8 micro-batches to a window, make one window in each epoch."""
    given = {"model": case.llama(), "data": case.lines(), "collator": case.collate, "folder": str(tmp_path)}
    found = pages.run("transformers", torch=torch, **given)
    assert found["trainer"].state.global_step == found["optimizer"].num_updates == 3
