"""Trains on very many micro-batches with random events, and checks that nothing is left behind.

    python tests/soak.py [NUMBER] [--seed N]

Several *lives* run in turns. In each life, a small model trains with one wrapper, while random events happen:
new input shapes, moves, casts, freezes, exceptions, discards, checkpoints, copies. Then both are dropped, and
the next life has another loop, dtype and wrapper. Between lives, the live Python objects of each type, the
bytes of tensors, the allocated memory and the resident memory must be what they were after the first lives.
Needs glibc.
"""

import argparse
import collections
import copy
import ctypes
import gc
import io
import os
import random
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

import fusedacc

WIDTH, ROWS = 16, 12
#: Numbers of rows in a micro-batch. They are few, because PyTorch compiles and keeps programs for each.
SIZES = (1, 2, 3, 5, 8, 13, 21, 34)
#: Micro-batches of a life, and the part of them before which an event happens.
LIFE, EVENT_SHARE = 400, 0.05
#: Lives after which the counts begin: caches of Python, PyTorch and the allocator are full then.
WARM_UP = 60
#: Checks that are compared with the first one.
CHECKS = 10
#: Objects of a type of Python's that may be added: the counts themselves are such objects.
OTHER_OBJECTS = 10
#: Bytes that may be added to the allocated memory, by caches.
ALLOCATED_SLACK = 2 << 20
#: Bytes that may be added to the resident memory, because the allocator keeps and splits memory.
RESIDENT_SLACK = 24 << 20
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class Failure(Exception):
    """Raised in a backward pass."""


class Model(nn.Module):
    """Paths of gradients: rows, products, an unpatched weight, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.last = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.first(self.table(rows) * self.gain).tanh()
        return self.last(self.first(x)).float().square().mean()


def fail(gradient: Tensor) -> None:
    raise Failure


@dataclass
class Life:
    """A model and its wrapper, and what may happen to them."""

    rng: random.Random
    model: Model = field(default_factory=Model)
    steps: int | None = None
    size: int = 3
    optimizer: fusedacc.AccumulatingOptimizer = None

    def __post_init__(self) -> None:
        self.model.to(self.rng.choice(DTYPES))
        self.steps = self.rng.choice([None, 1, 2, 4])
        self.optimizer = self.wrap()

    def wrap(self) -> fusedacc.AccumulatingOptimizer:
        options: dict[str, object] = {}
        if self.rng.random() < 0.6:
            options["model"] = self.model
        if self.rng.random() < 0.3:
            options["max_grad_norm"] = 1.0
        if self.rng.random() < 0.3:
            options["skip_nonfinite"] = True
        if self.rng.random() < 0.3:
            options["master_weights"] = True
        if self.rng.random() < 0.2:
            options["backend"] = "eager"
        # Unlike Adam, SGD continues after a cast of the model.
        inner = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=self.rng.choice([0.0, 0.9]))
        return fusedacc.AccumulatingOptimizer(inner, self.steps, **options)

    def loss(self) -> Tensor:
        return self.model(torch.randint(ROWS, (self.size,)))

    def train(self, number: int) -> None:
        """Train on this many micro-batches."""
        for index in range(number):
            if self.rng.random() < EVENT_SHARE:
                self.rng.choice(EVENTS)(self)
            self.loss().backward()
            if self.steps or index % 3 == 2:
                self.optimizer.step()
                self.optimizer.zero_grad()

    # Events

    def change_shape(self) -> None:
        self.size = self.rng.choice(SIZES)

    def move(self) -> None:
        """Give the parameters new memory, as a move to another device does."""
        for p in self.model.parameters():
            p.data = p.data.clone()

    def cast(self) -> None:
        self.model.to(self.rng.choice(DTYPES))

    def freeze(self) -> None:
        p = self.rng.choice(list(self.model.parameters())[:-1])
        p.requires_grad_(not p.requires_grad)

    def raise_in_backward(self) -> None:
        weight = self.rng.choice([self.model.table.weight, self.model.gain, self.model.last.weight])
        if not weight.requires_grad:
            return
        handle = weight.register_hook(fail)
        try:
            self.loss().backward()
        except Failure:
            self.optimizer.discard()
        handle.remove()

    def discard(self) -> None:
        self.loss().backward()
        self.optimizer.discard()

    def ignore(self) -> None:
        with self.optimizer.ignore():
            self.loss().backward()
        self.model.zero_grad()

    def flush(self) -> None:
        self.optimizer.flush()

    def accumulate(self) -> None:
        with self.optimizer.accumulate():
            self.loss().backward()

    def differentiate(self) -> None:
        leaves = [p for p in self.model.parameters() if p.requires_grad]
        torch.autograd.grad(self.loss(), leaves, allow_unused=True)

    def save_and_load(self) -> None:
        file = io.BytesIO()
        torch.save((self.model.state_dict(), self.optimizer.state_dict()), file)
        file.seek(0)
        model, optimizer = torch.load(file, weights_only=False)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def copy(self) -> None:
        """Continue with deep copies."""
        self.model, self.optimizer = copy.deepcopy((self.model, self.optimizer))

    def close(self) -> None:
        self.optimizer.close()
        self.optimizer = self.wrap()

    def drop(self) -> None:
        """Drop the wrapper in the middle of a window. The garbage collector may free it much later."""
        self.optimizer = None
        gc.collect()
        self.optimizer = self.wrap()

    def look(self) -> None:
        repr(self.optimizer)
        str(self.optimizer.explain())
        _ = self.optimizer.accumulator_bytes

    def keep_graph(self) -> None:
        """Drop a graph without a backward pass."""
        self.loss()


EVENTS: tuple[Callable[[Life], None], ...] = (
    Life.change_shape,
    Life.move,
    Life.cast,
    Life.freeze,
    Life.raise_in_backward,
    Life.discard,
    Life.ignore,
    Life.flush,
    Life.accumulate,
    Life.differentiate,
    Life.save_and_load,
    Life.copy,
    Life.close,
    Life.drop,
    Life.look,
    Life.keep_graph,
)


class Mallinfo(ctypes.Structure):
    """The result of glibc's `mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks"),
            "keepcost",
        )
    )


def allocated_bytes() -> int:
    """Return the bytes that `malloc` has given and that were not freed."""
    mallinfo = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo.restype = Mallinfo
    info = mallinfo()
    return info.uordblks + info.hblkhd


@dataclass
class Counts:
    """What is alive: objects by type, and the bytes of tensors, of `malloc` and of resident memory."""

    objects: collections.Counter[str]
    tensor_bytes: int
    allocated: int
    resident: int

    @classmethod
    def now(cls) -> "Counts":
        for _ in range(2):
            gc.collect()
        objects: collections.Counter[str] = collections.Counter()
        tensor_bytes = 0
        for each in gc.get_objects():
            kind = type(each)
            objects[f"{kind.__module__}.{kind.__qualname__}"] += 1
            if issubclass(kind, Tensor):
                tensor_bytes += each.untyped_storage().nbytes()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(objects, tensor_bytes, allocated_bytes(), pages * os.sysconf("SC_PAGE_SIZE"))

    def difference(self, begin: "Counts") -> list[str]:
        """Return what is alive now beyond what was alive at the beginning."""
        more = [
            f"{count} {kind}"
            for kind, count in sorted((self.objects - begin.objects).items())
            if count > (0 if kind.startswith(("fusedacc.", "torch.")) else OTHER_OBJECTS)
        ]
        if self.tensor_bytes > begin.tensor_bytes:
            more.append(f"{self.tensor_bytes - begin.tensor_bytes} bytes of tensors")
        if self.allocated > begin.allocated + ALLOCATED_SLACK:
            more.append(f"{self.allocated - begin.allocated:,} bytes of allocated memory")
        if self.resident > begin.resident + RESIDENT_SLACK:
            more.append(f"{self.resident - begin.resident:,} bytes of resident memory")
        return more


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("number", nargs="?", type=int, default=1_000_000, help="micro-batches (1,000,000)")
    parser.add_argument("--seed", type=int, default=0, help="of the random events (0)")
    options = parser.parse_args()
    lives = options.number // LIFE
    if lives < WARM_UP + CHECKS:
        parser.error(f"NUMBER={options.number}; allowed: {LIFE * (WARM_UP + CHECKS)} or more")
    torch.set_num_threads(1)
    # oneDNN keeps the programs of a thousand shapes, which would fill its cache for hours.
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "0"
    warnings.simplefilter("ignore")  # of what the events do to training
    checked = {WARM_UP + (lives - WARM_UP) * index // CHECKS for index in range(CHECKS + 1)}
    began, start = time.monotonic(), None
    for life in range(lives + 1):
        if life in checked:
            counts = Counts.now()
            start = start or counts
            more = counts.difference(start)
            seconds = time.monotonic() - began
            print(
                f"{life * LIFE:>9,} micro-batches, {seconds:.0f} s: {counts.objects.total():,} objects, "
                f"{counts.tensor_bytes:,} bytes of tensors, {counts.allocated / 2**20:.1f} MiB allocated, "
                f"{counts.resident / 2**20:.1f} MiB resident" + "".join(f"; more: {each}" for each in more),
                flush=True,
            )
        if life < lives:
            random_life = random.Random(f"{options.seed} {life}")
            torch.manual_seed(life)
            Life(random_life).train(LIFE)
    return 1 if more else 0


if __name__ == "__main__":
    sys.exit(main())
