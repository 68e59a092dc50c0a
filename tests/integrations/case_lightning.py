"""Lightning's accumulation and ours in its Trainer, compared with updates on whole batches."""

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence

import lightning.pytorch as lightning
import torch
from bigrams import Batch, batches, network
from comparison import Row, compared, snapshot
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fusedacc
from fusedacc.integrations.lightning import AccumulationCallback

VERSION = f"Lightning {lightning.__version__}"
STEPS = 4


def loader(micro_batches: Sequence[Batch]) -> DataLoader:
    return DataLoader(micro_batches, batch_size=None)  # type: ignore[arg-type]


def windows(micro_batches: Sequence[Batch], steps: int = STEPS) -> Iterator[Batch]:
    """Return the whole batches of an epoch. The last may be smaller."""
    for start in range(0, len(micro_batches), steps):
        xs, ys = zip(*micro_batches[start : start + steps], strict=True)
        yield torch.cat(xs), torch.cat(ys)


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.5)


def loss_of(net: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss over the tokens of a batch."""
    return nn.functional.cross_entropy(net(batch[0]).float(), batch[1])


class Module(lightning.LightningModule):
    """Trains `net` with the optimizer that `make` returns. The learning rate falls with every step."""

    def __init__(self, net: nn.Module, make: Callable = sgd, steps: int | None = None, **options) -> None:
        super().__init__()
        self.net, self.make, self.steps, self.options = net, make, steps, options
        self.rates: list[float] = []  # of each step of the inner optimizer

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return loss_of(self.net, batch)

    def configure_optimizers(self):
        optimizer = self.make(self.net.parameters())
        optimizer.register_step_pre_hook(lambda inner, *_: self.rates.append(inner.param_groups[0]["lr"]))
        if self.steps is not None:
            optimizer = fusedacc.AccumulatingOptimizer(optimizer, self.steps, **self.options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def trainer(epochs: int, **options) -> lightning.Trainer:
    """Return a Trainer on the CPU that prints nothing."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    options = quiet | {"default_root_dir": tempfile.gettempdir()} | options
    return lightning.Trainer(max_epochs=epochs, accelerator="cpu", **options)


def reference(
    micro_batches: Sequence[Batch], epochs: int, max_norm: float | None = None, steps: int = STEPS
) -> nn.Module:
    """Train on each window as one batch."""
    net = network()
    optimizer = sgd(net.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    for _ in range(epochs):
        for whole in windows(micro_batches, steps):
            optimizer.zero_grad()
            loss_of(net, whole).backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(net.parameters(), max_norm)
            optimizer.step(), scheduler.step()
    return net


def fit_theirs(micro_batches: Sequence[Batch], epochs: int) -> tuple[nn.Module, lightning.Trainer]:
    module, runner = Module(network()), trainer(epochs, accumulate_grad_batches=STEPS)
    runner.fit(module, loader(micro_batches))
    return module.net, runner


def fit_ours(
    micro_batches: Sequence[Batch], epochs: int, weight: Callable | None = None, **options
) -> tuple[nn.Module, lightning.Trainer]:
    module = Module(network(), steps=STEPS, **options)
    runner = trainer(epochs, callbacks=[AccumulationCallback(weight)])
    runner.fit(module, loader(micro_batches))
    return module.net, runner


def tokens(batch: Batch) -> int:
    return len(batch[1])


#: Name, tokens in each micro-batch of an epoch, epochs, our settings, and what Lightning does.
CASES = (
    ("full windows", [6] * 8, 12, {}, ""),
    ("partly filled last window", [6] * 10, 8, {}, "divides the last window by k"),
    (
        "token-weighted loss, ragged lengths",
        [3, 17, 9, 40, 5, 28, 11, 2],
        12,
        {"reduction": "weighted", "weight": tokens},
        "mean of means",
    ),
)


def compare() -> list[Row]:
    start, rows = snapshot(network()), []
    for case, lengths, epochs, options, remark in CASES:
        data = batches(lengths)
        exact = reference(data, epochs), epochs * len(list(windows(data)))
        fits = fit_theirs(data, epochs), fit_ours(data, epochs, **options)
        runs = [(net, runner.global_step) for net, runner in fits]
        rows.append(compared(VERSION, case, start, exact, *runs, remark))
    return rows
