"""Sweeps: tests of every combination of their parameters, of which `make test` runs a part.

A test marked `sweep` has parameters that multiply. `make test` runs of it as few cases as hold every value of
every parameter beside every value of every other one; `make test-full` (FUSEDACC_FULL_TESTS=1) runs them all.
`sweep(of=function)` counts what the function makes of the parameters, traits by name, in their place.
"""

import itertools
import os
from collections.abc import Hashable, Sequence

import pytest

#: Whether all cases are to run.
FULL = os.environ.get("FUSEDACC_FULL_TESTS", "") not in ("", "0")

#: Of a case, which value of which parameter it has, the value by its identity; or which trait.
Value = tuple[str, Hashable]
#: A value, or two that meet.
Meeting = frozenset[Value]


def _meetings(case: Sequence[Value]) -> set[Meeting]:
    """The values of a case, alone and in pairs."""
    return {frozenset(pair) for pair in itertools.combinations_with_replacement(case, 2)}


def thin(cases: Sequence[Sequence[Value]]) -> list[int]:
    """Of all cases the indices of some in which every two values meet that meet in any; in order.

    Always that which adds the most, and of several the one furthest on a walk through them, so that no value
    is preferred where the pairs leave a choice.
    """
    bits: dict[Meeting, int] = {}
    #: The meetings of each case, as the bits of a number, which are quick to count.
    wanted = [sum(bits.setdefault(each, 1 << len(bits)) for each in _meetings(case)) for case in cases]
    missing = (1 << len(bits)) - 1
    left, chosen = list(range(len(cases))), []
    while missing:
        start = 7919 * len(chosen)
        most = max((wanted[index] & missing).bit_count() for index in left)
        best = max(
            (index for index in left if (wanted[index] & missing).bit_count() == most),
            key=lambda index: (index + start) % len(cases),
        )
        chosen.append(best)
        left.remove(best)
        missing &= ~wanted[best]
    return sorted(chosen)


def _values(case: pytest.Function) -> list[Value]:
    mark = case.get_closest_marker("sweep")
    assert mark is not None
    params = case.callspec.params
    if "of" in mark.kwargs:
        return sorted(mark.kwargs["of"](**params).items())
    return [(name, id(value)) for name, value in params.items()]  # tensors have no order and no hash by value


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Those of the tests that `make test` need not run."""
    sweeps: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sweep") is not None:
            sweeps.setdefault((item.parent.nodeid, item.originalname), []).append(item)  # type: ignore[union-attr]
    dropped = []
    for cases in sweeps.values():
        kept = set(thin([_values(case) for case in cases]))
        dropped += [case for index, case in enumerate(cases) if index not in kept]
    return dropped
