"""Selects the cases of sweeps, which are tests of every combination of their parameters.

Mark a test with `sweep` if its parameters multiply. `make test` runs few cases: as many as are needed for
every pair of values of two parameters to occur. `make test-full` (FUSEDACC_FULL_TESTS=1) runs all cases.
`sweep(of=function)` pairs the traits that the function computes from the parameters, instead of the
parameters. `sweep(pairs=False)` runs even fewer cases: every value occurs, but not with every other value.
"""

import itertools
import os
from collections.abc import Hashable, Sequence
from typing import Any

import pytest

#: Whether all cases run.
FULL = os.environ.get("FUSEDACC_FULL_TESTS", "") not in ("", "0")

#: A parameter of a case and its value, by the value's identity; or a trait.
Value = tuple[str, Hashable]
#: One value, or a pair of values.
Meeting = frozenset[Value]


def _meetings(case: Sequence[Value], pairs: bool) -> set[Meeting]:
    """Return the values of a case, alone and, if `pairs`, in pairs."""
    return {frozenset(each) for each in itertools.combinations_with_replacement(case, 2 if pairs else 1)}


def thin(cases: Sequence[Sequence[Value]], pairs: bool = True) -> list[int]:
    """Select cases so that every pair of values that occurs in any case occurs in a selected one.

    If not `pairs`, it is enough that every value occurs.

    Each step selects the case that adds the most pairs. Among equals it selects cases that are spread over
    all cases, so that no value is preferred.

    Returns:
        The indices of the selected cases, in order.
    """
    bits: dict[Meeting, int] = {}
    #: The pairs of each case as the bits of a number, which are fast to count.
    wanted = [sum(bits.setdefault(each, 1 << len(bits)) for each in _meetings(case, pairs)) for case in cases]
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


def _options(case: pytest.Function) -> dict[str, Any]:
    """Return the arguments of the mark."""
    mark = case.get_closest_marker("sweep")
    assert mark is not None
    return dict(mark.kwargs)


def _values(case: pytest.Function) -> list[Value]:
    params, options = case.callspec.params, _options(case)
    if "of" in options:
        return sorted(options["of"](**params).items())
    return [(name, id(value)) for name, value in params.items()]  # tensors do not hash by value


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that `make test` skips."""
    sweeps: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sweep") is not None:
            sweeps.setdefault((item.parent.nodeid, item.originalname), []).append(item)  # type: ignore[union-attr]
    dropped = []
    for cases in sweeps.values():
        kept = set(thin([_values(case) for case in cases], _options(cases[0]).get("pairs", True)))
        dropped += [case for index, case in enumerate(cases) if index not in kept]
    return dropped
