"""Other processes to measure in."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """These variables for processes that start meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def use_all_cores() -> None:
    """Let this process's threads run on any: OpenMP may have held whoever started it to one."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
