"""One of two ranks: Accelerate's loop and the Trainer on gloo, ours against what they must equal.

RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set; prints nothing unless it fails.
"""

from __future__ import annotations

import os

os.environ["ACCELERATE_USE_CPU"] = "true"

import case_accelerate
import case_transformers
import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

import fusedacc
from fusedacc.integrations.accelerate import prepare

STEPS = 4


def accelerate_loop() -> None:
    """22 micro-batches are 11 on each rank: windows of four, four and three."""
    case = case_accelerate.Digits()
    reference = case.model().double()
    plain = case_accelerate.stock(reference)
    batches = list(case.loader())
    for at in range(0, 22, 2 * STEPS):
        window = batches[at : at + 2 * STEPS]
        for images, labels in window:
            (case.loss(reference, [images.double(), labels]) / len(window)).backward()
        plain.step()
        plain.zero_grad()

    for silent in (True, False):  # synchronised once a window, or after every micro-batch
        accelerator = Accelerator(cpu=True)
        optimizer = fusedacc.AccumulatingOptimizer(case_accelerate.stock(model := case.model()), STEPS)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, case.loader(), scheduler)
        assert isinstance(model, DistributedDataParallel)
        synchronised = []
        for batch in loader:
            with optimizer.accumulate(model if silent else None):
                synchronised.append(model.require_backward_grad_sync)
                accelerator.backward(case.loss(model, batch))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        full, last = [False] * 3 + [True], [False] * 2 + [True]
        assert synchronised == (full + full + last if silent else [True] * 11), synchronised
        assert optimizer.num_updates == 3
        assert scheduler.scheduler.last_epoch == 2 * 3  # as Accelerate does: once per process
        for parameter, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(parameter.double(), wanted, rtol=1e-4, atol=1e-6)
        accelerator.free_memory()


def trainer() -> None:
    stock, ours = case_transformers.llama(), case_transformers.llama()
    theirs = case_transformers.train(stock, case_transformers.stock(stock), max_grad_norm=0.5)
    found = case_transformers.train_ours(ours, max_grad_norm=0.5)
    assert found.args.world_size == 2
    assert found.state.global_step == theirs.state.global_step == 3 * case_transformers.EPOCHS
    for parameter, wanted in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(parameter, wanted)


if __name__ == "__main__":
    torch.set_num_threads(1)
    accelerate_loop()
    trainer()
    torch.distributed.destroy_process_group()
