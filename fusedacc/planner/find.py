"""Find the largest micro-batch with which training runs, by trying each size in a separate process."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import math
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import spawn
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from .budget import address_space_bytes, available, check, check_int, format_bytes, parse_bytes

# The child process, and its messages to the parent

#: Messages of torch, C++, the system and OpenMP when memory is short.
SHORT = re.compile(
    r"can't allocate memory|cannot allocate memory|bad_alloc|out of memory|not enough memory"
    r"|MemoryError|can't start new thread|Thread creation failed",
    re.IGNORECASE,
)
#: Messages that may have this cause or another one: of oneDNN, and of workers that died.
DOUBTFUL = re.compile(r"could not (create|execute) a (primitive|memory)|DataLoader worker")
_ASKED = re.compile(r"tried to allocate (\d+) bytes")

#: Whether `Child` has started this process. Then `find_micro_batch_size` tries no sizes in it.
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

    def kept_free(self, budget: int) -> int:
        return int(budget * self.margin)


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

    def follow() -> None:
        connection.poll(None)  # until the parent is done or dead
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=follow, daemon=True).start()
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
        limit.set(budget - order.kept_free(budget))
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
    trace, pickled = "".join(traceback.format_exception(problem)), b""
    with contextlib.suppress(Exception):  # whatever it holds
        pickled = pickle.dumps(problem)
    return Failed(kind_of(problem) if limited else "error", what, trace, lacked, pickled)


# The parent

#: Characters of a child's output that an error repeats.
TAIL = 4000
#: Seconds between two checks of a child, and seconds that it may take to exit.
_LOOK, _EXIT = 0.1, 10.0


class Outcome(NamedTuple):
    """How a try ended.

    why: why it did not fit. doubtful: lack of memory is a possible but not a certain cause. lacked: at least
    so many bytes were missing; 0 if unknown.
    """

    fits: bool
    doubtful: bool = False
    why: str = ""
    lacked: int = 0


class Child:
    """A process that tries one size."""

    def __init__(self, order: Order, timeout: float, tell: Callable[[int, int, int], None]) -> None:
        self.order, self.timeout, self.tell = order, timeout, tell
        self.budget: int | None = None
        self.done = 0

    @contextlib.contextmanager
    def started(self) -> Iterator[Child]:
        """Context: the process runs. Leaving the context kills it and everything that it has started."""
        path = [os.path.abspath(each) for each in sys.path]
        code = f"import sys; sys.path[:] = {path!r}; from fusedacc.planner.find import main; "
        self.ours, theirs = Pipe()
        with tempfile.TemporaryFile() as self.written, self.ours, theirs:
            self.process = subprocess.Popen(
                [
                    os.fsdecode(spawn.get_executable()),
                    # This interpreter's options (-O, -W, -X), as multiprocessing passes them. The
                    # function is private to Python's library, so the type stubs lack it.
                    *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
                    *("-X", "faulthandler", "-c", f"{code}main({theirs.fileno()})"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=self.written,
                stderr=self.written,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            theirs.close()
            try:
                yield self
            finally:
                self._end()

    def _end(self) -> None:
        if self.process.returncode is None:
            # Its process id cannot have been reused, because no one has waited for the process.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def outcome(self) -> Outcome:
        """Follow the child until it ends."""
        try:
            self.ours.send(self.order)
            while True:
                said = self._next()
                if isinstance(said, Failed):
                    return self._failed(said)
                if said == DONE:
                    self._ends(_EXIT)
                    return Outcome(True)
                if said == UPDATED:
                    self.done += 1
                    self.tell(self.order.size, self.done, self.order.updates)
                else:
                    self.budget = said
        except TimeoutError:
            raise
        except (EOFError, OSError):
            return self._died()

    def _next(self) -> Any:
        """Return the child's next message."""
        began = time.monotonic()
        while not self.ours.poll(_LOOK):
            # A process started by the child may keep the connection open.
            if self._ends(0) and not self.ours.poll(0):
                raise EOFError
            if time.monotonic() - began > self.timeout:
                os.kill(self.process.pid, signal.SIGABRT)  # writes its stack
                self._ends(1.0)
                raise TimeoutError(
                    f"{self._where()} took longer than the timeout of {self.timeout:g} s{self._tail()}"
                )
        return self.ours.recv()

    def _ends(self, seconds: float) -> bool:
        """Return whether the process ends within that time. It stays a zombie, so its id is not reused."""
        end = time.monotonic() + seconds
        while os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() >= end:
                return False
            time.sleep(0.01)
        return True

    def _where(self) -> str:
        if self.budget is None:
            return "loading torch and the step in a separate process"
        return f"update {self.done + 1} with micro-batch size {self.order.size}"

    def _tail(self) -> str:
        """Return the end of the child's output. The file offset is shared with the child: do not seek."""
        length = os.fstat(self.written.fileno()).st_size
        text = os.pread(self.written.fileno(), TAIL, max(0, length - TAIL)).decode(errors="replace").strip()
        return f"; its process had written:\n{text}" if text else ""

    def _failed(self, said: Failed) -> Outcome:
        if said.kind == "memory":
            return Outcome(False, False, said.what, said.lacked)
        if said.kind == "doubtful":
            return Outcome(False, True, f"{said.what}\n\n{said.trace}")
        problem = None
        with contextlib.suppress(Exception):  # of a class that is not here, or that takes other arguments
            problem = pickle.loads(said.problem)
        raise RuntimeError(f"{self._where()} failed: {said.what}\n\n{said.trace}{self._tail()}") from (
            problem if isinstance(problem, BaseException) else None
        )

    def _died(self) -> Outcome:
        """Return the outcome of a child that ended without a message."""
        alone = self._ends(_EXIT)
        self._end()
        code, tail = self.process.returncode, self._tail()
        how = f"died by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        what = f"the process {how}{tail}" if alone else f"the process closed its connection{tail}"
        if self.budget is None:
            raise RuntimeError(f"{self._where()} failed: {what}")
        # The system sends SIGKILL when memory runs out.
        short = alone and (code == -signal.SIGKILL or SHORT.search(tail) is not None)
        return Outcome(False, not short, what)


#: Updates per try. The first one creates the optimizer state, so it needs less memory than the others.
TRIED_UPDATES = 3
#: Seconds between two updates of the progress bar.
_SHOWN = 0.1


class Try(NamedTuple):
    """A size, whether training ran with it, and the seconds of the try, process start included."""

    size: int
    fits: bool
    seconds: float


@dataclass(frozen=True)
class FoundSize:
    """What `find_micro_batch_size` found.

    Attributes:
        micro_batch_size: the largest size that ran.
        margin_bytes: the part of the budget that no try could use.
        budget_bytes: bytes that training may add to the loaded process.
        maximum: the argument.
        updates: number of updates that ran with this size.
        tries: all tries, in order.
    """

    micro_batch_size: int
    margin_bytes: int
    budget_bytes: int
    maximum: int
    updates: int
    tries: tuple[Try, ...]

    def __str__(self) -> str:
        given = format_bytes(self.budget_bytes - self.margin_bytes)
        above = [each.size for each in self.tries if not each.fits and each.size > self.micro_batch_size]
        end = f"{min(above)} does not fit" if above else f"{self.maximum} is the maximum"
        seconds = sum(each.seconds for each in self.tries)
        return (
            f"micro-batch size {self.micro_batch_size}: {self.updates} updates ran within {given}; {end}\n"
            f"budget {format_bytes(self.budget_bytes)}, of which {format_bytes(self.margin_bytes)} "
            f"were kept free as a margin\n"
            f"{len(self.tries)} tries in {seconds:.0f} s"
        )


def find_micro_batch_size(
    step: Callable[[], Callable[[int], object]],
    *,
    start: int = 1,
    maximum: int,
    memory_budget: int | str | None = None,
    device: torch.device | str = "cpu",
    steps: int = 100,
    margin: float = 0.05,
    timeout: float = 600.0,
    progress: bool = True,
) -> FoundSize:
    """Find the largest micro-batch with which training runs in a given amount of memory.

    Each try runs in a new process, so the caller's memory, random state, data and limits stay unchanged. The
    output of a try is shown only in an error. Files that the step writes, and the caches of libraries,
    remain.

    A size fits if three updates run. The search doubles or halves from `start`, then bisects. The size found
    must then run for `steps` updates; otherwise the next smaller size that does is returned.

    Args:
        step: called once in each process, without arguments. It builds model, optimizer and data, and returns
            a callable `run(micro_batch_size)` that makes one whole update with all its micro-batches; its
            result is ignored. `step` must be picklable: a function of a module, a `functools.partial` of one,
            or an instance of a class of a module. If it is defined in a script, each process imports the
            script, so the script must start its work under `if __name__ == "__main__":`.
        start: the first size to try, ideally a prediction.
        maximum: the largest size to try.
        memory_budget: bytes that training, model and optimizer included, may add to a process that has loaded
            torch and the step's module; or text such as "24GiB". None: the free memory of the device. On a
            CPU it limits the address space, which includes mapped files, thread stacks and freed memory that
            the C library keeps; on a GPU it limits what torch's allocator reserves.
        device: the device that training uses and whose memory is limited: "cpu" or a CUDA GPU. The step
            places its own tensors.
        steps: updates that the found size must run for.
        margin: share of the budget that tries may not use, because memory fragments in longer runs.
        timeout: seconds that a process may take to load, and that each update may take; the first update
            includes `step()`.
        progress: show a progress bar if tqdm is installed.

    Raises:
        TypeError, ValueError: an argument is wrong; no process has been started.
        torch.OutOfMemoryError: not even one sample fits.
        TimeoutError: a process or an update took longer than `timeout`.
        RuntimeError: the step raised another error, or its process died for a reason other than memory.
    """
    finder = _Finder(
        _trial_spec(step, device, memory_budget, margin),
        check("timeout", timeout, "a number, seconds above 0", int | float, lambda number: number > 0),
        check_int("steps", steps, TRIED_UPDATES),
        check_int("maximum", maximum, 1),
    )
    if check_int("start", start, 1) > maximum:
        raise ValueError(f"start is at most maximum, {maximum}; it was {start}")
    if in_child:
        raise RuntimeError(
            "find_micro_batch_size was called while a try of it imports the module that the step is from: a "
            'script must start its work under `if __name__ == "__main__":`'
        )
    with _bar(progress) as bar:
        finder.bar = bar
        return finder.find(start)


def _trial_spec(step: object, device: torch.device | str, budget: int | str | None, margin: float) -> Order:
    """Check the arguments, and return the part of the order that all tries share."""
    if not callable(step):
        raise TypeError(
            f"step is a callable without arguments, which returns run(micro_batch_size); it was {step!r}"
        )
    try:
        # Not multiprocessing's pickler, which would move the caller's tensors to shared memory.
        pickled = pickle.dumps(step)
    except Exception as problem:
        raise TypeError(
            f"step must be picklable, because each try runs in a separate process; {step!r} is not "
            f"({problem}). Move lambdas and local functions to module level"
        ) from problem
    where = torch.device(device)
    if where.type not in LIMITS:
        raise ValueError(f'device is "cpu" or "cuda"; it was "{where}"')
    if where.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f'device is "{where}", and torch.cuda.is_available() is false')
        if str(where) == "cuda":
            index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
            where = torch.device("cuda", index)
    elif not Path("/proc/self/statm").exists():
        raise RuntimeError("CPU memory can be limited on Linux only: /proc/self/statm does not exist")
    return Order(
        pickled,
        _main_module_spec() if b"__main__" in pickled else {},
        str(where),
        torch.get_num_threads(),
        size=0,
        updates=TRIED_UPDATES,
        budget=None if budget is None else parse_bytes(budget, "memory_budget"),
        margin=check("margin", margin, "a number, at least 0 and below 1", int | float, lambda m: 0 <= m < 1),
    )


def _main_module_spec() -> dict[str, Any]:
    """Return what recreates the caller's `__main__` in a child.

    `spawn.get_preparation_data` would fix the start method of the caller's own processes.
    """
    module = sys.modules["__main__"]
    same: dict[str, Any] = {"sys_argv": sys.argv, "dir": os.getcwd()}
    name = getattr(getattr(module, "__spec__", None), "name", None)
    if name is not None:
        return {**same, "init_main_from_name": name}
    path = getattr(module, "__file__", None)
    if path is None or not Path(path).exists():
        raise TypeError(
            "step is from an interactive session, which another process cannot import; move it to a module"
        )
    return {**same, "init_main_from_path": os.path.abspath(path)}


@contextlib.contextmanager
def _bar(progress: bool) -> Any:
    """Context: a progress bar that counts tries, or None. It starts no thread and no process lock."""
    try:
        from tqdm import tqdm
    except ImportError:
        progress = False
    if not progress:
        yield None
        return

    class Bar(tqdm):
        monitor_interval = 0

    Bar.set_lock(threading.RLock())
    shape = "{desc} [{n_fmt} tried, {elapsed}{postfix}]"
    with Bar(desc="micro-batch size", bar_format=shape, dynamic_ncols=True, leave=False) as bar:
        yield bar


def search(attempt: Callable[[int], Outcome], start: int, maximum: int, near: bool = False) -> int:
    """Return the largest size that fits, 0 if none does; assumes that smaller sizes fit too. Tries each size
    at most once. near: the result is likely slightly below `start`.
    """
    low, high, size = 0, maximum + 1, start
    while high - low > 1:
        outcome = attempt(size)
        if outcome.fits:
            low = size
        else:
            high = size
        if high > maximum:
            size = min(2 * low, maximum)
        elif low > 0:
            size = (low + high) // 2
        elif near:
            size = max(1, 2 * high - start - 1)  # 1, 3, 7 ... below the start
        else:
            # If the process died, try the smallest size: it shows most quickly whether it always dies.
            size = 1 if outcome.doubtful else high // 2
    return low


class _Finder:
    def __init__(self, order: Order, timeout: float, steps: int, maximum: int) -> None:
        self.order, self.timeout, self.steps, self.maximum = order, timeout, steps, maximum
        self.tries: list[Try] = []
        self.outcomes: dict[int, Outcome] = {}
        self.bar: Any = None
        self.shown = -math.inf

    def find(self, start: int) -> FoundSize:
        size = search(self.attempt, start, self.maximum)
        size = search(lambda size: self.attempt(size, self.steps), size, size, near=True)
        if size == 0:
            self._refuse(self.outcomes[1])
        if size + 1 in self.outcomes and self.outcomes[size + 1].doubtful:
            self._verify(size + 1)
        budget = self.order.budget or 0
        kept = self.order.kept_free(budget)
        return FoundSize(size, kept, budget, self.maximum, self.steps, tuple(self.tries))

    def attempt(self, size: int, updates: int = TRIED_UPDATES) -> Outcome:
        """Try a size within the budget. If the caller gave no budget, the first try determines it."""
        began = time.monotonic()
        self._show_progress(size, 0, updates)
        outcome, budget = self._outcome(size=size, updates=updates)
        self.order = dataclasses.replace(self.order, budget=budget or self.order.budget)
        self.outcomes[size] = outcome
        self.tries.append(Try(size, outcome.fits, time.monotonic() - began))
        if self.bar is not None:
            self.bar.update()
        return outcome

    def _outcome(self, **changed: Any) -> tuple[Outcome, int]:
        """Run a try of a changed order, and return its budget too."""
        order = dataclasses.replace(self.order, **changed)
        with Child(order, self.timeout, self._show_progress).started() as child:
            return child.outcome(), child.budget or 0

    def _show_progress(self, size: int, done: int, updates: int) -> None:
        now = time.monotonic()
        if self.bar is not None and (done == 0 or now - self.shown >= _SHOWN):
            self.shown = now
            known = ", ".join(f"{each.size}{'' if each.fits else ' does not'}" for each in self.tries[-3:])
            self.bar.set_postfix_str(f"fits: {known}" if known else "", refresh=False)
            self.bar.set_description_str(f"micro-batch size {size}, {done} of {updates} updates")

    def _refuse(self, one: Outcome) -> None:
        if one.doubtful:
            raise RuntimeError(f"the step does not run with micro-batch size 1: {one.why}")
        budget = self.order.budget or 0
        kept = self.order.kept_free(budget)
        lacked = f", which lacked {format_bytes(one.lacked)} at least" if one.lacked else ""
        raise torch.OutOfMemoryError(
            f"micro-batch size 1 does not fit within {format_bytes(budget - kept)}, the budget of "
            f"{format_bytes(budget)} less a margin of {format_bytes(kept)}{lacked}: {one.why}"
        )

    def _verify(self, size: int) -> None:
        """Raise RuntimeError if a size that failed fails with all free memory too, if that is much more."""
        outcome, budget = self._outcome(size=size, budget=None)
        if outcome.doubtful and budget > 1.25 * (self.order.budget or 0):
            raise RuntimeError(
                f"the step fails with micro-batch size {size}, also with all free memory: {outcome.why}"
            )
