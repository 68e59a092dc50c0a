"""How far the demo is: a bar on a terminal, a line every few seconds anywhere else."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

#: Seconds between two lines.
INTERVAL = 5.0


class Progress:
    """Counts updates.

    Args:
        total: how many are expected.
    """

    def __init__(self, total: int) -> None:
        self._what, self._done, self._total, self._printed = "", 0, total, -INTERVAL
        self._bar = tqdm(total=total, unit="update", dynamic_ncols=True) if sys.stderr.isatty() else None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def expect(self, more: int) -> None:
        """Change the number of updates that are expected by `more`."""
        self._total += more
        if self._bar is not None:
            self._bar.total = self._total

    def begin(self, what: str) -> None:
        """Name what the next updates belong to."""
        self._what = what
        if self._bar is not None:
            self._bar.set_postfix(refresh=False)
            self._bar.set_description(what)

    def advance(self, updates: int = 1, loss: float | None = None) -> None:
        """Count updates that are done; `loss`: of the last one."""
        self._done += updates
        if self._bar is not None:
            if loss is not None:
                self._bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            self._bar.update(updates)
        elif time.monotonic() - self._printed >= INTERVAL or self._done >= self._total:
            self._printed = time.monotonic()
            told = "" if loss is None else f", loss {loss:.3f}"
            print(f"{self._done} of {self._total} updates: {self._what}{told}", file=sys.stderr, flush=True)
