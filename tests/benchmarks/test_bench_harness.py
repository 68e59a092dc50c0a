"""What the benchmarks share, the run of all of them, and what is made of their rows. No time is asserted."""

from __future__ import annotations

import csv
import errno
import importlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("tqdm", reason="the benchmarks show progress by tqdm")

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def common():
    return importlib.import_module("common")


@pytest.fixture
def script(monkeypatch, capsys):
    """Runs a script of benchmarks/ in this process. Returns its exit status, standard output and error."""

    def run(name, *options):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, options)])
        code = 0
        try:
            importlib.import_module(name).main()
        except SystemExit as end:
            code = end.code
        shown = capsys.readouterr()
        if isinstance(code, str):
            return 1, shown.out, shown.err + code
        return code or 0, shown.out, shown.err

    return run


# Timing


def clock(**seconds):
    """A timer that tells each variant's times in turn, from its first, untimed call on."""
    times = {name: iter(own) for name, own in seconds.items()}
    return lambda work, calls: next(times[work()])


def test_figures_are_medians_and_ratios_within_a_round(common):
    goals = (common.Goal("slow", 4.0), common.Goal("slow", 2.5, by_bandwidth=True))
    variants = [
        common.Variant("slow", lambda: "slow", 100),
        common.Variant("fast", lambda: "fast", 50, goals, launches=3, host_us=7.0, note="a note"),
    ]
    timer = clock(slow=[9.0, 4.0, 2.0, 8.0], fast=[9.0, 1.0, 1.0, 2.0])
    slow, by_time, by_bandwidth = common.measure(common.Case("tests", "case"), variants, 3, timer=timer)
    assert (slow.median, slow.p20, slow.p80, slow.rounds) == (4e6, 2e6, 8e6, 3)
    assert slow.gb_per_s == 25 / 1e9
    assert slow.percent_of_peak is None, "no copy, no peak"
    assert (by_time.against, by_time.speedup, by_time.reached) == ("slow", 4.0, "yes")
    assert (by_bandwidth.against, by_bandwidth.speedup) == ("slow (bytes/s)", 2.0)
    assert by_bandwidth.reached == "no"
    shown = common.table([slow, by_time, by_bandwidth])
    assert shown.count("fast") == 1
    assert "goal 4 reached" in shown
    assert "goal 2.5 MISSED" in shown


def test_the_peak_is_the_faster_of_copy_and_triad(common):
    variants = [common.Variant(name, lambda name=name: name, 60) for name in ("copy", "triad", "ours")]
    timer = clock(copy=[1.0, 2.0], triad=[1.0, 1.5], ours=[1.0, 3.0])
    rows = common.measure(common.Case("tests", "case"), variants, 1, timer=timer)
    assert [row.percent_of_peak for row in rows] == [75.0, 100.0, 50.0]


def test_variants_take_turns_in_an_order_that_turns(common):
    called = []
    variants = [common.Variant(name, lambda name=name: called.append(name)) for name in "abc"]
    common.measure(common.Case("tests", "case"), variants, 2, timer=lambda work, calls: work() or 1.0)
    assert "".join(called) == "bac" + "abc" + "acb"  # cab and bca, backwards


def test_no_rounds_are_refused(common):
    with pytest.raises(ValueError, match="rounds must be at least 1; got 0"):
        common.measure(common.Case("tests", "case"), [], 0)


def test_unknown_names_list_what_is_allowed(common):
    assert common.chosen("b, a", ("a", "b"), "provider") == ["b", "a"]
    assert common.chosen(None, ("a", "b"), "provider") == ["a", "b"]
    with pytest.raises(SystemExit, match=r"unknown provider 'c'; allowed: a, b"):
        common.chosen("a,c", ("a", "b"), "provider")


# Rows that are kept


def some_rows(common, count=1, provider="ours", case="case", **columns):
    columns = {"median": 2.0, "p20": 1.0, "p80": 3.0, **columns}
    return [common.row(common.Case("tests", case), provider, **columns) for _ in range(count)]


def test_the_file_grows_by_rows_that_name_their_conditions(common, tmp_path):
    path = tmp_path / "deep" / "results.csv"
    common.Results(path).add(some_rows(common))
    common.Results(path).add(some_rows(common, 2, note='commas, "quotes"'))
    rows = common.read(path)
    assert [found["provider"] for found in rows] == ["ours"] * 3
    assert rows[2]["note"] == 'commas, "quotes"'
    assert rows[0]["torch"] == torch.__version__
    for name in ("date", "commit", "device", "threads", "allocator", "python"):
        assert rows[0][name], name


def test_rows_of_one_run_share_a_date_and_the_newest_run_is_found(common, tmp_path):
    path = tmp_path / "results.csv"
    for date, count in (("2020-01-01", 3), ("2020-01-02", 2)):
        kept = common.Results(path)
        kept.conditions = {**kept.conditions, "date": date}
        for _ in range(count):
            kept.add(some_rows(common))
    newest = common.newest(common.read(path), "tests")
    assert [row["date"] for row in newest] == ["2020-01-02"] * 2


def test_a_file_with_other_columns_is_refused_and_kept(common, tmp_path):
    path = tmp_path / "results.csv"
    path.write_text("case,variant\nold,row\n")
    with pytest.raises(ValueError, match=r"other columns \(case, variant\); allowed: benchmark, case"):
        common.Results(path)
    assert path.read_text() == "case,variant\nold,row\n"


def test_a_provider_that_cannot_run_is_a_row_that_says_why(common):
    row = common.cannot_run(common.Case("tests", "case"), "apex", "apex is not installed")
    assert (row.median, row.note) == (None, "not run: apex is not installed")
    assert "apex is not installed" in common.table([row])


class FullDisk(io.FileIO):
    """Takes `room` bytes, then raises what a full disk raises."""

    room = 0

    def write(self, data):
        if not FullDisk.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = super().write(bytes(data)[: FullDisk.room])
        FullDisk.room -= written
        return written


@pytest.mark.parametrize("room", [0, 1, 100])
def test_a_full_disk_leaves_whole_rows_and_prints_the_others(common, tmp_path, monkeypatch, capsys, room):
    path = tmp_path / "results.csv"
    kept = common.Results(path)
    kept.add(some_rows(common, provider="kept"))
    before = path.read_bytes()
    monkeypatch.setattr(type(path), "open", lambda self, mode, buffering: FullDisk(self, mode))
    monkeypatch.setattr(FullDisk, "room", room)
    with pytest.raises(OSError, match="No space left"):
        kept.add(some_rows(common, 2, provider="lost"))
    monkeypatch.undo()
    assert path.read_bytes() == before
    printed = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert [line[common.COLUMNS.index("provider")] for line in printed] == ["lost", "lost"]
    assert [len(line) for line in printed] == [len(common.COLUMNS) + len(common.machine.CONDITIONS)] * 2
    assert [row.provider for row in kept.rows] == ["kept", "lost", "lost"]


# All of them


def module(monkeypatch, name, figures):
    monkeypatch.setitem(sys.modules, name, type("module", (), {"figures": staticmethod(figures)}))


@pytest.fixture
def two(monkeypatch):
    """run_all has two benchmarks, "first" and "second"."""
    monkeypatch.setattr(importlib.import_module("run_all"), "BENCHMARKS", ("first", "second"))


def test_a_benchmark_that_fails_stops_no_other(common, two, script, monkeypatch, tmp_path):
    def broken(results, effort):
        raise RuntimeError("no such kernel\nand more")

    module(monkeypatch, "first", broken)
    module(monkeypatch, "second", lambda results, effort: results.add(some_rows(common, case=effort)))
    path = tmp_path / "results.csv"
    code, out, err = script("run_all", "--results", path)
    assert code == 1
    assert [row["case"] for row in common.read(path)] == ["short"]
    assert "first FAILED: RuntimeError: no such kernel\n" in err
    assert "tests: short" in out


def test_a_benchmark_that_cannot_be_imported_stops_no_other(common, two, script, monkeypatch):
    monkeypatch.setitem(sys.modules, "first", None)
    module(monkeypatch, "second", lambda results, effort: results.add(some_rows(common, case=effort)))
    code, out, err = script("run_all", "--quick")
    assert code == 1
    assert "first FAILED: ModuleNotFoundError" in err
    assert "tests: quick" in out


def test_an_interrupted_run_keeps_what_was_finished(common, two, script, monkeypatch, tmp_path):
    def interrupted(results, effort):
        results.add(some_rows(common, case="finished"))
        raise KeyboardInterrupt

    module(monkeypatch, "first", interrupted)
    module(monkeypatch, "second", lambda results, effort: pytest.fail("the run goes on"))
    path = tmp_path / "results.csv"
    code, out, err = script("run_all", "--results", path)
    assert code == 130
    assert [row["case"] for row in common.read(path)] == ["finished"]
    assert "tests: finished" in out
    assert f"1 rows were finished, all of them are in {path}" in err


def test_only_runs_what_is_named(common, two, script, monkeypatch):
    module(monkeypatch, "first", lambda results, effort: pytest.fail("not asked for"))
    module(monkeypatch, "second", lambda results, effort: results.add(some_rows(common)))
    assert script("run_all", "--quick", "--only", "second")[0] == 0
    _, _, err = script("run_all", "--only", "third")
    assert err == "unknown benchmark 'third'; allowed: first, second"


def test_results_that_cannot_be_kept_are_an_error_before_anything_runs(two, script, monkeypatch, tmp_path):
    path = tmp_path / "results.csv"
    path.write_text("case\n")
    module(monkeypatch, "first", lambda results, effort: pytest.fail("nothing may run"))
    code, _, err = script("run_all", "--results", path)
    assert code == 1
    assert "cannot keep results" in err


def test_every_benchmark_runs(tmp_path):
    path = tmp_path / "results.csv"
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONPATH": paths}
    command = [sys.executable, "benchmarks/run_all.py", "--quick", "--results", str(path)]
    found = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr
    for benchmark in ("models", "kernels", "training", "wrapper_window", "peak_memory"):
        assert f"\n{benchmark}: " in found.stdout
    assert "goals reached" in found.stdout
    assert not path.exists(), "a quick run must record nothing"


# What got worse


@pytest.fixture
def runs(common, tmp_path):
    """Writes a results file from (provider, median, p20, p80, columns). Returns its path."""

    def write(name, *figures, **conditions):
        kept = common.Results(tmp_path / name)
        kept.conditions = {**kept.conditions, **conditions}
        for provider, median, p20, p80, columns in figures:
            kept.add(some_rows(common, provider=provider, median=median, p20=p20, p80=p80, **columns))
        return tmp_path / name

    return write


def verdicts(old, new, **options):
    compare = importlib.import_module("compare")
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
def test_worse_is_more_than_noise(runs, new, verdict):
    old = runs("old.csv", ("ours", 100, 98, 102, {}))
    assert verdicts(old, runs("new.csv", ("ours", *new, {}))) == [verdict]


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
def test_units_say_what_is_worse(runs, unit, new, verdict):
    old = runs("old.csv", ("ours", 100, None, None, {"unit": unit}))
    assert verdicts(old, runs("new.csv", ("ours", new, None, None, {"unit": unit}))) == [verdict]


@pytest.mark.parametrize(("new", "verdict"), [(5, "worse"), (-30, "better"), (0, "worse"), (-10, "same")])
def test_differences_of_times_may_be_negative(runs, new, verdict):
    old = runs("old.csv", ("ours", -10, -11, -9, {}))
    assert verdicts(old, runs("new.csv", ("ours", new, new, new, {}))) == [verdict]


@pytest.mark.parametrize(("new", "verdict"), [(0, "same"), (1, "worse")])
def test_what_was_nothing_may_become_something(runs, new, verdict):
    old = runs("old.csv", ("ours", 0, 0, 0, {"unit": "MB"}))
    assert verdicts(old, runs("new.csv", ("ours", new, new, new, {"unit": "MB"}))) == [verdict]


def test_a_slower_machine_is_not_blamed_on_the_code(runs):
    old = runs("old.csv", ("copy", 50, 49, 51, {}), ("ours", 100, 98, 102, {}))
    slow = runs("slow.csv", ("copy", 100, 98, 102, {}), ("ours", 200, 196, 204, {}))
    assert verdicts(old, slow) == ["same"]
    assert verdicts(old, slow, by_time=True) == ["worse"]
    fast = runs("fast.csv", ("copy", 25, 24, 26, {}), ("ours", 100, 98, 102, {}))
    assert verdicts(old, fast) == ["worse"]


def test_rows_that_differ_in_what_they_are_held_against_are_one_figure(runs):
    against = [("ours", 100, 98, 102, {"against": name, "speedup": 2.0}) for name in ("a", "b")]
    old = runs("old.csv", *against)
    assert verdicts(old, runs("new.csv", *against[:1])) == ["same"]


def test_the_report_says_what_differs_and_what_is_gone(runs, script):
    old = runs("old.csv", ("ours", 100, 98, 102, {}), ("apex", 100, 98, 102, {}), threads="2")
    new = runs(
        "new.csv",
        ("ours", 150, 148, 152, {"against": "apex", "speedup": 0.7}),
        ("apex", None, None, None, {"note": "not run: apex is not installed"}),
        ("peer", 1, 1, 1, {}),
        threads="8",
    )
    code, out, _ = script("compare", old, new)
    assert code == 1
    assert "*** THE RUNS DIFFER IN THREADS: 2 -> 8" in out
    assert "WORSE: 1\n  tests: case: ours: 100 -> 150 us, +50.0 %" in out
    assert "better: nothing" in out
    assert "disappeared: 1\n  tests: case: apex (not run: apex is not installed)" in out
    assert "\nappeared: 1\n  tests: case: peer" in out


def test_two_equal_runs_end_well(runs, script):
    old = runs("old.csv", ("copy", 50, 49, 51, {}), ("ours", 100, 98, 102, {}))
    code, out, _ = script("compare", old, old)
    assert code == 0
    assert "WORSE: nothing" in out
    assert "DIFFER" not in out


@pytest.mark.parametrize(
    ("text", "why"),
    [(None, "No such file"), ("", "no column"), ("case,variant\n", "no column"), (b"\xff\xfe", "decode")],
)
def test_what_cannot_be_compared_is_said(runs, script, tmp_path, text, why):
    bad = tmp_path / "bad.csv"
    if text is not None:
        bad.write_bytes(text if isinstance(text, bytes) else text.encode())
    code, _, err = script("compare", runs("old.csv", ("a", 1, 1, 1, {})), bad)
    assert code == 2
    assert why in err


def test_a_threshold_below_zero_is_refused(runs, script):
    old = runs("old.csv", ("a", 1, 1, 1, {}))
    code, _, err = script("compare", old, old, "--threshold=-1")
    assert code == 2
    assert "at least 0" in err


# What is drawn and written


@pytest.fixture
def synthetic(common, tmp_path):
    """A results file with rows for every plot and table. The figures are made up."""
    kept = common.Results(tmp_path / "results.csv")
    for dtypes in ("float32 into float32", "autocast bfloat16 into float32", "bfloat16 into float32"):
        counted = common.Case("models", "counted", "window k=8", "4 parameters of 512 x 512", dtypes)
        ways = (("stock as written", "as written", 100.0), ("stock mixed", "best stock", 50.0))
        own = (("fusedacc", "ours", 40.0), ("fusedacc model=", "ours, model=", 30.0))
        for name, role, size in (*ways, *own):
            for part, share in (("accumulate", 0.7), ("update: optimizer", 0.3), ("total", 1.0)):
                figure = {"metric": f"bytes: {part}", "unit": "B/param", "median": share * size}
                kept.add([common.row(counted, name, **figure, note=f"{role}: how")])
        timed = common.Case("models", "gpt2", "window k=8", "148 parameters, 124 M elements", dtypes)
        for name, role, size in ways:
            kept.add([common.row(timed, name, median=1e4 * size, note=f"{role}: how")])
            goal = {"against": name, "speedup": size / 40.0, "goal": 1.0, "reached": "yes"}
            kept.add([common.row(timed, "fusedacc", median=4e5, note="ours: how", **goal)])
    for dtypes in ("bfloat16 into float32", "float32 into float32"):
        for size in (2**10, 2**20, 2**30):
            shapes = f"1 tensor of {size}; 2 sets in turn"
            case = common.Case("kernels", f"{common.count(size)} elements", "accumulate", shapes, dtypes)
            for name, rate in (("copy", 20.0), ("triad", 22.0), ("fusedacc cpu", 21.9), ("add_", 5.0)):
                time = size * 10 / rate / 1e3
                kept.add([common.row(case, name, median=time, bytes=10 * size, gb_per_s=rate)])
            kept.add([common.cannot_run(case, "apex axpby", "not installed")])
    case = common.Case("training", "demo, width 256", "training", "2.5 M parameters; windows", "float32")
    for name in ("stock", "fusedacc"):
        kept.add([common.row(case, name, metric="peak memory", unit="MB", median=70.0)])
        for kind, size in (("weights", 10.0), ("gradients", 20.0), ("activations and others", 40.0)):
            figure = {"metric": f"peak memory: {kind}", "unit": "MB", "median": size}
            kept.add([common.row(case, name, **figure)])
    cells = importlib.import_module("machines_cells")
    of_machines = common.Results(tmp_path / "machines.csv", columns=cells.COLUMNS)
    for name, ratio in (("native", 1.25), ("avx2", 0.75)):
        for loop in cells.LOOPS:
            figure = {"ratio": ratio, "low": ratio - 0.125, "high": ratio + 0.125, "sources": "digest"}
            of_machines.add([cells.Row(name, "mlp", "autocast", loop, **figure)])
    return kept.path


NAMES = ("bytes", "bandwidth", "speedup", "memory", "machines")


def test_every_plot_is_drawn_as_png_and_svg(synthetic, script, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "figures"
    code, told, _ = script("plot", "--results", synthetic, "--out", out)
    assert code == 0
    assert "not drawn" not in told
    assert {path.name for path in out.iterdir()} == {f"{n}.{kind}" for n in NAMES for kind in ("png", "svg")}
    for name in NAMES:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (out / f"{name}.svg").read_text().rstrip().endswith("</svg>")


def texts(figure):
    from matplotlib.text import Text

    return " ".join(text.get_text() for text in figure.findobj(Text))


def test_plots_say_what_they_show_and_under_which_conditions(common, synthetic):
    pytest.importorskip("matplotlib").use("Agg")
    charts = importlib.import_module("charts")
    of_machines = importlib.import_module("machines_chart").machines
    rows = common.read(synthetic)
    expected = {
        charts.bytes_per_parameter: (
            "bytes read and written per parameter",
            "best stock: mixed",
            "(-20 %)",
            "(-40 %)",
            "With model= these are",
        ),
        charts.bandwidth: ("GB/s", "elements in one tensor", "1 Gi", "measured peak", "fusedacc cpu", "add_"),
        charts.speedup: ("GPT-2 124M: 148 parameters, 124 M elements", "1.25 x stock mixed"),
        charts.memory: ("MB alive at the peak", "70.0 MB", "activations and others", "2.5 M parameters"),
        of_machines: (
            "as it is, two threads",
            "AVX2, two threads",
            "1 models",
            "autocast",
            "fusedacc model=",
        ),
    }
    for draw, wanted in expected.items():
        shown = texts(
            draw(rows if draw is not of_machines else common.read(synthetic.with_name("machines.csv")))
        )
        for text in (*wanted, rows[0]["device"], torch.__version__, rows[0]["commit"], rows[0]["date"][:10]):
            assert text in shown.replace("\n", " "), (draw.__name__, text)


def test_no_label_of_a_plot_lies_on_another_or_outside(common, synthetic):
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib.text import Text

    charts = importlib.import_module("charts")
    rows = common.read(synthetic)
    of_machines = importlib.import_module("machines_chart").machines
    for draw in (charts.bytes_per_parameter, charts.bandwidth, charts.speedup, charts.memory, of_machines):
        figure = draw(rows if draw is not of_machines else common.read(synthetic.with_name("machines.csv")))
        figure.canvas.draw()
        labels = [text for axes in figure.axes for text in axes.texts if text.get_text()]
        labels += [text for axes in figure.axes for text in axes.get_yticklabels() if text.get_text()]
        # Of the text alone: an annotation's own extent has its line in it.
        boxes = [Text.get_window_extent(label) for label in (*labels, *figure.texts)]
        for index, box in enumerate(boxes):
            assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, (draw.__name__, index)
            assert not any(box.overlaps(other) for other in boxes[:index]), (draw.__name__, index)


def test_a_plot_without_rows_is_skipped_with_the_reason(runs, script, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "figures"
    path = runs("other.csv", ("ours", 1, 1, 1, {}))
    code, told, _ = script("plot", "--results", path, "--out", out)
    assert code == 0
    assert told.count("not drawn") == len(NAMES)
    assert "bytes: not drawn: there are no rows of benchmarks/models.py with a counted window" in told
    assert "machines: not drawn: there are no rows of benchmarks/machines.py" in told
    assert not list(out.iterdir())


def test_plots_that_are_unknown_or_have_no_file_are_refused(script, tmp_path):
    pytest.importorskip("matplotlib")
    missing = ("--results", tmp_path / "none.csv", "--out", tmp_path)
    code, _, err = script("plot", *missing)
    assert code == 2
    assert "Run `make bench` first" in err
    code, _, err = script("plot", "--only", "pie", *missing)
    assert code == 1
    assert "unknown plot 'pie'; allowed: bytes, bandwidth, speedup, memory" in err


README = """# name

<!-- bytes: written by benchmarks/readme_figures.py -->
old bytes
<!-- end of bytes -->
prose that stays
<!-- speed: written by benchmarks/readme_figures.py -->
old speed
<!-- end of speed -->
the end
"""
PAGE = """# figures

prose that stays
<!-- machines: written by benchmarks/readme_figures.py -->
old machines
<!-- end of machines -->
<!-- figures: written by benchmarks/readme_figures.py -->
old figures
<!-- end of figures -->
the end
"""


def test_readme_shows_the_newest_figures(synthetic, script, tmp_path):
    readme, page = tmp_path / "README.md", tmp_path / "figures.md"
    readme.write_text(README)
    page.write_text(PAGE)
    command = ("readme_figures", "--results", synthetic, "--readme", readme, "--page", page)
    assert script(*command)[0] == 0
    text = readme.read_text()
    for each in (text, page.read_text()):
        assert "old" not in each
        assert "prose that stays" in each
        assert each.endswith("the end\n")
    assert "| fusedacc | against the best | fusedacc, `model=` | against the best |" in text
    assert "| float32 parameters and sums | 100.0 | 50.0 (mixed) | 40.0 | -20 % | 30.0 | -40 % |" in text
    assert "With `model=` these are weights of Linear layers" in text
    assert "ran at 0.75 to 1.25 times the speed of the best loop of stock torch, 1.00 in the median" in text
    text = page.read_text()
    assert "stock torch in the same precision, 1 models in 4 precisions" in text
    of_avx2 = "| 0.75 (0.62 to 0.88) | 0.75 | 0.75 | 0.75 (0.62 to 0.88) | 0.75 | 0.75 |"
    assert f"| AVX2, two threads | 1 {of_avx2}" in text
    assert "| **all** | 2 | 0.75 (0.62 to 0.88) | 1.00 | 1.25 |" in text
    row = "| gpt2, window k=8 | bfloat16 into float32 | fusedacc | 400.00 ms | "
    assert row + "1.25 times the speed of `stock mixed` (500.00 ms), goal 1 |" in text
    before = readme.read_text()
    assert script(*command)[0] == 0
    assert (readme.read_text(), page.read_text()) == (before, text), "a second time changes nothing"


def test_a_later_run_of_a_part_does_not_hide_the_rest(common, synthetic):
    pytest.importorskip("matplotlib").use("Agg")
    charts, headline = importlib.import_module("charts"), importlib.import_module("headline")
    kept = common.Results(synthetic)
    kept.conditions = {**kept.conditions, "date": "2099-01-01"}
    case = common.Case("models", "counted", "window k=8", "4 parameters", "float32 into float32")
    figure = {"metric": "bytes: total", "unit": "B/param", "median": 7.0, "note": "ours: how"}
    kept.add([common.row(case, "fusedacc", **figure)])
    rows = common.read(synthetic)
    assert [counted.total for counted in headline.headline(rows)] == [7.0]
    assert "1.25 x stock mixed" in texts(charts.speedup(rows))


def test_results_without_a_count_of_the_model_have_no_column_for_it(common, synthetic):
    readme_figures = importlib.import_module("readme_figures")
    rows = [row for row in common.read(synthetic) if row["provider"] != "fusedacc model="]
    text = readme_figures.window_bytes(rows)
    assert "| float32 parameters and sums | 100.0 | 50.0 (mixed) | 40.0 | -20 % |\n" in text
    assert "model=" not in text


def test_readme_says_what_was_missed(common):
    readme_figures = importlib.import_module("readme_figures")
    keys = {
        **dict.fromkeys((*common.COLUMNS, *common.machine.CONDITIONS), ""),
        "benchmark": "models",
        "case": "c",
    }
    stock = {**keys, "provider": "stock", "unit": "us", "median": "2000"}
    goal = {"speedup": "0.5", "goal": "1", "reached": "no"}
    ours = {**keys, "provider": "ours", "unit": "us", "median": "4e6", "against": "stock", **goal}
    room = {**ours, "unit": "MB", "median": "100", "against": "stock + bucket", "speedup": "0.8"}
    text = readme_figures.goals([stock, ours, room])
    assert "| 4.00 s | 0.50 times the speed of `stock` (2.00 ms), goal 1 **missed** |" in text
    assert "| 100.0 MB | at most 80.0 MB: stock + bucket **missed** |" in text


@pytest.mark.parametrize(("name", "marker"), [("README.md", "bytes"), ("figures.md", "machines")])
def test_pages_without_markers_are_left_alone(synthetic, script, tmp_path, name, marker):
    pages = {"README.md": README, "figures.md": PAGE} | {name: "nothing here\n"}
    for path, text in pages.items():
        (tmp_path / path).write_text(text)
    options = ("--readme", tmp_path / "README.md", "--page", tmp_path / "figures.md")
    code, _, err = script("readme_figures", "--results", synthetic, *options)
    assert code == 1
    assert f"{name}: no line '<!-- {marker}" in err
    assert {path: (tmp_path / path).read_text() for path in pages} == pages


def test_the_pages_have_the_markers():
    own = importlib.import_module("readme_figures")
    for name, sections in (
        ("README.md", (own.BYTES, own.SPEED)),
        ("docs/figures.md", (own.MACHINES, own.FIGURES)),
    ):
        text = (ROOT / name).read_text()
        for begin, end in sections:
            assert text.count(begin) == text.count(end) == 1
            assert text.index(begin) < text.index(end)
