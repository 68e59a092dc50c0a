"""Shows the demo's progress: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from types import TracebackType

from tqdm import tqdm

#: The least number of seconds between two lines.
INTERVAL = 5.0


class Progress:
    """Counts updates and shows how many are done.

    Args:
        total: the expected number of updates.
        clock: returns the time in seconds.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._done, self._total = "", 0, total
        self._clock, self._printed = clock, -math.inf
        self._bar = tqdm(total=total, unit="update", dynamic_ncols=True) if sys.stderr.isatty() else None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def expect(self, more: int) -> None:
        """Add `more`, which may be negative, to the expected number of updates."""
        self._total += more
        if self._bar is not None:
            self._bar.total = self._total

    def begin(self, what: str) -> None:
        """Set the description of the next updates."""
        self._what = what
        if self._bar is not None:
            self._bar.set_postfix(refresh=False)
            self._bar.set_description(what)
        else:
            self._print("")

    def advance(self, updates: int = 1, loss: float | None = None) -> None:
        """Count finished updates. `loss` is the loss of the last one."""
        self._done += updates
        if self._bar is not None:
            if loss is not None:
                self._bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            self._bar.update(updates)
        else:
            self._print("" if loss is None else f", loss {loss:.3f}")

    def _print(self, loss: str) -> None:
        """Print a line if the last line is at least `INTERVAL` seconds old, and at the end."""
        now = self._clock()
        if now - self._printed >= INTERVAL or self._done >= self._total:
            self._printed = now
            print(f"{self._done} of {self._total} updates: {self._what}{loss}", file=sys.stderr, flush=True)
