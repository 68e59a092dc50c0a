"""Every input of PyTorch's own optimizer tests (`optim_db`), wrapped, compared with the bare optimizer.

Windows hold two micro-batches, and division by two is exact. So weights and state must equal stock's bit for
bit in both loops, also after a bare optimizer has loaded the wrapper's checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import build_cache
import forked
import pytest
import sweeps
import torch
from loops import identical
from torch import Tensor, nn

import fusedacc

pytest.importorskip("expecttest", reason="torch.testing._internal imports expecttest")

K, FIRST, REST = 2, range(2), range(2, 4)
#: Saves for each optimizer in optim_db: its implementations, whether it needs sparse gradients or a closure,
#: and the description and arguments of each input.
READS = """
import sys, torch
from torch.testing._internal.common_optimizers import optim_db
torch.save({
    info.optim_cls.__name__: (
        [*info.supported_impls], info.only_supports_sparse_grads, info.step_requires_closure,
        [(each.desc, each.kwargs) for each in info.optim_inputs_func(device="cpu")],
    )
    for info in optim_db
}, sys.argv[1])
"""
NAMES = [
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam"),
    *("RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
]


@pytest.fixture(scope="module")
def database() -> dict[str, tuple]:
    """Read optim_db in another process, because importing it changes torch's global flags."""

    def read(folder: Path) -> None:
        done = forked.run(READS, str(folder / "inputs.pt"))
        assert done.returncode == 0, done.stderr

    return torch.load(build_cache.cached("optim-db", (READS, torch.__version__), read) / "inputs.pt")


class Network(nn.Module):
    """A matrix, a vector, a number and an unused parameter, or a table with sparse gradients."""

    def __init__(self, sparse: bool, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        if sparse:
            self.table = nn.Embedding(7, 3, sparse=True, dtype=dtype)
        else:
            self.linear = nn.Linear(4, 3, dtype=dtype)
            self.gain, self.idle = (nn.Parameter(torch.ones((), dtype=dtype)) for _ in range(2))
        self.sparse, self.dtype = sparse, dtype

    def loss(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        if self.sparse:
            return (self.table(torch.randint(7, (4,), generator=generator)) - 1).square().sum()
        x = torch.randn(5, 4, generator=generator, dtype=self.dtype)
        return (self.gain * self.linear(x) - 1).square().mean()


def implementations(name: str, supported: list[str], arguments: dict[str, Any]) -> Iterator[dict[str, bool]]:
    """Return options beside those of the input.

    Not every implementation takes a learning rate in a tensor.
    """
    yield {"foreach": False} if "foreach" in supported else {}
    if "foreach" in supported and not isinstance(arguments.get("lr"), Tensor):
        yield {"foreach": True}
    if "fused" in supported:
        yield {"fused": True}


def continued_bare(run: Run, *kind_and_options: Any) -> Run:
    """Return a bare run that continues from the checkpoint of another."""
    bare = Run(*kind_and_options)
    bare.net.load_state_dict(run.net.state_dict())
    bare.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    return bare


class Run:
    """A network and its optimizer: bare, wrapped in a manual loop, or counted."""

    def __init__(
        self, kind: type, arguments: dict[str, Any], loop: str, sparse: bool, dtype: torch.dtype
    ) -> None:
        self.net, self.loop = Network(sparse, dtype), loop
        wanted = [p for p in self.net.parameters() if p.ndim == 2 or kind is not torch.optim.Muon]
        groups = wanted
        one_group = kind in (torch.optim.LBFGS, torch.optim.Rprop, torch.optim.SparseAdam)  # or no decay
        if wanted[1:] and not one_group:
            groups = [{"params": wanted[:1]}, {"params": wanted[1:], "weight_decay": 0.0}]
        self.inner = self.optimizer = kind(groups, **copy.deepcopy(arguments))
        if loop != "bare":
            steps = K if loop == "counted" else None
            self.optimizer = fusedacc.AccumulatingOptimizer(self.inner, steps)

    def train(self, updates: range, closures: bool) -> None:
        for update in updates:
            window = range(update * K, update * K + K)
            if closures:
                self.optimizer.step(lambda window=window: self.evaluate(window))
                continue
            for index in window:
                (self.net.loss(index) / (1 if self.loop == "counted" else K)).backward()
                if self.loop == "counted":
                    self.optimizer.step()
            if self.loop != "counted":
                self.optimizer.step()
            self.optimizer.zero_grad()

    def evaluate(self, window: range) -> float:
        self.optimizer.zero_grad()
        losses = [self.net.loss(index) / K for index in window]
        for loss in losses:
            loss.backward()
        return float(sum(losses).detach())

    def found(self) -> list[Any]:
        """Return weights, state, and the options of the groups, without what a wrapper has added."""
        state, names = self.inner.state_dict(), self.inner.defaults.keys()
        groups = [{name: group[name] for name in names & group.keys()} for group in state["param_groups"]]
        return [[p.detach() for p in self.net.parameters()], state["state"], groups]


@pytest.mark.sweep(of=lambda name, dtype: {"name": name})
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_equal_to_the_bare_optimizer(database, name, dtype):
    kind = getattr(torch.optim, name)
    supported, sparse, closures, inputs = database[name]
    start = [p.detach() for p in Network(sparse, dtype).parameters()]
    for description, arguments in inputs:
        for number, extra in enumerate(implementations(name, supported, arguments)):
            options, what = arguments | extra, f"{description}, {extra}"
            made = kind, options, "bare", sparse, dtype
            bare = Run(*made)
            bare.train(FIRST, closures)
            resumed = continued_bare(bare, *made)  # loading casts some state, so bits may differ from `bare`
            for run in (bare, resumed):
                run.train(REST, closures)
            assert not identical(bare.found()[0], start), f"{what}: nothing was trained"
            loops = ("manual",) if closures else ("manual", "counted")
            for loop in loops if sweeps.FULL else loops[number % len(loops) :][:1]:
                wrapped = Run(kind, options, loop, sparse, dtype)
                wrapped.train(FIRST, closures)
                after = continued_bare(wrapped, *made)
                for run, wanted in ((wrapped, bare), (after, resumed)):
                    run.train(REST, closures)
                    assert identical(run.found(), wanted.found()), f"{what}: {loop}, loaded: {run is after}"


def test_optim_db_has_the_known_optimizers(database):
    assert sorted(database) == NAMES
    assert sum(len(inputs) for *_, inputs in database.values()) >= 90
