"""Who watches what the dispatcher cannot show: launches outside it, and the phase that the wrapper is in.

Nobody, as a rule: then a report costs one look at an empty list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor


class Observer(Protocol):
    """What `fusedacc.traffic.TrafficMeter` is to the code that it watches."""

    def launched(
        self,
        kernel: str,
        accumulators: Sequence[Tensor],
        gradients: Sequence[Tensor],
        scale: float | Tensor,
        overwrite: Sequence[bool],
        keep: float | Tensor,
    ) -> None:
        """A kernel has been launched that does accumulator <- beta * accumulator + scale * gradient.

        beta is 0 where it is overwritten, else `keep`.
        """

    def measured(self, kernel: str, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """A kernel has been launched that reads tensors and writes results."""

    def rows_added(
        self,
        kernel: str,
        table: Tensor,
        indices: Tensor,
        gradients: Tensor,
        scale: float | Tensor,
        padding: int,
    ) -> None:
        """A kernel has been launched that adds gradients into the rows of a table; -1: no padding."""

    def enter_phase(self, name: str) -> None: ...

    def leave_phase(self) -> None: ...


#: The observers that are watching now.
watching: list[Observer] = []


def launched(
    kernel: str,
    accumulators: Sequence[Tensor],
    gradients: Sequence[Tensor],
    scale: float | Tensor,
    overwrite: Sequence[bool],
    keep: float | Tensor,
) -> None:
    """Report a launch that does not go through torch's dispatcher."""
    for observer in watching:
        observer.launched(kernel, accumulators, gradients, scale, overwrite, keep)


def measured(kernel: str, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Report a launch outside the dispatcher that only reads its tensors."""
    for observer in watching:
        observer.measured(kernel, tensors, results)


def rows_added(
    kernel: str, table: Tensor, indices: Tensor, gradients: Tensor, scale: float | Tensor, padding: int
) -> None:
    """Report a launch outside the dispatcher that adds gradients into rows."""
    for observer in watching:
        observer.rows_added(kernel, table, indices, gradients, scale, padding)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Tell observers what the work inside is for, where they cannot see it."""
    observers = list(watching)
    for observer in observers:
        observer.enter_phase(name)
    try:
        yield
    finally:
        for observer in observers:
            observer.leave_phase()
