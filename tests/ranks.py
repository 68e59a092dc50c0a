"""Runs functions on several ranks on this machine, in pools of processes that form a process group."""

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
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import forked
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fusedacc

#: Seconds to wait for a pool's answer, and for all ranks to join a collective.
PATIENCE, TIMEOUT = 900, 600


class Pool:
    """Processes in one process group, which run functions at the same time.

    Args:
        count: the number of processes.
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
        """Run a function on each rank and return the results.

        Raises:
            AssertionError: the function failed on a rank or did not end. The pool cannot be used any more.
        """
        self._send(function, arguments)
        found: dict[Connection, tuple[bool, Any]] = {}
        while len(found) < self.count:
            awaited = [end for end in self._ends if end not in found]
            ready = wait(awaited, PATIENCE)
            found.update((end, _answer(end)) for end in awaited if end in ready)
            if not ready or not all(well for well, _ in found.values()):
                break  # the other ranks may wait for the rank that failed
        answers = [found.get(end, (False, "no answer")) for end in self._ends]
        if not all(well for well, _ in answers):
            self.close(patience=0)
            raise AssertionError("\n".join(f"rank {rank}: {said}" for rank, (_, said) in enumerate(answers)))
        return [value for _, value in answers]

    def run_last(self, function: Callable[..., Any], arguments: tuple) -> list[int]:
        """Run a function that may end processes, then end the others.

        Returns:
            The exit status of each process. Negative: the signal that killed it.

        Raises:
            AssertionError: the function failed on a rank.
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
        """Let the processes end normally, as coverage needs, and kill those that do not end in time."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(patience)
            process.kill()
            process.join()
        if _pools.get(self.count) is self:
            del _pools[self.count]


_pools: dict[int, Pool] = {}


def close_pools() -> None:
    """End the processes of all ranks. The next test starts new ones."""
    for pool in list(_pools.values()):
        pool.close()


def _answer(end: Connection) -> tuple[bool, Any]:
    """Return whether the function succeeded, and its result or the traceback."""
    try:
        return end.recv()
    except EOFError:
        return False, "the process has died"


def on_ranks(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run a function on several ranks of a gloo process group, and return the result of each rank.

    Args:
        count: the number of ranks.
        function: a function of a module, so that the ranks can import it by name.
        arguments: the function's arguments, the same on every rank.
    """
    if count not in _pools:
        _pools[count] = Pool(count)
    return _pools[count].run(function, arguments)


@functools.cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """On a rank: return a mesh of this pool's ranks, the same one for all tests.

    Each process group on gloo has threads that wake up a hundred times a second, and DTensors keep theirs.
    """
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def on_each_rank(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on each of several ranks, with the same arguments."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        names = inspect.signature(test).parameters

        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            on_ranks(count, run, *(arguments[name] for name in names))

        return run

    return decorate


def fork_ranks(count: int, run: Callable[[int], None]) -> int:
    """Run a function in forked processes, each with its rank. Return 0 if all succeed.

    After the first failure the other processes are ended, because they may wait for the failed one.
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


#: All wrappers of this process that have not been freed. `close_wrappers` empties the set.
_wrappers: weakref.WeakSet[fusedacc.AccumulatingOptimizer] = weakref.WeakSet()


@functools.wraps(fusedacc.AccumulatingOptimizer.__init__)  # `inspect.signature` reads `__new__` first
def _new(kind: type[fusedacc.AccumulatingOptimizer], *_: Any, **__: Any) -> fusedacc.AccumulatingOptimizer:
    made = object.__new__(kind)
    _wrappers.add(made)
    return made


fusedacc.AccumulatingOptimizer.__new__ = _new


def close_wrappers() -> None:
    """Close every wrapper that a test has left, because reference cycles may keep some alive."""
    for each in list(_wrappers):
        if vars(each).get("_closed") is False:
            each.close()
    _wrappers.clear()


def _serve(rank: int, count: int, folder: str, end: Connection) -> None:
    gc.freeze()  # makes garbage collections and the search for DDP skip torch's objects
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
            result = inspect.unwrap(function)(*arguments)
            close_wrappers()
            end.send((True, result))
            gc.collect()
            gc.freeze()
        except BaseException:
            end.send((False, traceback.format_exc()))
