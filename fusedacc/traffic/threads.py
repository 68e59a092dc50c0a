"""Which threads ran beside a meter: torch shows a thread's operators to the modes of that thread only."""

from __future__ import annotations

import sys
import threading
from typing import Any

#: Names of threads that run no operator: that of tqdm's progress bars looks after those that stand still.
IDLE = frozenset({"tqdm_monitor"})


class Threads:
    """Python's threads that are alive between `begin` and `end`, but for those in which operators were seen.

    The engine's own threads run under the modes of the thread that has called `backward()`, and are no
    Python threads.
    """

    def __init__(self) -> None:
        #: Names by number, which a thread that has ended leaves to another.
        self._alive: dict[int, set[str]] = {}
        self._seen: set[int] = set()
        self._former: Any = None
        self._ended = False

    def begin(self) -> None:
        """Note who is alive, and from now on who begins."""
        self._note_all()
        self._ended, self._former = False, threading.getprofile()
        threading.setprofile(self._begins)

    def end(self) -> None:
        """Look no longer."""
        self._ended = True
        if self._looks():  # else somebody else does by now
            threading.setprofile(_still_wanted(self._former))

    def saw(self) -> None:
        """An operator of the current thread was seen."""
        self._seen.add(threading.get_ident())

    def unseen(self) -> list[str]:
        """Names of the threads in which no operator was seen."""
        others = (names for number, names in self._alive.items() if number not in self._seen)
        return sorted(name for names in others for name in names)

    def clear(self) -> None:
        """Begin anew."""
        self._alive.clear()
        self._seen.clear()
        if self._looks():
            self._note_all()

    def _looks(self) -> bool:
        return threading.getprofile() == self._begins

    def _note_all(self) -> None:
        self.saw()
        for thread in threading.enumerate():
            if type(thread).__name__ != "_DummyThread":  # not Python's, and never taken off the list
                self._note(thread)

    def _note(self, thread: threading.Thread) -> None:
        assert thread.ident is not None
        if thread.name not in IDLE:
            self._alive.setdefault(thread.ident, set()).add(thread.name)

    def _begins(self, frame: Any, event: str, argument: Any) -> None:
        """The profile function of a thread that begins: it steps aside at once."""
        sys.setprofile(self._former)
        self._note(threading.current_thread())
        if self._former is not None:
            self._former(frame, event, argument)


def _still_wanted(function: Any) -> Any:
    """The profile function that was there before, but for those of meters that have ended meanwhile."""
    owner = getattr(function, "__self__", None)
    return _still_wanted(owner._former) if isinstance(owner, Threads) and owner._ended else function
