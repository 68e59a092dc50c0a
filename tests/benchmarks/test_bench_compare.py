"""The verdicts of compare.py."""

import pytest
from bench_setup import run_main, write_rows

from benchmarks.report import compare


def verdicts(old, new, **options):
    figures = [compare.figures(compare.load(path)) for path in (old, new)]
    return [change.verdict for change in compare.compare(*figures, **options)]


US, MB, COUNTED, RATE = ({"unit": unit} for unit in ("us", "MB", "B/param", "tokens/s"))


@pytest.mark.parametrize(
    ("columns", "old", "new", "verdict"),
    [
        (US, (100, 98, 102), (100, 98, 102), "same"),
        (US, (100, 98, 102), (120, 115, 125), "worse"),
        (US, (100, 98, 102), (120, 101, 125), "same"),  # ranges overlap
        (US, (100, 98, 102), (104.9, 104, 105), "same"),  # within the threshold
        (US, (100, 98, 102), (80, 78, 82), "better"),
        (MB, (100, None, None), (120, None, None), "worse"),
        (MB, (100, None, None), (104, None, None), "same"),
        (COUNTED, (100, None, None), (101, None, None), "worse"),  # any change of a count matters
        (COUNTED, (100, None, None), (100.001, None, None), "same"),  # the file's rounding
        (RATE, (100, None, None), (120, None, None), "better"),
        (RATE, (100, None, None), (80, None, None), "worse"),
        # Differences of times may be negative.
        (US, (-10, -11, -9), (5, 5, 5), "worse"),
        (US, (-10, -11, -9), (-30, -30, -30), "better"),
        (US, (-10, -11, -9), (0, 0, 0), "worse"),
        (US, (-10, -11, -9), (-10, -10, -10), "same"),
        (MB, (0, 0, 0), (0, 0, 0), "same"),
        (MB, (0, 0, 0), (1, 1, 1), "worse"),
    ],
)
def test_verdicts(tmp_path, columns, old, new, verdict):
    before = write_rows(tmp_path / "old.csv", ("ours", *old, columns))
    assert verdicts(before, write_rows(tmp_path / "new.csv", ("ours", *new, columns))) == [verdict]


def test_a_slower_machine_is_not_blamed_on_the_code(tmp_path):
    old = write_rows(tmp_path / "old.csv", ("copy", 50, 49, 51, {}), ("ours", 100, 98, 102, {}))
    slow = write_rows(tmp_path / "slow.csv", ("copy", 100, 98, 102, {}), ("ours", 200, 196, 204, {}))
    assert verdicts(old, slow) == ["same"]
    assert verdicts(old, slow, by_time=True) == ["worse"]
    fast = write_rows(tmp_path / "fast.csv", ("copy", 25, 24, 26, {}), ("ours", 100, 98, 102, {}))
    assert verdicts(old, fast) == ["worse"]


def test_the_report_names_differences_and_missing_rows(tmp_path):
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
    for words in (
        "*** THE RUNS DIFFER IN THREADS: 2 -> 8",
        "WORSE: 1\n  tests: case: ours: 100 -> 150 us, +50.0 %",
        "better: nothing",
        "disappeared: 1\n  tests: case: apex (not run: apex is not installed)",
        "\nappeared: 1\n  tests: case: peer",
    ):
        assert words in out


def test_a_file_that_cannot_be_compared_is_named(tmp_path):
    (tmp_path / "bad.csv").write_text("case,variant\n")
    old = write_rows(tmp_path / "old.csv", ("a", 1, 1, 1, {}))
    for name, why in (("bad.csv", "no column"), ("missing.csv", "No such file")):
        code, _, err = run_main(compare, old, tmp_path / name)
        assert code == 2
        assert why in err
