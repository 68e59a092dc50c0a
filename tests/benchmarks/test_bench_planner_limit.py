"""The planner's choice against what runs: rows, and what processes are handed."""

import pickle
from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness.results import Results
from benchmarks.report.accuracy import limits
from benchmarks.suites import planner_limit


@pytest.fixture
def largest(monkeypatch):
    """What is found, in turns; the steps that were to be tried."""
    asked = []

    def find(step, **options):
        asked.append((step, options))
        return SimpleNamespace(micro_batch_size=options["start"] + (3 if len(asked) % 2 == 0 else 1))

    monkeypatch.setattr(planner_limit, "find_micro_batch_size", find)
    return asked


def test_rows_hold_the_choice_to_within_one_where_memory_is_mapped(largest):
    results = Results(None, torch.device("cpu"))
    planner_limit.figures(results, "quick")
    ours = {row.mode: row for row in results.rows if row.provider == planner_limit.OURS}
    assert ours["memory mapped"].reached == "yes"
    assert ours["defaults"].reached == ""
    found = {row.mode: row.median for row in results.rows if row.provider == planner_limit.LARGEST}
    chosen = ours["defaults"].median
    assert found == {"memory mapped": chosen + 1, "defaults": chosen + 3}


def test_what_is_tried_can_be_pickled_and_runs(largest):
    planner_limit.figures(Results(None, torch.device("cpu")), "quick")
    step, options = largest[0]
    assert options["margin"] == 0.0
    pickle.loads(pickle.dumps(step))()(2)


def test_table_has_the_newest_rows():
    rows = []
    for planned, mapped, defaults in ((5, 5, 4), (6, 7, 3)):
        for mode, provider, value in (
            ("memory mapped", planner_limit.OURS, planned),
            ("memory mapped", planner_limit.LARGEST, mapped),
            ("defaults", planner_limit.LARGEST, defaults),
        ):
            about = {"benchmark": "planner limit", "case": "gpt", "shapes": "small; 1MiB"}
            machine = dict.fromkeys(("device", "threads", "allocator", "torch", "cuda", "commit", "date"), "")
            rows.append(about | machine | {"mode": mode, "provider": provider, "median": str(value)})
    assert limits(rows).splitlines()[-1] == "| gpt: small; 1MiB | 6 | 7 | 3 |"
    assert limits([]) == ""
