"""One of two ranks: Accelerate's loop and the Trainer with the wrapper, and their references."""

import os

os.environ["ACCELERATE_USE_CPU"] = "true"

import case_accelerate
import case_transformers
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from comparison import equal
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fusedacc
from fusedacc.integrations.accelerate import prepare

STEPS, EPOCHS = 4, 2
case_transformers.EPOCHS = EPOCHS


def exact(case: case_accelerate.Case) -> torch.nn.Module:
    """22 micro-batches are 11 on each rank: windows of four, four and three of each, in float64."""
    reference = case.model().double()
    plain = case_accelerate.stock(reference)
    batches = list(case.loader()) * EPOCHS
    for start in range(0, len(batches), 22):
        for at in range(start, start + 22, 2 * STEPS):
            window = batches[at : min(at + 2 * STEPS, start + 22)]
            case_accelerate.exact_update(case, reference, plain, window)
    return reference


def counted_loops() -> None:
    for case in (case_accelerate.Digits(), case_accelerate.Text()):
        reference = exact(case)
        for options in ({}, {"model": True}, {"late": True}):
            accelerator = Accelerator(cpu=True)
            model = case.model()
            optimizer = fusedacc.AccumulatingOptimizer(
                case_accelerate.stock(model),
                STEPS,
                reduction=case.reduction,
                model=model if "model" in options else None,
            )
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
            if "late" in options:  # the optimizer was prepared before
                optimizer, loader, scheduler = prepare(accelerator, optimizer, case.loader(), scheduler)
                model = prepare(accelerator, model)
            else:
                prepared = prepare(accelerator, model, optimizer, case.loader(), scheduler)
                model, optimizer, loader, scheduler = prepared
            assert isinstance(model, DistributedDataParallel)
            assert not model.require_backward_grad_sync, "the wrapper reduces"
            case_accelerate.train(case, accelerator, model, optimizer, loader, scheduler, EPOCHS)
            assert not model.reducer.get_backward_stats(), "the wrapper has reduced"
            assert optimizer.num_updates == 3 * EPOCHS
            assert scheduler.scheduler.last_epoch == 2 * 3 * EPOCHS  # as Accelerate does: once per process
            for parameter, wanted in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(parameter.double(), wanted, rtol=1e-4, atol=1e-6)
            optimizer.close()
            assert model.require_backward_grad_sync
            accelerator.free_memory()


def manual_loop() -> None:
    """Accelerate's own accumulation, which calls `no_sync()`: the bits of stock."""
    wraps = (lambda optimizer: optimizer, fusedacc.AccumulatingOptimizer)
    stock, ours = (case_accelerate.manual(case_accelerate.Digits(), wrap, EPOCHS) for wrap in wraps)
    assert stock.require_backward_grad_sync
    assert not ours.require_backward_grad_sync
    assert equal(stock, ours)


def two_optimizers() -> None:
    """Both are attached to one DistributedDataParallel, which the last gives back."""
    case, accelerator = case_accelerate.Digits(), Accelerator(cpu=True)
    model = case.model()
    both = [
        fusedacc.AccumulatingOptimizer(torch.optim.SGD(each.parameters(), case_accelerate.LR, 0.9), STEPS)
        for each in (model[0], model[2])
    ]
    model, first, second, loader = prepare(accelerator, model, *both, case.loader())
    for _ in range(EPOCHS):
        for batch in loader:
            accelerator.backward(case.loss(model, batch))
            for optimizer in (first, second):
                optimizer.step(), optimizer.zero_grad()
    for parameter, wanted in zip(model.parameters(), exact(case).parameters(), strict=True):
        torch.testing.assert_close(parameter.double(), wanted, rtol=1e-4, atol=1e-6)
    first.close()
    assert not model.require_backward_grad_sync
    second.close()
    assert model.require_backward_grad_sync


def refusals() -> None:
    case, accelerator = case_accelerate.Digits(), Accelerator(cpu=True)
    model = case.model()
    optimizer = fusedacc.AccumulatingOptimizer(case_accelerate.stock(model), STEPS)
    model, optimizer, loader = prepare(accelerator, model, optimizer, case.loader())
    accelerator.backward(case.loss(model, next(iter(loader))))
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"mid-window \(micro_step is 1\).*allowed: after an update"):
        accelerator.save_state("never-written")
    optimizer.discard()
    # What join_uneven_inputs() enters where each process has a GPU.
    with pytest.raises(RuntimeError, match=r"allowed: .*Join\(\[optimizer\]\)"), Join([model]):
        case.loss(model, next(iter(loader)))
    with pytest.raises(RuntimeError, match="even_batches=True"), Join([optimizer]):
        pass
    optimizer.close()

    sharding = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = case.model()
    optimizer = fusedacc.AccumulatingOptimizer(case_accelerate.stock(model), STEPS)
    with pytest.raises(RuntimeError, match=r"FSDP, which Accelerate does not run on a CPU.*fully_shard"):
        prepare(sharding, model, optimizer)
    assert sharding._models == []
    del os.environ["ACCELERATE_USE_FSDP"]


def trainer() -> None:
    case = case_transformers
    settings = {"max_grad_norm": 0.5, "logging_strategy": "steps", "logging_steps": 1}
    stock = case.llama()
    theirs = case.train(stock, case.stock(stock), **settings)
    for fused in (False, True):
        ours = case.llama()
        optimizer = case.wrapped(ours, model=ours if fused else None)
        found = case.train_ours(ours, optimizer=optimizer, **settings)
        assert found.args.world_size == 2
        assert not found.model_wrapped.require_backward_grad_sync, "the wrapper reduces"
        assert found.state.global_step == theirs.state.global_step == 3 * case.EPOCHS
        logs = zip(found.state.log_history[:-1], theirs.state.log_history[:-1], strict=True)
        for mine, wanted in logs:
            for name in ("loss", "grad_norm"):
                assert mine[name] == pytest.approx(wanted[name], rel=1e-5), (fused, mine, wanted)
        if not fused:
            assert equal(stock, ours)
        torch.testing.assert_close([*ours.parameters()], [*stock.parameters()])
    kept = found.model_wrapped  # once more, with the same DistributedDataParallel
    for each in (found, theirs):
        each.train()
    assert found.model_wrapped is kept
    assert found.optimizer.optimizer.num_updates == 2 * 3 * case.EPOCHS
    torch.testing.assert_close([*ours.parameters()], [*stock.parameters()], rtol=1e-4, atol=1e-5)

    # A loader without a length: its last, partly filled window is reduced and makes an update.
    constant = {"lr_scheduler_type": "constant_with_warmup"}
    stock, ours = case.llama(), case.llama()
    case.train(stock, case.stock(stock), **constant)
    each = {"accelerator_config": {"dispatch_batches": False}}  # every process reads by itself
    found = case.train_ours(ours, data=case.Stream(), max_steps=3 * case.EPOCHS, **constant, **each)
    assert found.optimizer.optimizer.num_updates == 3 * case.EPOCHS
    torch.testing.assert_close([*ours.parameters()], [*stock.parameters()])


def main() -> None:
    torch.set_num_threads(1)
    counted_loops()
    manual_loop()
    two_optimizers()
    refusals()
    trainer()
    torch.distributed.destroy_process_group()
