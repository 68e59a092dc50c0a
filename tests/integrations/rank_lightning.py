"""One of two ranks: Lightning's Trainer with strategy="ddp", and Fabric, with the wrapper."""

import os

import case_lightning as case
import pytest
import torch
from bigrams import Batch, tolerance
from comparison import difference, equal, snapshot
from lightning.fabric import Fabric
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedacc
from fusedacc.integrations.lightning import AccumulationCallback

RANKS = 2
#: A window is four micro-batches of each rank, and the last of an epoch two.
EVEN, RAGGED = [6] * 20, [3, 17, 9, 40, 5, 28, 11, 2] * 2 + [7, 21, 4, 30]
EPOCHS = 2


class Module(case.Module):
    """Records whether the DistributedDataParallel around it would reduce."""

    armed: bool | None = None

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        parallel = self.trainer.strategy.model
        assert isinstance(parallel, DistributedDataParallel)
        self.armed = parallel.require_backward_grad_sync


def ddp_trainer(**options) -> case.lightning.Trainer:
    return case.trainer(EPOCHS, devices=RANKS, strategy="ddp", use_distributed_sampler=False, **options)


def own(micro_batches: list[Batch]) -> list[Batch]:
    """Return this rank's micro-batches: every second one."""
    return micro_batches[int(os.environ["RANK"]) :: RANKS]


def same_on_both(net: nn.Module) -> None:
    for parameter in net.parameters():
        other = parameter.detach().clone()
        torch.distributed.broadcast(other, 0)
        assert torch.equal(parameter, other)


def counted_loops() -> None:
    start = snapshot(case.network())
    for lengths, weight, options in (
        (EVEN, None, {}),
        (EVEN, None, {"max_grad_norm": 0.1}),
        (RAGGED, case.tokens, {"reduction": "weighted"}),
        (RAGGED, case.tokens, {"reduction": "weighted", "fused": True}),
    ):
        data, net = case.batches(lengths), case.network()
        given = {name: value for name, value in options.items() if name != "fused"}
        module = Module(net, steps=case.STEPS, model=net if "fused" in options else None, **given)
        runner = ddp_trainer(callbacks=[AccumulationCallback(weight)])
        runner.fit(module, case.loader(own(data)))
        wanted = case.reference(data, EPOCHS, options.get("max_grad_norm"), RANKS * case.STEPS)
        assert module.armed is False, "the wrapper reduces"
        assert runner.global_step == len(module.rates) == 3 * EPOCHS
        assert difference(snapshot(net), snapshot(wanted), start) < tolerance(3 * EPOCHS, 80), options
        same_on_both(net)


def carried_over() -> None:
    """Each rank has ten micro-batches an epoch: two and a half windows. Three epochs are seven and a half."""
    for lengths, weight, options in ((EVEN, None, {}), (RAGGED, case.tokens, {"reduction": "weighted"})):
        data, net, epochs = case.batches(lengths), case.network(), 3
        module = Module(net, steps=case.STEPS, **options)
        runner = case.trainer(
            epochs,
            devices=RANKS,
            strategy="ddp",
            use_distributed_sampler=False,
            callbacks=[AccumulationCallback(weight, carry_over=True)],
        )
        runner.fit(module, case.loader(own(data)))
        wanted = case.reference(data * epochs, 1, steps=RANKS * case.STEPS)
        assert runner.global_step == len(module.rates) == 8
        assert difference(snapshot(net), snapshot(wanted), snapshot(case.network())) < tolerance(8, 80)
        same_on_both(net)


def as_stock() -> None:
    """With full windows, the Trainer's accumulation over two ranks is correct, and ours equals it."""
    data = case.batches([6] * 16)
    theirs = Module(case.network())
    ddp_trainer(accumulate_grad_batches=case.STEPS).fit(theirs, case.loader(own(data)))
    ours = Module(case.network(), steps=case.STEPS)
    ddp_trainer(callbacks=[AccumulationCallback()]).fit(ours, case.loader(own(data)))
    assert (theirs.armed, ours.armed) == (True, False)
    assert len(theirs.rates) == len(ours.rates) == 2 * EPOCHS
    found = difference(snapshot(ours.net), snapshot(theirs.net), snapshot(case.network()))
    assert found < tolerance(2 * EPOCHS, 48)


def a_checkpoint_of_one_process_is_warned_of() -> None:
    class Saves(case.lightning.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx in (1, 3):
                trainer._checkpoint_connector.dump_checkpoint()

    module = Module(case.network(), steps=case.STEPS)
    runner = case.trainer(1, devices=RANKS, strategy="ddp", callbacks=[AccumulationCallback(), Saves()])
    with pytest.warns(UserWarning, match="mid-window stores only the first") as found:
        runner.fit(module, case.loader(case.batches([6] * 8)))
    assert len([each for each in found if "mid-window" in str(each.message)]) == 1  # none after the update


def manual_optimization_is_refused() -> None:
    class Manual(Module):
        def __init__(self, *arguments, **options) -> None:
            super().__init__(*arguments, **options)
            self.automatic_optimization = False

    net, before = case.network(), snapshot(case.network())
    runner = ddp_trainer(callbacks=[AccumulationCallback()])
    with pytest.raises(ValueError, match=r"manual optimization under strategy='ddp'.*allowed: automatic"):
        runner.fit(Manual(net, steps=case.STEPS), case.loader(case.batches(EVEN)))
    assert all(map(torch.equal, before, snapshot(net)))


def fabric_loops() -> None:
    """`accumulate(model)` attaches Fabric's module. A manual loop calls `attach()`."""
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
    fabric.launch()
    data = case.batches([6] * 16)
    mine = own(data)

    def train(steps: int | None, wraps: bool) -> nn.Module:
        net = case.network()
        inner = case.sgd(net.parameters())
        optimizer = fusedacc.AccumulatingOptimizer(inner, steps) if wraps else inner
        model, optimizer = fabric.setup(net, optimizer)
        if wraps and steps is None:
            optimizer.attach(model)
        for _ in range(EPOCHS):
            for number, batch in enumerate(mine, 1):
                loss = case.loss_of
                if steps is not None:
                    with optimizer.accumulate(model):
                        fabric.backward(loss(model, batch))
                    optimizer.step(), optimizer.zero_grad()
                    continue
                last = number % case.STEPS == 0
                with fabric.no_backward_sync(model, enabled=not last):
                    fabric.backward(loss(model, batch) / case.STEPS)
                if last:
                    optimizer.step(), optimizer.zero_grad()
        assert model._forward_module.require_backward_grad_sync is not wraps
        if wraps:
            optimizer.close()
            assert model._forward_module.require_backward_grad_sync
        return net

    stock, manual, counted = train(None, False), train(None, True), train(case.STEPS, True)
    assert equal(stock, manual)
    found = difference(snapshot(counted), snapshot(stock), snapshot(case.network()))
    assert found < tolerance(2 * EPOCHS, 48)
    same_on_both(counted)


def main() -> None:
    torch.set_num_threads(1)
    counted_loops()
    carried_over()
    as_stock()
    a_checkpoint_of_one_process_is_warned_of()
    manual_optimization_is_refused()
    fabric_loops()
    torch.distributed.destroy_process_group()
