"""The report: as text for people, and as JSON for programs."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from .findings import Findings, Problem, Row
from .number_ranges import NumberRanges
from .records import History
from .wording import format_fraction, is_close

#: The version of the JSON's schema.
VERSION = 1
#: Rows of the table, problems, notes and lines with optimizers that the text shows.
MAX_ROWS, MAX_PROBLEMS, MAX_NOTES, MAX_OPTIMIZERS = 10, 6, 5, 6
#: Width of a column with weights.
MAX_WEIGHTS_WIDTH = 60

LEGEND = (
    "A micro-batch is one backward pass. Its weight says how much its loss counts in an update: 1/4 each is "
    "the mean of 4."
)

UNKNOWN_LOSS = (
    "some losses do not show by what they are divided (compiled, or unusual): only whether micro-batches "
    "count the same was checked"
)


UNDIVIDED_SUM = "some losses are sums that nothing divides: what their weights should add up to is not known"


@dataclass(frozen=True)
class Report:
    """What an audit found.

    Attributes:
        title: the name of the script.
        status: 0: no problem; 1: problems; 2: nothing could be checked.
        history: optimizers, ranks and notes.
        findings: of all updates.
        problems: what is wrong.
        rounding: by 16-bit dtype: the largest relative error of its sums.
        scale: what the weights of a window should add up to, if the user has said it.
        audit_seconds, total_seconds: time of the audit, and of the script with it.
    """

    title: str
    status: int
    history: History
    findings: Findings
    problems: list[Problem]
    rounding: dict[str, float]
    scale: float | None
    audit_seconds: float
    total_seconds: float

    def as_text(self) -> str:
        """Return about 45 lines at most."""
        lines = [f"Gradient accumulation of {self.title}: {', '.join(self._facts())}"]
        table = self._table()
        lines += [LEGEND, *self._optimizers(), "", *table] if table else [""]
        with_optimizers = len(self._groups()) > 1
        for problem in self.problems[:MAX_PROBLEMS]:
            lines += [problem.describe(with_optimizers), ""]
        more = len(self.problems) - MAX_PROBLEMS
        if more > 0:
            lines.append(f"({more} more problems, which --json lists)")
        lines += [
            f"note rounding: {dtype} sums change the gradients by up to {error:.2%}"
            for dtype, error in self.rounding.items()
        ]
        lines += [f"note: {note}" for note in list(self.history.notes)[:MAX_NOTES]]
        return "\n".join([*lines, self._last_line()])

    def _facts(self) -> list[str]:
        findings, history = self.findings, self.history
        names = Counter(listed.name for listed in history.optimizers.values())
        facts = [f"{findings.micro_batches} micro-batches", f"{findings.updates} updates"]
        facts += [f"{count} {name}" if count > 1 else name for name, count in names.items()]
        facts += sorted(map(dtype_name, findings.rest))
        return facts + ([f"{history.num_ranks} ranks"] if history.num_ranks > 1 else [])

    def _optimizers(self) -> list[str]:
        """Return a line for each optimizer, if there are several and it is known where they were made."""
        places: dict[str, NumberRanges] = {}
        for listed in self.history.optimizers.values():
            places.setdefault(str(listed), NumberRanges()).add(listed.place + 1)
        if len(self._groups()) == 1 or not any(listed.made for listed in self.history.optimizers.values()):
            return []
        lines = [
            f"Optimizer{'s' * (len(numbers) > 1)} {numbers}: {text}." for text, numbers in places.items()
        ]
        return lines[:MAX_OPTIMIZERS]

    def _last_line(self) -> str:
        count = len(self.problems)
        verdict = {0: "No problem found.", 1: f"{count} problem{'s' * (count > 1)} found."}
        text = verdict.get(self.status, "Nothing could be checked.")
        if self.status == 2 and self.findings.checked:
            text = "The audit is not complete."
        if self.findings.unmade:
            checks = " or ".join(sorted(self.findings.unmade, reverse=True))
            problems = {0: "ignored problems", 1: "this problem"}.get(count, "these problems")
            text += f" In the updates with {problems} the audit did not check {checks}."
            text += f" Fix {'it' if count == 1 else 'them'}, then audit again."
        return f"{text} The audit took {self.audit_seconds:.1f} of {self.total_seconds:.1f} s."

    def _table(self) -> list[str]:
        rows = self._rows()
        if not rows:
            return []
        first = min(max(14, *(len(label) for label, _ in rows)), MAX_WEIGHTS_WIDTH)
        second = min(max(14, *(len(row.weights) for _, row in rows)), MAX_WEIGHTS_WIDTH)
        updates = "updates (optimizer)" if len(self._groups()) > 1 else "updates"
        first = max(first, len(updates))
        sums = self._head_of_sums(rows)
        third = max(len(sums), 5, *(len(row.total) for _, row in rows))
        lines = [f"{updates:{first}}  micro-batches  {'weight of each':{second}}  {sums}"]
        shown = rows[:6] + rows[-3:] if len(rows) > MAX_ROWS else rows
        for label, row in shown:
            weights = textwrap.shorten(row.weights, MAX_WEIGHTS_WIDTH, placeholder=" ...")
            cells = f"{label:{first}}", f"{row.micro_batches:<13}", f"{weights:{second}}"
            lines.append("  ".join([*cells, f"{row.total:{third}}", row.verdict]).rstrip())
        if len(rows) > MAX_ROWS:
            lines.insert(-3, f"... {len(rows) - 9} more rows")
        return [*lines, ""]

    def _head_of_sums(self, rows: list[tuple[str, Row]]) -> str:
        """Return the head of the column of sums. It says which sum is right, if that is certain."""
        right = 1.0 if self.scale is None else self.scale
        checked = [row for _, row in rows if not row.verdict.startswith("PROBLEM")]
        # A sum that is not 1 may be right: a factor of the loss's own, or clipping by the script's own code.
        return (
            f"sum ({format_fraction(right)} is right)"
            if all(is_close(number, right) for row in checked for number in _numbers(row.total))
            else "sum"
        )

    def _groups(self) -> list[list[int]]:
        """Return the optimizers, those with the same rows together."""
        groups: dict[str, list[int]] = {}
        for place, rows in self.findings.rows.items():
            groups.setdefault(repr([(*row, str(at)) for row, at in rows.items()]), []).append(place)
        return list(groups.values())

    def _rows(self) -> list[tuple[str, Row]]:
        """Return each row with the numbers of its updates."""
        groups = self._groups()
        found = []
        for places in groups:
            numbers = ", ".join(str(place + 1) for place in places[:3]) + "..." * (len(places) > 3)
            label = f" ({numbers})" if len(groups) > 1 else ""
            found += [(f"{at}{label}", row) for row, at in self.findings.rows[places[0]].items()]
        return found

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values: the documented schema."""
        findings, history = self.findings, self.history
        return {
            "version": VERSION,
            "status": self.status,
            "micro_batches": findings.micro_batches,
            "updates": findings.updates,
            "checked": findings.checked,
            "ranks": history.num_ranks,
            "optimizers": [listed.name for listed in history.optimizers.values()],
            "problems": [_problem_as_json(problem) for problem in self.problems],
            "rounding": self.rounding,
            "notes": list(history.notes),
            "table": [
                _row_as_json(place, row, at)
                for place, rows in findings.rows.items()
                for row, at in rows.items()
            ],
            "seconds": {"audit": round(self.audit_seconds, 3), "total": round(self.total_seconds, 3)},
        }


def _numbers(total: str) -> list[float]:
    """Return the sums in a cell of the table, such as "1/2" or "1 for each loss"."""
    return [float(Fraction(number)) for number in re.findall(r"-?\d[\d./e-]*", total)]


def _problem_as_json(problem: Problem) -> dict[str, Any]:
    return {
        "kind": problem.kind,
        "updates": list(problem.updates),
        "optimizers": sorted(problem.optimizers),
        "factor": None if problem.factor is None else float(f"{problem.factor:.6g}"),
        "text": problem.text,
        "location": problem.location or None,
    }


def _row_as_json(place: int, row: Row, updates: NumberRanges) -> dict[str, Any]:
    return {
        "optimizer": place,
        "updates": list(updates),
        "micro_batches": row.micro_batches,
        "weights": row.weights,
        "sum": row.total,
        "verdict": row.verdict,
    }


def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def find_rounding(findings: Findings, history: History) -> dict[str, float]:
    """Return the errors of 16-bit sums by dtype. Larger rests, and unknown losses, become notes."""
    if findings.has_unknown_loss:
        history.add_note(UNKNOWN_LOSS)
    if findings.has_undivided_sum:
        history.add_note(UNDIVIDED_SUM)
    rounding = {}
    for dtype, rest in sorted(findings.rest.items(), key=str):
        eps = torch.finfo(dtype).eps
        if rest > 50 * eps:
            history.add_note(
                f"up to {rest:.1%} of a gradient is something else: noise, decay, clipping by value, a hook"
            )
        elif eps > 1e-4:
            rounding[dtype_name(dtype)] = rest
    return rounding
