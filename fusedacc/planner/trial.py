"""One try of a micro-batch size, in a process of its own: what that does, and what it tells its parent."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import pickle
import re
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import spawn
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch

from .budget import address_space_bytes, available

#: What is said where memory is short: by torch, by C++, by the system, by OpenMP.
SHORT = re.compile(
    r"can't allocate memory|cannot allocate memory|bad_alloc|out of memory|not enough memory"
    r"|MemoryError|can't start new thread|Thread creation failed",
    re.IGNORECASE,
)
#: What may be said for that reason, and for others: by oneDNN, of workers that are gone.
DOUBTFUL = re.compile(r"could not (create|execute) a (primitive|memory)|DataLoader worker")
_ASKED = re.compile(r"tried to allocate (\d+) bytes")

#: Whether this process is such a child: it starts none.
in_child = False


@dataclass(frozen=True)
class Order:
    """What a child is to try.

    step: pickled. main: what `multiprocessing.spawn.prepare` takes to make the caller's `__main__` again;
    empty where the step does not come from there. budget: bytes; None: all that is free, by the child's
    count. margin: the share of the budget that is not given out.
    """

    step: bytes
    main: dict[str, Any]
    device: str
    threads: int
    size: int
    updates: int
    budget: int | None
    margin: float


@dataclass(frozen=True)
class Loaded:
    """The child has loaded what it needs, and from here on has so many bytes, less the margin."""

    budget: int


class Updated:
    """An update has ended."""


class Done:
    """All have."""


@dataclass(frozen=True)
class Failed:
    """How the try ended instead. `lacked`: bytes beyond the limit, at least; 0: not known. `problem`: the
    exception, pickled; empty where it cannot be."""

    kind: Literal["memory", "doubtful", "error"]
    what: str
    trace: str
    lacked: int = 0
    problem: bytes = b""


def main(handle: int) -> None:
    """All that a child does, in a process group of its own. Ends when the parent does, whatever it is at."""
    global in_child
    in_child = True
    connection = Connection(handle)
    try:
        order: Order = connection.recv()
    except EOFError:
        return
    threading.Thread(target=_follow, args=(connection,), daemon=True).start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError):
        # Where the system runs out of memory, this process is the one to end.
        Path("/proc/self/oom_score_adj").write_text("1000")
    limit: Limit | None = None
    try:
        torch.set_num_threads(order.threads)
        if order.main:
            spawn.prepare(order.main)
        step = pickle.loads(order.step)
        device = torch.device(order.device)
        _warm(device)
        limit = LIMITS[device.type](device)
        budget = available(device) if order.budget is None else order.budget
        connection.send(Loaded(budget))
        limit.set(budget - margin_of(budget, order.margin))
        for _ in _updates(step, order, device):
            connection.send(Updated())
        limit.lift()
        connection.send(Done())
    except BaseException as problem:  # whatever the step raises is for the caller to see
        if limit:
            limit.lift()  # what is reported needs memory, and the frames still hold all theirs
        lacked = limit.lacked(problem) if limit else 0
        with contextlib.suppress(Exception):  # the step may have closed it; the parent ends this process soon
            sys.stdout.flush()
        connection.send(_failure(problem, limit is not None, lacked))


def _follow(connection: Connection) -> None:
    """Wait until the parent is done, or dead; then end, with all that the step has started."""
    connection.poll(None)
    os.killpg(0, signal.SIGKILL)


def _updates(step: Callable[[], Any], order: Order, device: torch.device) -> Iterator[None]:
    run = step()
    if not callable(run):
        raise TypeError(
            f"step() returns what runs one update, called with a micro-batch size; it was {run!r}"
        )
    for _ in range(order.updates):
        run(order.size)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        yield


def _warm(device: torch.device) -> None:
    """Have threads, libraries and lazily imported modules in memory, which any training brings along: torch's
    optimizers alone import a quarter of a gigabyte of address space."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for dtype in (torch.float32, torch.bfloat16):
        layers = (torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
        model = torch.nn.Sequential(*layers).to(device, dtype)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(64, 512, device=device, dtype=dtype)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    del layers, model, optimizer
    gc.collect()


class Limit:
    """What a process may add on a CPU to what it has when this is made: address space."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before = resource.getrlimit(resource.RLIMIT_AS)
        self.base, self.allowed = address_space_bytes(), 0

    def set(self, allowed: int) -> None:
        """Give so many bytes; less where the process had a limit before."""
        self.allowed = allowed
        known = (each for each in self.before if each != resource.RLIM_INFINITY)
        limits = [self.base + allowed, sys.maxsize, *known]
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), self.before[1]))

    def lift(self) -> None:
        """As it was before."""
        resource.setrlimit(resource.RLIMIT_AS, self.before)

    def lacked(self, problem: BaseException) -> int:
        """By how many bytes the allocation that failed went beyond the limit, at least; 0: not known."""
        asked = _ASKED.search(str(problem))
        return max(0, address_space_bytes() - self.base + int(asked[1]) - self.allowed) if asked else 0


class CudaLimit(Limit):
    """The same on a CUDA GPU: what torch's allocator reserves, which is limited as a share of the whole."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        torch.cuda.empty_cache()
        self.base = torch.cuda.memory_reserved(device)

    def set(self, allowed: int) -> None:
        """Give so many bytes."""
        self.allowed = allowed
        whole = torch.cuda.mem_get_info(self.device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, (self.base + allowed) / whole), self.device)

    def lift(self) -> None:
        """All of the GPU's memory."""
        torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    def lacked(self, problem: BaseException) -> int:
        """Not known: what is reserved is not what is in use."""
        return 0


LIMITS = {"cpu": Limit, "cuda": CudaLimit}


def margin_of(budget: int, share: float) -> int:
    """The bytes of a budget that are not given out."""
    return int(budget * share)


def kind_of(problem: BaseException) -> Literal["memory", "doubtful", "error"]:
    """Whether an exception, or one that led to it, says that memory is short."""
    doubtful, seen = False, set()
    each: BaseException | None = problem
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        if isinstance(each, MemoryError | torch.OutOfMemoryError):
            return "memory"
        if isinstance(each, OSError) and each.errno == errno.ENOMEM:
            return "memory"
        if isinstance(each, RuntimeError | OSError | ImportError):
            if SHORT.search(str(each)):
                return "memory"
            doubtful = doubtful or DOUBTFUL.search(str(each)) is not None
        each = each.__cause__ or each.__context__
    return "doubtful" if doubtful else "error"


def _failure(problem: BaseException, limited: bool, lacked: int) -> Failed:
    said = str(problem).strip().split("\n")[0]
    what = f"{type(problem).__name__}: {said}" if said else type(problem).__name__
    trace = "".join(traceback.format_exception(type(problem), problem, problem.__traceback__))
    try:
        pickled = pickle.dumps(problem)
    except Exception:  # whatever it holds
        pickled = b""
    return Failed(kind_of(problem) if limited else "error", what, trace, lacked, pickled)
