"""What compare.py calls worse."""

from __future__ import annotations

import pytest
from bench_setup import run_main, write_rows

from benchmarks.report import compare


def verdicts(old, new, **options):
    figures = [compare.figures(compare.load(path)) for path in (old, new)]
    return [change.verdict for change in compare.compare(*figures, **options)]


@pytest.mark.parametrize(
    ("new", "verdict"),
    [
        ((100, 98, 102), "same"),
        ((120, 115, 125), "worse"),
        ((120, 101, 125), "same"),  # ranges overlap
        ((104.9, 104, 105), "same"),  # within the threshold
        ((80, 78, 82), "better"),
    ],
)
def test_worse_is_more_than_noise(tmp_path, new, verdict):
    old = write_rows(tmp_path / "old.csv", ("ours", 100, 98, 102, {}))
    assert verdicts(old, write_rows(tmp_path / "new.csv", ("ours", *new, {}))) == [verdict]


@pytest.mark.parametrize(
    ("unit", "new", "verdict"),
    [
        ("MB", 120, "worse"),
        ("MB", 104, "same"),
        ("B/param", 101, "worse"),  # counted: any change tells
        ("B/param", 100.001, "same"),  # the file's rounding
        ("tokens/s", 120, "better"),
        ("tokens/s", 80, "worse"),
    ],
)
def test_units_say_what_is_worse(tmp_path, unit, new, verdict):
    old = write_rows(tmp_path / "old.csv", ("ours", 100, None, None, {"unit": unit}))
    new = write_rows(tmp_path / "new.csv", ("ours", new, None, None, {"unit": unit}))
    assert verdicts(old, new) == [verdict]


@pytest.mark.parametrize(("new", "verdict"), [(5, "worse"), (-30, "better"), (0, "worse"), (-10, "same")])
def test_differences_of_times_may_be_negative(tmp_path, new, verdict):
    old = write_rows(tmp_path / "old.csv", ("ours", -10, -11, -9, {}))
    assert verdicts(old, write_rows(tmp_path / "new.csv", ("ours", new, new, new, {}))) == [verdict]


@pytest.mark.parametrize(("new", "verdict"), [(0, "same"), (1, "worse")])
def test_what_was_nothing_may_become_something(tmp_path, new, verdict):
    old = write_rows(tmp_path / "old.csv", ("ours", 0, 0, 0, {"unit": "MB"}))
    new = write_rows(tmp_path / "new.csv", ("ours", new, new, new, {"unit": "MB"}))
    assert verdicts(old, new) == [verdict]


def test_a_slower_machine_is_not_blamed_on_the_code(tmp_path):
    old = write_rows(tmp_path / "old.csv", ("copy", 50, 49, 51, {}), ("ours", 100, 98, 102, {}))
    slow = write_rows(tmp_path / "slow.csv", ("copy", 100, 98, 102, {}), ("ours", 200, 196, 204, {}))
    assert verdicts(old, slow) == ["same"]
    assert verdicts(old, slow, by_time=True) == ["worse"]
    fast = write_rows(tmp_path / "fast.csv", ("copy", 25, 24, 26, {}), ("ours", 100, 98, 102, {}))
    assert verdicts(old, fast) == ["worse"]


def test_rows_that_differ_in_what_they_are_held_against_are_one_figure(tmp_path):
    against = [("ours", 100, 98, 102, {"against": name, "speedup": 2.0}) for name in ("a", "b")]
    old = write_rows(tmp_path / "old.csv", *against)
    assert verdicts(old, write_rows(tmp_path / "new.csv", *against[:1])) == ["same"]


def test_the_report_says_what_differs_and_what_is_gone(tmp_path):
    figures = (("ours", 100, 98, 102, {}), ("apex", 100, 98, 102, {}))
    old = write_rows(tmp_path / "old.csv", *figures, threads="2")
    new = write_rows(
        tmp_path / "new.csv",
        ("ours", 150, 148, 152, {"against": "apex", "speedup": 0.7}),
        ("apex", None, None, None, {"note": "not run: apex is not installed"}),
        ("peer", 1, 1, 1, {}),
        threads="8",
    )
    code, out, _ = run_main(compare, old, new)
    assert code == 1
    assert "*** THE RUNS DIFFER IN THREADS: 2 -> 8" in out
    assert "WORSE: 1\n  tests: case: ours: 100 -> 150 us, +50.0 %" in out
    assert "better: nothing" in out
    assert "disappeared: 1\n  tests: case: apex (not run: apex is not installed)" in out
    assert "\nappeared: 1\n  tests: case: peer" in out


def test_two_equal_runs_end_well(tmp_path):
    old = write_rows(tmp_path / "old.csv", ("copy", 50, 49, 51, {}), ("ours", 100, 98, 102, {}))
    code, out, _ = run_main(compare, old, old)
    assert code == 0
    assert "WORSE: nothing" in out
    assert "DIFFER" not in out


@pytest.mark.parametrize(
    ("text", "why"),
    [(None, "No such file"), ("", "no column"), ("case,variant\n", "no column"), (b"\xff\xfe", "decode")],
)
def test_what_cannot_be_compared_is_said(tmp_path, text, why):
    bad = tmp_path / "bad.csv"
    if text is not None:
        bad.write_bytes(text if isinstance(text, bytes) else text.encode())
    code, _, err = run_main(compare, write_rows(tmp_path / "old.csv", ("a", 1, 1, 1, {})), bad)
    assert code == 2
    assert why in err


def test_a_threshold_below_zero_is_refused(tmp_path):
    old = write_rows(tmp_path / "old.csv", ("a", 1, 1, 1, {}))
    code, _, err = run_main(compare, old, old, "--threshold=-1")
    assert code == 2
    assert "at least 0" in err
