"""The child process that tries one micro-batch size, and its messages to the parent."""

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

#: Messages of torch, C++, the system and OpenMP when memory is short.
SHORT = re.compile(
    r"can't allocate memory|cannot allocate memory|bad_alloc|out of memory|not enough memory"
    r"|MemoryError|can't start new thread|Thread creation failed",
    re.IGNORECASE,
)
#: Messages that may have this cause or another one: of oneDNN, and of workers that died.
DOUBTFUL = re.compile(r"could not (create|execute) a (primitive|memory)|DataLoader worker")
_ASKED = re.compile(r"tried to allocate (\d+) bytes")

#: Whether this process is such a child. A child starts no children.
in_child = False


@dataclass(frozen=True)
class Order:
    """What a child is to try."""

    #: Pickled.
    step: bytes
    #: Argument of `multiprocessing.spawn.prepare` that recreates the caller's `__main__`; empty if unneeded.
    main: dict[str, Any]
    device: str
    threads: int
    size: int
    updates: int
    #: Bytes; None: all free memory, as the child measures it.
    budget: int | None
    #: Share of the budget that the child may not use.
    margin: float


#: Messages after an update and after all of them. The first message is the budget in bytes: the child has
#: loaded everything, and may use that much from now on, less the margin.
UPDATED, DONE = "updated", "done"


@dataclass(frozen=True)
class Failed:
    """The try failed."""

    kind: Literal["memory", "doubtful", "error"]
    what: str
    trace: str
    #: At least so many bytes were missing; 0 if unknown.
    lacked: int
    #: The pickled exception; empty if it cannot be pickled.
    problem: bytes


def main(handle: int) -> None:
    """Run the child in its own process group. It ends at once when the parent ends."""
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
        # If the system runs out of memory, it should kill this process.
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
        connection.send(budget)
        limit.set(budget - margin_of(budget, order.margin))
        for _ in _updates(step, order, device):
            connection.send(UPDATED)
        limit.lift()
        connection.send(DONE)
    except BaseException as problem:  # the caller wants to see whatever the step raises
        if limit:
            limit.lift()  # reporting needs memory, and the frames still hold all of theirs
        lacked = limit.lacked(problem) if limit else 0
        with contextlib.suppress(Exception):  # the step may have closed it; the parent ends this process soon
            sys.stdout.flush()
        connection.send(_failure(problem, limit is not None, lacked))


def _follow(connection: Connection) -> None:
    """Wait until the parent is done or dead, then kill the process group."""
    connection.poll(None)
    os.killpg(0, signal.SIGKILL)


def _updates(step: Callable[[], Any], order: Order, device: torch.device) -> Iterator[None]:
    run = step()
    if not callable(run):
        raise TypeError(f"step() must return a callable run(micro_batch_size); it returned {run!r}")
    for _ in range(order.updates):
        run(order.size)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        yield


def _warm(device: torch.device) -> None:
    """Load what every training process loads: threads, libraries and lazily imported modules.

    torch's optimizers alone import a quarter of a gigabyte of address space.
    """
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
    """Limits the address space that a process may add on a CPU, from when this object is made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before = resource.getrlimit(resource.RLIMIT_AS)
        self.base, self.allowed = address_space_bytes(), 0

    def set(self, allowed: int) -> None:
        """Allow so many bytes, or less if the process already had a limit."""
        self.allowed = allowed
        known = (each for each in self.before if each != resource.RLIM_INFINITY)
        limits = [self.base + allowed, sys.maxsize, *known]
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), self.before[1]))

    def lift(self) -> None:
        """Restore the limit that was set before."""
        resource.setrlimit(resource.RLIMIT_AS, self.before)

    def lacked(self, problem: BaseException) -> int:
        """Return how many bytes the failed allocation exceeded the limit by; 0 if unknown."""
        asked = _ASKED.search(str(problem))
        return max(0, address_space_bytes() - self.base + int(asked[1]) - self.allowed) if asked else 0


class CudaLimit(Limit):
    """The same on a CUDA GPU: limits what torch's allocator reserves, as a share of the GPU's memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        torch.cuda.empty_cache()
        self.base = torch.cuda.memory_reserved(device)

    def set(self, allowed: int) -> None:
        self.allowed = allowed
        whole = torch.cuda.mem_get_info(self.device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, (self.base + allowed) / whole), self.device)

    def lift(self) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    def lacked(self, problem: BaseException) -> int:
        """Return 0, unknown: reserved memory is not the memory in use."""
        return 0


LIMITS = {"cpu": Limit, "cuda": CudaLimit}


def margin_of(budget: int, share: float) -> int:
    """Return the bytes of the budget that a child may not use."""
    return int(budget * share)


def kind_of(problem: BaseException) -> Literal["memory", "doubtful", "error"]:
    """Return whether an exception, or one of its causes, says that memory is short."""
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
