"""The benchmarks' common code. No test checks times."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch
from bench_setup import run_main, some_rows

from benchmarks import harness, run_all
from benchmarks.records import Case, Goal, Results, Variant, measure, read, table

# Timing


def clock(**seconds):
    """Return a timer that reports the given times of each variant, starting with its untimed first call."""
    times = {name: iter(own) for name, own in seconds.items()}
    return lambda work, calls: next(times[work()])


def test_figures_are_medians_and_ratios_within_a_round():
    goals = (Goal("slow", 4.0), Goal("slow", 2.5, by_bandwidth=True))
    variants = [Variant("slow", lambda: "slow", 100), Variant("fast", lambda: "fast", 50, goals)]
    timer = clock(slow=[9.0, 4.0, 2.0, 8.0], fast=[9.0, 1.0, 1.0, 2.0])
    slow, by_time, by_bandwidth = measure(Case("tests", "case"), variants, range(-1, 3), timer=timer)
    assert (slow.median, slow.p20, slow.p80, slow.rounds) == (4e6, 2e6, 8e6, 3)
    assert slow.gb_per_s == 25 / 1e9
    assert slow.percent_of_peak is None, "a peak without a measured copy"
    reached = [(row.against, row.speedup, row.reached) for row in (by_time, by_bandwidth)]
    assert reached == [("slow", 4.0, "yes"), ("slow (bytes/s)", 2.0, "no")]
    shown = table([slow, by_time, by_bandwidth])
    assert [shown.count(words) for words in ("fast", "goal 4 reached", "goal 2.5 MISSED")] == [1, 1, 1]


# Rows that are kept


def test_the_file_grows_by_rows_that_name_their_conditions(tmp_path):
    path = tmp_path / "deep" / "results.csv"
    Results(path).add(some_rows())
    Results(path).add(some_rows(2, note='commas, "quotes"'))
    first, _, last = read(path)
    assert (first["provider"], last["note"]) == ("ours", 'commas, "quotes"')
    assert first["torch"] == torch.__version__
    for name in ("date", "commit", "device", "threads", "allocator", "python"):
        assert first[name], name


def run_of(path, date, *rows, device="here"):
    kept = Results(path)
    kept.conditions = {**kept.conditions, "date": date, "device": device}
    for row in rows:
        kept.add(row)
    return kept


def test_a_complete_run_replaces_the_older_ones_of_its_suite_and_machine(tmp_path):
    path = tmp_path / "results.csv"
    run_of(path, "1", some_rows(2), device="elsewhere")
    other = [dataclasses.replace(row, benchmark="others") for row in some_rows(1)]
    run_of(path, "2", some_rows(2), other)
    run_of(path, "3", some_rows(1), other)

    def figures(kept, effort):
        kept.add(some_rows(3, case=effort))

    newest = run_of(path, "4")
    harness.complete(newest, figures, "full")
    found = [(row["benchmark"], row["device"], row["date"]) for row in read(path)]
    assert found == 2 * [("tests", "elsewhere", "1")] + [("others", "here", date) for date in "23"] + 3 * [
        ("tests", "here", "4")
    ]
    assert [path] == list(tmp_path.iterdir())

    def interrupted(kept, effort):
        kept.add(some_rows(1, case="half"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        harness.complete(run_of(path, "5"), interrupted, "full")
    assert [row["date"] for row in read(path)] == ["1", "1", "2", "3", "4", "4", "4", "5"]


def test_the_recorded_results_have_no_history():
    assert 0 < len(read(harness.RESULTS)) <= 5000


def test_a_file_with_other_columns_is_refused_and_kept(tmp_path):
    path = tmp_path / "results.csv"
    path.write_text("case,variant\nold,row\n")
    with pytest.raises(ValueError, match=r"other columns \(case, variant\); allowed: benchmark, case"):
        Results(path)
    assert path.read_text() == "case,variant\nold,row\n"


# run_all


@pytest.fixture
def suite(monkeypatch):
    """Give run_all two benchmarks: "first" cannot be imported, and the fixture is the suite of "second"."""
    monkeypatch.setattr(run_all, "BENCHMARKS", ("first", "second"))
    monkeypatch.setitem(sys.modules, "benchmarks.suites.first", None)
    found = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "benchmarks.suites.second", found)
    return found


def test_later_benchmarks_run_after_a_failed_benchmark(suite, tmp_path):
    suite.figures = lambda results, effort: results.add(some_rows(case=effort))
    path = tmp_path / "results.csv"
    code, out, err = run_main(run_all, "--results", path)
    assert code == 1
    assert [row["case"] for row in read(path)] == ["short"]
    assert "first FAILED: ModuleNotFoundError" in err
    assert "tests: short" in out


def test_a_bad_results_file_is_an_error_before_anything_runs(suite, tmp_path):
    path = tmp_path / "results.csv"
    path.write_text("case\n")
    suite.figures = lambda results, effort: pytest.fail("nothing may run")
    code, _, err = run_main(run_all, "--results", path, "--only", "second")
    assert code == 1
    assert "cannot keep results" in err
