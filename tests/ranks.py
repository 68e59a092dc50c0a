"""Several ranks on this machine: a pool of processes that stay up, and scripts in processes of their own."""

from __future__ import annotations

import atexit
import datetime
import functools
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import forked

#: Seconds after which a pool that does not answer is given up, and a collective that is not joined.
PATIENCE, TIMEOUT = 240, 60


class Pool:
    """Processes in one process group, which run functions at once.

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
        """What the function returns on each rank.

        Raises:
            AssertionError: it has failed on a rank, or does not end; the pool is of no more use then.
        """
        for end in self._ends:
            end.send((function, arguments))
        found: dict[Connection, tuple[bool, Any]] = {}
        while len(found) < self.count:
            awaited = [end for end in self._ends if end not in found]
            ready = wait(awaited, PATIENCE)
            found.update((end, _answer(end)) for end in awaited if end in ready)
            if not ready or not all(well for well, _ in found.values()):
                break  # the others may wait for the one that has failed
        answers = [found.get(end, (False, "no answer")) for end in self._ends]
        if not all(well for well, _ in answers):
            self.close()
            raise AssertionError("\n".join(f"rank {rank}: {said}" for rank, (_, said) in enumerate(answers)))
        return [value for _, value in answers]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        _pool.cache_clear()


def _answer(end: Connection) -> tuple[bool, Any]:
    """Whether all went well there, and what was returned, or an account of what did not."""
    try:
        return end.recv()
    except EOFError:
        return False, "the process has died"


@functools.cache
def _pool(count: int) -> Pool:
    return Pool(count)


def on_ranks(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What a function returns on each of so many ranks of a process group on gloo.

    Args:
        count: how many ranks.
        function: of a module, so that its name is enough to find it.
        arguments: what it is called with, the same on every rank.
    """
    return _pool(count).run(function, arguments)


def _serve(rank: int, count: int, folder: str, end: Connection) -> None:
    import torch
    import torch.distributed as dist

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
            end.send((True, function(*arguments)))
        except BaseException:
            end.send((False, traceback.format_exc()))


def start_ranks(folder: Path, text: str, ranks: int, *arguments: str) -> list[forked.Running]:
    """Start a script on so many ranks, with its rank, a file to meet at, the ranks and `arguments`."""
    meeting = folder / "rendezvous"
    meeting.unlink(missing_ok=True)
    given = str(meeting), str(ranks), *arguments
    return [forked.start(text, str(rank), *given, GLOO_SOCKET_IFNAME="lo") for rank in range(ranks)]


def run_on_ranks(
    folder: Path, text: str, ranks: int, *arguments: str, seconds: float = 120
) -> list[CompletedProcess[str]]:
    """As `start_ranks`, to their ends, within so many seconds; all must succeed."""
    ended = [rank.wait(seconds) for rank in start_ranks(folder, text, ranks, *arguments)]
    assert [each.returncode for each in ended] == [0] * ranks, "\n".join(
        each.stdout + each.stderr for each in ended
    )
    return ended


def run_on_two_ranks(folder: Path, text: str) -> None:
    """Run a script twice at once, with its rank and a file to meet at as arguments; both must succeed."""
    run_on_ranks(folder, text, 2)
