"""Accelerate's accumulation and ours in the same loops."""

import itertools
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate import Accelerator
from comparison import Row, compared, float32_tolerance, snapshot
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fusedacc
from fusedacc.integrations.accelerate import prepare

STEPS, EPOCHS, LR, MOMENTUM = 4, 4, 0.05, 0.9


class Case:
    """A model, its data and its loss, which are the same at every call.

    Attributes:
        loader: returns a DataLoader whose number of micro-batches is not a multiple of `STEPS`.
        loss: the loss of a micro-batch, a mean over its `weight`.
        weight: the number of samples or tokens of a micro-batch.
        reduction: the wrapper's reduction.
    """

    reduction: str

    def model(self) -> nn.Module: ...
    def loader(self) -> DataLoader: ...
    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor: ...
    def weight(self, batch: list[Tensor]) -> int: ...


class Digits(Case):
    """352 handwritten digits in 22 micro-batches of 16: five windows of four and one of two."""

    reduction = "mean"

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))

    def loader(self) -> DataLoader:
        images, labels = load_digits(return_X_y=True)
        images, labels = torch.tensor(images[:352], dtype=torch.float32) / 16, torch.tensor(labels[:352])
        return DataLoader(TensorDataset(images, labels), batch_size=16)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def weight(self, batch: list[Tensor]) -> int:
        return len(batch[1])


class Text(Case):
    """Lines of Python code of 1 to 90 bytes, two per micro-batch. The loss is a mean over bytes."""

    reduction = "weighted"

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(128, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 128))

    def loader(self) -> DataLoader:
        lines = [line for line in Path(textwrap.__file__).read_bytes().splitlines() if len(line) > 1][:44]
        lines = [torch.tensor(list(line)).clamp(max=127) for line in lines]
        return DataLoader(lines, batch_size=2, collate_fn=self._padded)

    @staticmethod
    def _padded(lines: list[Tensor]) -> list[Tensor]:
        pad = nn.utils.rnn.pad_sequence
        inputs = pad([line[:-1] for line in lines], batch_first=True)
        return [inputs, pad([line[1:] for line in lines], batch_first=True, padding_value=-100)]

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def weight(self, batch: list[Tensor]) -> int:
        return int(batch[1].ne(-100).sum())


def stock(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule that halves the learning rate every eighth update."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.5 ** (update // 8))


def windows(batches: Iterable[list[Tensor]]) -> Iterable[list[list[Tensor]]]:
    batches = iter(batches)
    while window := list(itertools.islice(batches, STEPS)):
        yield window


def exact_update(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, window: list[list[Tensor]]
) -> None:
    """Update with the float64 gradient of a whole window."""
    total = sum(case.weight(batch) for batch in window)
    for batch in window:
        batch = [part.double() if part.is_floating_point() else part for part in batch]
        (case.loss(model, batch) * case.weight(batch) / total).backward()
    optimizer.step(), optimizer.zero_grad()


def exact(case: Case) -> tuple[nn.Module, int]:
    """Train in float64 with the gradient of each whole window. Return the model and the number of updates."""
    model = case.model().double()
    optimizer, updates = stock(model), 0
    scheduler = halving(optimizer)
    for _epoch in range(EPOCHS):
        for window in windows(case.loader()):
            exact_update(case, model, optimizer, window)
            scheduler.step()
            updates += 1
    return model, updates


def theirs(case: Case) -> tuple[nn.Module, int]:
    """Train with the loop of Accelerate's guide."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    model = case.model()
    optimizer = stock(model)
    scheduler, updates = halving(optimizer), []
    optimizer.register_step_post_hook(lambda *_: updates.append(1))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, case.loader(), scheduler)
    for _epoch in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(case.loss(model, batch))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return model, len(updates)


def manual(case: Case, wrap: Callable[[torch.optim.Optimizer], Any], epochs: int) -> nn.Module:
    """Train with Accelerate's accumulation, clipping, and the optimizer that `wrap` returns."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    model = case.model()
    optimizer = wrap(stock(model))
    prepared = prepare(accelerator, model, optimizer, case.loader(), halving(optimizer))
    model, optimizer, loader, scheduler = prepared
    for _epoch in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(case.loss(model, batch))
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return model


def train(
    case: Case, accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, scheduler: Any, epochs: int
) -> None:
    """Train with our loop and the objects that `prepare` has returned."""
    for _epoch in range(epochs):
        for batch in loader:
            weight = case.weight(batch) if case.reduction == "weighted" else None
            with optimizer.accumulate(model, weight):
                accelerator.backward(case.loss(model, batch))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def ours(case: Case, **options) -> tuple[nn.Module, int]:
    """Train with the wrapper and its `options`. `model=True` means this model."""
    accelerator = Accelerator(cpu=True)
    model = case.model()
    options = options | {"model": model if options.get("model") else None}
    optimizer = fusedacc.AccumulatingOptimizer(stock(model), STEPS, reduction=case.reduction, **options)
    scheduler = halving(optimizer)
    model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, case.loader(), scheduler)
    train(case, accelerator, model, optimizer, loader, scheduler, EPOCHS)
    return model, optimizer.num_updates


def tolerance(case: Case) -> float:
    rows = max(case.weight(batch) for batch in case.loader()) * STEPS
    return float32_tolerance(*exact(case), case.model(), rows)


def compare() -> list[Row]:
    """Return a row for each case."""
    framework, lost = f"Accelerate {accelerate.__version__}", "divides the last window by k"
    return [
        compared(framework, name, snapshot(case.model()), exact(case), theirs(case), ours(case), remark)
        for case, name, remark in (
            (Digits(), "partly filled last window", lost),
            (Text(), "token-weighted loss, ragged lengths", f"mean of means; {lost}"),
        )
    ]
