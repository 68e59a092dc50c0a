"""Several ranks on this machine: pools of processes that run many functions, each in a process group."""

import atexit
import datetime
import functools
import gc
import inspect
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import forked

#: Seconds after which a pool that does not answer is given up, and a collective that is not joined.
PATIENCE, TIMEOUT = 900, 600


class Pool:
    """Processes in one process group, which run functions at the same time.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        pipes = [forked.context.Pipe() for _ in range(count)]
        self._ends = [mine for mine, _ in pipes]
        self._processes = [
            forked.context.Process(target=_serve, args=(rank, count, self._folder.name, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()
        atexit.register(self.close)

    def run(self, function: Callable[..., Any], arguments: tuple) -> list[Any]:
        """Return what the function returns on each rank.

        Raises:
            AssertionError: it failed on a rank, or does not end. The pool is of no use any more.
        """
        self._send(function, arguments)
        found: dict[Connection, tuple[bool, Any]] = {}
        while len(found) < self.count:
            awaited = [end for end in self._ends if end not in found]
            ready = wait(awaited, PATIENCE)
            found.update((end, _answer(end)) for end in awaited if end in ready)
            if not ready or not all(well for well, _ in found.values()):
                break  # the others may wait for the one that failed
        answers = [found.get(end, (False, "no answer")) for end in self._ends]
        if not all(well for well, _ in answers):
            self.close(patience=0)
            raise AssertionError("\n".join(f"rank {rank}: {said}" for rank, (_, said) in enumerate(answers)))
        return [value for _, value in answers]

    def run_last(self, function: Callable[..., Any], arguments: tuple) -> list[int]:
        """Run a function that may end processes, then end the others.

        Returns:
            The exit status of each process; below 0: the signal that it died by.

        Raises:
            AssertionError: it failed on a rank.
        """
        self._send(function, arguments)
        answers = [_answer(end) if end.poll(PATIENCE) else (False, "no answer") for end in self._ends]
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(PATIENCE)
        statuses = [process.exitcode for process in self._processes]
        self.close()
        failed = [
            said for (well, said), status in zip(answers, statuses, strict=True) if not (well or status)
        ]
        assert not failed, failed[0]
        return statuses

    def _send(self, function: Callable[..., Any], arguments: tuple) -> None:
        for end in self._ends:
            end.send((function, arguments))

    def close(self, patience: float = PATIENCE) -> None:
        """Let the processes end, as coverage needs; kill those that have not after so many seconds."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(patience)
            process.kill()
            process.join()
        if _pools.get(self.count) is self:
            del _pools[self.count]


_pools: dict[int, Pool] = {}


def _answer(end: Connection) -> tuple[bool, Any]:
    """Return whether all went well there, and what was returned, or the traceback."""
    try:
        return end.recv()
    except EOFError:
        return False, "the process has died"


def on_ranks(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run a function on each of so many ranks of a process group on gloo, and return what each returns.

    Args:
        count: how many ranks.
        function: of a module, so that its name is enough to find it.
        arguments: what it is called with, the same on every rank.
    """
    if count not in _pools:
        _pools[count] = Pool(count)
    return _pools[count].run(function, arguments)


def on_each_rank(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on each of so many ranks, with the same arguments."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        names = inspect.signature(test).parameters

        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            on_ranks(count, run, *(arguments[name] for name in names))

        return run

    return decorate


def fork_ranks(count: int, run: Callable[[int], None]) -> int:
    """Run a function in forked processes, each with its rank; return 0 if all succeed.

    The first one that fails ends the others, which may wait for it.
    """
    sys.stdout.flush()
    children = set()
    for rank in range(count):
        child = os.fork()
        if not child:
            status = 1
            try:
                run(rank)
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        children.add(child)
    failed = False
    while children:
        child, status = os.wait()
        children.discard(child)
        if status and not failed:
            failed = True
            for other in children:
                os.kill(other, signal.SIGKILL)
    return int(failed)


def _serve(rank: int, count: int, folder: str, end: Connection) -> None:
    import torch
    import torch.distributed as dist

    import fusedacc  # noqa: F401

    gc.freeze()  # collections, and the search for a DistributedDataParallel, need not look at all of torch
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    while True:
        try:
            function, arguments = end.recv()
        except EOFError:
            return
        try:
            end.send((True, inspect.unwrap(function)(*arguments)))
        except BaseException:
            end.send((False, traceback.format_exc()))
