"""fastai's accumulation and ours in its Learner, compared with updates on whole batches."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fastai
import torch
from bigrams import Batch, batches, network
from comparison import Row, compared, snapshot
from fastai.callback.schedule import Learner
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.optimizer import OptimWrapper
from torch import Tensor, nn

from fusedacc.integrations.fastai import AccumulationCallback, OptFunc

VERSION = f"fastai {fastai.__version__}"
SAMPLES = 24
RATE = 0.2


def windows(micro_batches: Sequence[Batch], samples: int = SAMPLES) -> Iterator[Batch]:
    """Return the whole batches of an epoch. Each has at least so many samples, except the last."""
    batch_parts: list[Batch] = []
    for batch in micro_batches:
        batch_parts.append(batch)
        if sum(len(y) for _, y in batch_parts) >= samples or batch is micro_batches[-1]:
            xs, ys = zip(*batch_parts, strict=True)
            yield torch.cat(xs), torch.cat(ys)
            batch_parts = []


class Batches(list):
    """A list with the attribute of a data loader that a Learner needs."""

    dataset: Any = None


def loss_of(prediction: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(prediction.float(), target)


def sgd(parameters: Any, lr: float = RATE) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.5)


def theirs(parameters: Any, lr: float) -> OptimWrapper:
    return OptimWrapper(parameters, opt=sgd, lr=lr)


def learner(
    micro_batches: Sequence[Batch], opt_func: Callable = theirs, cbs: Any = None, net: Any = None
) -> Learner:
    """Return a Learner on the CPU."""
    loaders = DataLoaders(Batches(micro_batches), Batches(), device="cpu")
    options = {"loss_func": loss_of, "opt_func": opt_func, "lr": RATE, "path": tempfile.gettempdir()}
    return Learner(loaders, net or network(), cbs=cbs, **options)


def fit(learn: Learner, epochs: int, method: str = "fit", **options) -> Learner:
    with learn.no_bar(), learn.no_logging():
        getattr(learn, method)(epochs, **options)
    return learn


def reference(micro_batches: Sequence[Batch], epochs: int, max_norm: float | None = None) -> nn.Module:
    net = network()
    optimizer = sgd(net.parameters())
    for _ in range(epochs):
        for x, y in windows(micro_batches):
            optimizer.zero_grad()
            loss_of(net(x), y).backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(net.parameters(), max_norm)
            optimizer.step()
    return net


def fit_theirs(micro_batches: Sequence[Batch], epochs: int) -> tuple[nn.Module, int]:
    """Return the trained network and the number of updates."""
    steps: list[int] = []

    def counting(parameters: Any, lr: float) -> OptimWrapper:
        wrapped = theirs(parameters, lr)
        wrapped.opt.register_step_pre_hook(lambda *_: steps.append(1))
        return wrapped

    learn = fit(learner(micro_batches, counting, GradientAccumulation(SAMPLES)), epochs)
    return learn.model, len(steps)


def fit_ours(micro_batches: Sequence[Batch], epochs: int, **options) -> tuple[nn.Module, int]:
    learn = fit(learner(micro_batches, OptFunc(sgd, **options), AccumulationCallback(SAMPLES)), epochs)
    return learn.model, learn.opt.opt.num_updates


#: Name, samples in each micro-batch of an epoch, epochs, and what fastai does.
CASES = (
    ("full windows", [8] * 6, 12, ""),
    ("partly filled last window", [8] * 8, 8, "carries the last window into the next epoch, and past `fit`"),
    (
        "ragged micro-batches",
        [3, 17, 9, 40, 5, 28, 11, 2],
        6,
        "divides by n_acc whatever a window holds; carries the last on",
    ),
)


def compare() -> list[Row]:
    start, rows = snapshot(network()), []
    for case, sizes, epochs, remark in CASES:
        data = batches(sizes)
        exact = reference(data, epochs), epochs * len(list(windows(data)))
        runs = exact, fit_theirs(data, epochs), fit_ours(data, epochs)
        rows.append(compared(VERSION, case, start, *runs, remark))
    return rows
