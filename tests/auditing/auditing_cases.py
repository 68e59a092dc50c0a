"""Runs loops under the audit."""

import io
import math

import torch

import fusedacc
from fusedacc.auditing import Audit


def audited(function, **options) -> Audit:
    """Run a function under the audit, and return the report."""
    torch.manual_seed(0)
    with fusedacc.audit(output=io.StringIO(), **options) as report:
        function()
    return report


def factors(report: Audit) -> dict[str, float | None]:
    """Return the factor of each problem, by its kind, with four digits."""
    return {
        problem.kind: None if problem.factor is None else float(f"{problem.factor:.4g}")
        for problem in report.problems
    }


def are_close(found: dict[str, float | None], expected: dict[str, float | None]) -> bool:
    """Return whether problems have the same kinds and factors. Late gradients have inexact weights."""
    tolerances = {kind: 0.2 if kind == "stale" else 0.01 for kind in expected}
    return found.keys() == expected.keys() and all(
        found[kind] == factor
        if found[kind] is None or factor is None
        else math.isclose(found[kind], factor, rel_tol=tolerances[kind])
        for kind, factor in expected.items()
    )
