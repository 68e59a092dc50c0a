"""The wrapper in Accelerate's loop: windows, schedulers, checkpoints, loss scaling, and what is refused."""

import copy

import case_accelerate as case
import pages
import pytest
import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType, GradientAccumulationPlugin
from comparison import equal
from example_scripts import assert_learns_digits
from rank_scripts import run_on_two_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fusedacc
from fusedacc.integrations.accelerate import CountedOptimizer, prepare

pytestmark = pytest.mark.usefixtures("accelerator_state")


def counted(model: nn.Module, steps=4, make=torch.optim.SGD, **options) -> fusedacc.AccumulatingOptimizer:
    return fusedacc.AccumulatingOptimizer(make(model.parameters(), lr=0.05), steps, **options)


def test_ours_is_exact_where_accelerate_divides_the_last_window_by_k_and_takes_means_of_means():
    for row, kind in zip(case.compare(), (case.Digits(), case.Text()), strict=True):
        allowed = case.tolerance(kind)
        assert row.ours < allowed, row
        assert row.theirs > 50 * allowed, row
        assert row.updates == row.our_updates == row.their_updates == 24, row


def test_scheduler_counts_updates():
    accelerator, kind = Accelerator(cpu=True), case.Digits()
    model = kind.model()
    optimizer = counted(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, kind.loader(), scheduler)
    assert isinstance(optimizer, CountedOptimizer)
    assert isinstance(scheduler, AcceleratedScheduler)
    updated = []
    for batch in loader:
        accelerator.backward(kind.loss(model, batch))
        optimizer.step(), scheduler.step(), optimizer.zero_grad()
        updated.append(not accelerator.optimizer_step_was_skipped)
        assert scheduler.get_last_lr() == [0.05 * 0.5 ** sum(updated)]
    assert updated == [False, False, False, True] * 5 + [False, True]
    assert optimizer.num_updates == optimizer.optimizer.num_updates == 6
    assert optimizer.micro_step == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_save_state_in_mid_window_resumes_to_the_same_bits(tmp_path, dtype, weighted):
    kind = case.Text() if weighted else case.Digits()

    def begin():
        accelerator = Accelerator(cpu=True)
        model = kind.model().to(dtype)
        optimizer = counted(model, make=torch.optim.AdamW, reduction=kind.reduction, max_grad_norm=0.5)
        scheduler = case.halving(optimizer)
        return accelerator, *prepare(accelerator, model, optimizer, kind.loader(), scheduler)

    def train(accelerator, model, optimizer, loader, scheduler, save_after=None):
        for number, batch in enumerate(loader, 1):
            batch = [part.to(dtype) if part.is_floating_point() else part for part in batch]
            with optimizer.accumulate(model, kind.weight(batch) if weighted else None):
                accelerator.backward(kind.loss(model, batch))
            optimizer.step(), scheduler.step(), optimizer.zero_grad()
            if number == save_after:
                assert optimizer.micro_step == save_after % 4
                accelerator.save_state(tmp_path)
        return model, scheduler.get_last_lr(), optimizer.num_updates

    uninterrupted = train(*begin(), save_after=6)
    accelerator, model, optimizer, loader, scheduler = begin()
    accelerator.load_state(tmp_path)
    assert (optimizer.micro_step, optimizer.num_updates) == (2, 1)
    resumed = train(accelerator, model, optimizer, accelerator.skip_first_batches(loader, 6), scheduler)
    assert equal(resumed[0], uninterrupted[0])
    assert resumed[1:] == uninterrupted[1:]


def test_prepare_refuses_accelerates_own_accumulation():
    accelerator, kind = Accelerator(cpu=True, gradient_accumulation_steps=4), case.Digits()
    model = kind.model()
    with pytest.raises(RuntimeError, match=r"gradient_accumulation_steps=4.*Allowed: 1"):
        prepare(accelerator, model, counted(model))
    assert accelerator._models == accelerator._optimizers == []


@pytest.mark.parametrize("act", ["step", "flush", "accumulate"])
def test_accumulation_that_is_switched_on_later_is_refused(act):
    accelerator, kind = Accelerator(cpu=True), case.Digits()
    model = kind.model()
    model, optimizer, loader = prepare(accelerator, model, counted(model), kind.loader())
    accelerator.backward(kind.loss(model, next(iter(loader))))
    accelerator.gradient_accumulation_steps = 4
    before, state = copy.deepcopy(model), optimizer.state_dict()["fusedacc"]
    with pytest.raises(RuntimeError, match="gradient_accumulation_steps=4"):
        getattr(optimizer, act)()
    assert equal(model, before)
    assert optimizer.state_dict()["fusedacc"] == state


def test_clipping_by_the_accelerator_does_nothing_in_mid_window_and_what_max_grad_norm_does_at_its_end():
    def train(max_grad_norm=None):
        accelerator, kind, norms = Accelerator(cpu=True), case.Digits(), []
        model = kind.model()
        model, optimizer, loader = prepare(
            accelerator, model, counted(model, max_grad_norm=max_grad_norm), kind.loader()
        )
        for batch, _ in zip(loader, range(8), strict=False):
            accelerator.backward(kind.loss(model, batch))
            if max_grad_norm is None:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.1).item())
            optimizer.step(), optimizer.zero_grad()
        return model, norms, optimizer

    model, norms, _ = train()
    wanted, _, optimizer = train(max_grad_norm=0.1)
    assert [norm == 0 for norm in norms] == [True, True, True, False] * 2
    assert norms[-1] > 0.1
    assert norms[-1] == pytest.approx(optimizer.grad_norm.item(), rel=1e-5)
    torch.testing.assert_close([*model.parameters()], [*wanted.parameters()])


@pytest.mark.parametrize("prepared", [False, True])
def test_flush_ends_a_window_that_the_loader_does_not(prepared):
    plugin = GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False)
    accelerator, kind = Accelerator(cpu=True, gradient_accumulation_plugin=plugin), case.Digits()
    model = kind.model()
    optimizer = counted(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler = prepare(accelerator, model, optimizer, scheduler)
    loader = accelerator.prepare(kind.loader()) if prepared else kind.loader()
    for batch in loader:
        accelerator.backward(kind.loss(model, batch))
        optimizer.step(), scheduler.step(), optimizer.zero_grad()
    assert (optimizer.num_updates, optimizer.micro_step) == (5, 2)
    for updates in (6, 6):  # the second flush finds nothing, and the scheduler stays
        optimizer.flush()
        scheduler.step()
        assert optimizer.num_updates == scheduler.scheduler.last_epoch == updates


@pytest.fixture
def scaled():
    """An accelerator with a loss scaler, as mixed_precision="fp16" makes one on a GPU."""
    accelerator, kind = Accelerator(cpu=True), case.Digits()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    model = kind.model()
    optimizer = counted(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    return accelerator, *prepare(accelerator, model, optimizer, kind.loader(), scheduler), kind


def test_loss_scale_changes_between_windows_only(scaled):
    accelerator, model, optimizer, loader, scheduler, kind = scaled
    plain = kind.model()
    reference = counted(plain)
    scales = []
    for batch in loader:
        accelerator.backward(kind.loss(model, batch))
        kind.loss(plain, batch).backward()
        for each in (optimizer, reference):
            each.step(), each.zero_grad()
        scheduler.step()
        scales.append(accelerator.scaler.get_scale())
    reference.flush()
    assert scales == [1024.0] * 11 + [2048.0] * 10 + [4096.0]  # it grows every third update
    assert optimizer.num_updates == scheduler.scheduler.last_epoch == 6
    assert equal(model, plain)  # powers of two change no bit


def test_scheduler_waits_when_an_update_overflows(scaled):
    accelerator, model, optimizer, loader, scheduler, kind = scaled
    before = copy.deepcopy(model)
    for number, batch in enumerate(loader):
        if number == 4:
            break
        loss = kind.loss(model, batch) * (float("inf") if number == 1 else 1.0)
        accelerator.backward(loss)
        optimizer.step(), scheduler.step(), optimizer.zero_grad()
    assert equal(model, before)
    assert (optimizer.num_updates, optimizer.num_skipped, scheduler.scheduler.last_epoch) == (1, 1, 0)
    assert accelerator.optimizer_step_was_skipped
    assert accelerator.scaler.get_scale() == 512.0


def test_a_copy_goes_on_by_itself(scaled):
    accelerator, model, optimizer, loader, _, kind = scaled
    batches = [batch for batch, _ in zip(loader, range(4), strict=False)]
    for batch in batches[:2]:
        accelerator.backward(kind.loss(model, batch))
        optimizer.step()
    twin, other = copy.deepcopy((model, optimizer))
    assert isinstance(other, CountedOptimizer)
    assert (other.micro_step, other.scaler.get_scale()) == (2, 1024.0)
    for trained, by in ((model, optimizer), (twin, other)):
        for batch in batches[2:]:
            by.scaler.scale(kind.loss(trained, batch)).backward()
            by.step()
    assert optimizer.num_updates == other.num_updates == 1
    assert equal(model, twin)


def test_a_scaler_of_another_kind_is_refused():
    class Sharded(torch.amp.GradScaler):
        pass

    accelerator, kind = Accelerator(cpu=True), case.Digits()
    accelerator.scaler = Sharded("cpu")
    model = kind.model()
    with pytest.raises(RuntimeError, match=r"Sharded; allowed: torch\.amp\.GradScaler"):
        prepare(accelerator, model, counted(model))
    assert accelerator._models == []


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "FSDP", "XLA"])
def test_what_steps_optimizers_otherwise_is_refused(kind):
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType(kind)
    model = case.Digits().model()
    with pytest.raises(RuntimeError, match=f"{kind}.*allowed: one process, or DistributedDataParallel"):
        prepare(accelerator, model, counted(model))
    assert accelerator._models == []


def test_two_ranks_train_as_one_by_accelerate_and_by_the_trainer():
    run_on_two_ranks("rank_accelerate")


def test_the_page_runs():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(40, 4), torch.zeros(40, 2))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "criterion": nn.MSELoss()}
    found = pages.run("accelerate", loader=DataLoader(data, batch_size=4), **given)
    assert found["optimizer"].num_updates == found["scheduler"].scheduler.last_epoch == 2


def test_the_example_learns_digits():
    assert_learns_digits("accelerate_digits.py", 20)
