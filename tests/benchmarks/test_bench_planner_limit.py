"""The planner's choice against what runs: rows, and what processes are handed."""

import pickle
from types import SimpleNamespace

import torch

from benchmarks.suites import planner_limit
from fusedacc.commands.measuring.records import Results


def test_rows_hold_the_choice_to_within_one_where_memory_is_mapped(monkeypatch):
    tried = []

    def find(step, **options):
        tried.append((step, options))
        return SimpleNamespace(micro_batch_size=options["start"] + 2 * len(tried) - 1)

    monkeypatch.setattr(planner_limit, "find_micro_batch_size", find)
    results = Results(None, torch.device("cpu"))
    planner_limit.figures(results, "quick")
    ours = {row.mode: row for row in results.rows if row.provider == planner_limit.OURS}
    assert ours["memory mapped"].reached == "yes"
    assert ours["defaults"].reached == ""
    found = {row.mode: row.median for row in results.rows if row.provider == planner_limit.LARGEST}
    chosen = ours["defaults"].median
    assert found == {"memory mapped": chosen + 1, "defaults": chosen + 3}
    step, options = tried[0]
    assert options["margin"] == 0.0
    pickle.loads(pickle.dumps(step))()(2)  # as the process that tries it gets it
