"""What took a processor core away from this process while it was timing something."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

#: Seconds. On an idle machine a thread that wakes up waits less than this for its core.
WAKE_UP_SECONDS = 50e-6
#: The place of steal time in /proc/stat.
_STEAL = 7


class Interruptions:
    """Notice interruptions. It keeps a file open for each thread: use it as a context manager.

    Linux counts for each thread how long it was ready to run but had no core, and for a virtual machine how
    long the host ran something else (steal time). Every system counts how often the process was preempted.
    """

    def __init__(self) -> None:
        self._files: list[int] = []
        for file in Path("/proc/self/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # the thread has ended
                self._files.append(os.open(file, os.O_RDONLY))
        self._ticks = _processor_ticks()
        self.mark()

    def __enter__(self) -> Interruptions:
        return self

    def __exit__(self, *exception: object) -> None:
        while self._files:
            os.close(self._files.pop())

    def mark(self) -> None:
        """Begin to look for interruptions from now on."""
        self._marked = self._counts()

    def since_mark(self) -> bool:
        """Whether a thread of this process was preempted, or waited for a core, since the last `mark()`."""
        counts = zip(self._counts(), self._marked, strict=True)
        preemptions, waited, runs = (now - before for now, before in counts)
        return preemptions > 0 or waited > WAKE_UP_SECONDS * max(1, runs)

    def stolen_share(self) -> float:
        """The share of all cores' time that the host of a virtual machine took, since this was made."""
        now = _processor_ticks()
        total = sum(now) - sum(self._ticks)
        return (now[_STEAL] - self._ticks[_STEAL]) / total if total > 0 else 0.0

    def _counts(self) -> tuple[int, float, int]:
        """Preemptions of the process; seconds that its threads waited for a core, and how often they ran."""
        waited = runs = 0
        for file in self._files:
            with contextlib.suppress(OSError, ValueError):  # the thread has ended
                _, own_wait, own_runs = os.pread(file, 96, 0).split()
                waited, runs = waited + int(own_wait), runs + int(own_runs)
        return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw, waited * 1e-9, runs


def _processor_ticks() -> list[int]:
    """Ticks of all cores by what they did: user, nice, system, idle, iowait, irq, softirq and steal."""
    try:
        with Path("/proc/stat").open() as file:
            found = [int(number) for number in file.readline().split()[1 : _STEAL + 2]]
    except (OSError, ValueError):
        found = []
    return found if len(found) == _STEAL + 1 else [0] * (_STEAL + 1)
