"""What the benchmarks share. No time is asserted."""

import dataclasses
import sys

import pytest
import torch
from bench_setup import run_main, some_rows

from benchmarks import harness, run_all
from fusedacc.commands.measuring.records import Case, Goal, Results, Variant, measure, read, table

# Timing


def clock(**seconds):
    """A timer that tells each variant's times in turn, from its first, untimed call on."""
    times = {name: iter(own) for name, own in seconds.items()}
    return lambda work, calls: next(times[work()])


def test_figures_are_medians_and_ratios_within_a_round():
    goals = (Goal("slow", 4.0), Goal("slow", 2.5, by_bandwidth=True))
    variants = [
        Variant("slow", lambda: "slow", 100),
        Variant("fast", lambda: "fast", 50, goals, launches=3, host_us=7.0, note="a note"),
    ]
    timer = clock(slow=[9.0, 4.0, 2.0, 8.0], fast=[9.0, 1.0, 1.0, 2.0])
    slow, by_time, by_bandwidth = measure(Case("tests", "case"), variants, range(-1, 3), timer=timer)
    assert (slow.median, slow.p20, slow.p80, slow.rounds) == (4e6, 2e6, 8e6, 3)
    assert slow.gb_per_s == 25 / 1e9
    assert slow.percent_of_peak is None, "no copy, no peak"
    assert (by_time.against, by_time.speedup, by_time.reached) == ("slow", 4.0, "yes")
    assert (by_bandwidth.against, by_bandwidth.speedup) == ("slow (bytes/s)", 2.0)
    assert by_bandwidth.reached == "no"
    shown = table([slow, by_time, by_bandwidth])
    assert shown.count("fast") == 1
    assert "goal 4 reached" in shown
    assert "goal 2.5 MISSED" in shown


# Rows that are kept


def test_the_file_grows_by_rows_that_name_their_conditions(tmp_path):
    path = tmp_path / "deep" / "results.csv"
    Results(path).add(some_rows())
    Results(path).add(some_rows(2, note='commas, "quotes"'))
    rows = read(path)
    assert [found["provider"] for found in rows] == ["ours"] * 3
    assert rows[2]["note"] == 'commas, "quotes"'
    assert rows[0]["torch"] == torch.__version__
    for name in ("date", "commit", "device", "threads", "allocator", "python"):
        assert rows[0][name], name


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
    assert 0 < len(read(harness.RESULTS)) <= 4000


def test_a_file_with_other_columns_is_refused_and_kept(tmp_path):
    path = tmp_path / "results.csv"
    path.write_text("case,variant\nold,row\n")
    with pytest.raises(ValueError, match=r"other columns \(case, variant\); allowed: benchmark, case"):
        Results(path)
    assert path.read_text() == "case,variant\nold,row\n"


# All of them


def module(monkeypatch, name, figures):
    suite = type("module", (), {"figures": staticmethod(figures)})
    monkeypatch.setitem(sys.modules, f"benchmarks.suites.{name}", suite)


@pytest.fixture
def two(monkeypatch):
    """run_all has two benchmarks, "first" and "second"."""
    monkeypatch.setattr(run_all, "BENCHMARKS", ("first", "second"))


def test_a_benchmark_that_fails_stops_no_other(two, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "benchmarks.suites.first", None)
    module(monkeypatch, "second", lambda results, effort: results.add(some_rows(case=effort)))
    path = tmp_path / "results.csv"
    code, out, err = run_main(run_all, "--results", path)
    assert code == 1
    assert [row["case"] for row in read(path)] == ["short"]
    assert "first FAILED: ModuleNotFoundError" in err
    assert "tests: short" in out


def test_results_that_cannot_be_kept_are_an_error_before_anything_runs(two, monkeypatch, tmp_path):
    path = tmp_path / "results.csv"
    path.write_text("case\n")
    module(monkeypatch, "first", lambda results, effort: pytest.fail("nothing may run"))
    code, _, err = run_main(run_all, "--results", path)
    assert code == 1
    assert "cannot keep results" in err
