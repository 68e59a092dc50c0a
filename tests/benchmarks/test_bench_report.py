"""Plots and tables in the documents, from synthetic rows."""

import importlib

import pytest
from bench_setup import ROOT, page_of, run_main, write_rows

from benchmarks.harness import RESULTS
from benchmarks.records import Case, Results, at_most, cannot_run, count, read, row
from benchmarks.report import head_chart, page_tables, pages
from benchmarks.suites import head


@pytest.fixture
def synthetic(tmp_path):
    """Return a results file with synthetic rows for every plot and table."""
    kept = Results(tmp_path / "results.csv")
    for dtypes in ("float32 into float32", "autocast bfloat16 into float32", "bfloat16 into float32"):
        counted = Case("models", "counted", "window k=8", "4 parameters of 512 x 512", dtypes)
        ways = (("stock as written", "as written", 100.0), ("stock mixed", "best stock", 50.0))
        own = [("fusedacc", "ours", 40.0), ("fusedacc model=", page_tables.MODEL, 30.0)]
        own += [("fusedacc keep_casts=", page_tables.KEPT, 25.0)] if dtypes.startswith("autocast") else []
        for name, role, size in (*ways, *own):
            for part, share in (("accumulate", 0.7), ("update: optimizer", 0.3), ("total", 1.0)):
                figure = {"metric": f"bytes: {part}", "unit": "B/param", "median": share * size}
                kept.add([row(counted, name, **figure, note=f"{role}: how")])
        timed = Case("models", "gpt2", "window k=8", "148 parameters, 124 M elements", dtypes)
        for name, role, size in ways:
            kept.add([row(timed, name, median=1e4 * size, note=f"{role}: how")])
            goal = {"against": name, "speedup": size / 40.0, "goal": 1.0, "reached": "yes"}
            kept.add([row(timed, "fusedacc", median=4e5, note="ours: how", **goal)])
    for dtypes in ("bfloat16 into float32", "float32 into float32"):
        for size in (2**10, 2**20, 2**30):
            shapes = f"1 tensor of {size}; 2 sets in turn"
            case = Case("kernels", f"{count(size)} elements", "accumulate", shapes, dtypes)
            for name, rate in (("copy", 20.0), ("triad", 22.0), ("fusedacc cpu", 21.9), ("add_", 5.0)):
                time = size * 10 / rate / 1e3
                kept.add([row(case, name, median=time, bytes=10 * size, gb_per_s=rate)])
            kept.add([cannot_run(case, "apex axpby", "not installed")])
    case = Case("training", "demo, width 256", "training", "2.5 M parameters; windows", "float32")
    for name in ("stock", "fusedacc"):
        kept.add([row(case, name, metric="peak memory", unit="MB", median=70.0)])
        for kind, size in (("weights", 10.0), ("gradients", 20.0), ("activations and others", 40.0)):
            figure = {"metric": f"peak memory: {kind}", "unit": "MB", "median": size}
            kept.add([row(case, name, **figure)])
    for model, precision, speed in (("mlp", "autocast", 1.25), ("lstm", "float32", 0.5)):
        case = Case("real_models", model, "window", dtypes=precision)
        kept.add([row(case, "p.grad", median=2.0)])
        for loop in ("fusedacc", "fusedacc model=", "fusedacc model=, keep_casts"):
            if precision == "autocast" or not loop.endswith("keep_casts"):
                kept.add([row(case, loop, median=2.0 / speed, against="p.grad", speedup=speed)])
        kept.add([row(case, "fusedacc", metric="peak memory", median=8.0, against="p.grad", speedup=1.0)])
        kept.conditions = {**kept.conditions, "device": "another CPU", "commit": "c0ffee"}
    return kept.path


NAMES = ("bytes", "bandwidth", "speedup", "memory")
#: Texts in some of the plots.
SAID = {
    "bytes": ("best PyTorch: mixed", "(-20 %)", "(-40 %)", "(-50 %)"),
    "speedup": ("GPT-2 124M: 148 parameters, 124 M elements", "1.25 x PyTorch mixed"),
    "memory": ("70.0 MB", "activations and others", "2.5 M parameters"),
}


def test_every_plot_is_drawn_with_its_texts(synthetic, tmp_path):
    plot, out = the_plot(), tmp_path / "figures"
    with importlib.import_module("matplotlib").rc_context({"svg.fonttype": "none"}):
        code, told, _ = run_main(plot, "--results", synthetic, "--out", out)
    assert code == 0
    assert "not drawn" not in told
    assert {path.name for path in out.iterdir()} == {f"{n}.{kind}" for n in NAMES for kind in ("png", "svg")}
    for name, texts in SAID.items():
        shown = (out / f"{name}.svg").read_text()
        assert [text for text in texts if text not in shown] == [], name


def the_plot():
    """Return the module plot.py, which needs matplotlib."""
    pytest.importorskip("matplotlib").use("Agg")
    return importlib.import_module("benchmarks.report.plot")


def test_a_plot_without_rows_is_skipped_with_the_reason(tmp_path):
    path, out = write_rows(tmp_path / "other.csv", ("ours", 1, 1, 1, {})), tmp_path / "figures"
    code, told, _ = run_main(the_plot(), "--results", path, "--out", out)
    assert (code, told.count("not drawn: there are no rows of "), list(out.iterdir())) == (0, len(NAMES), [])


OVERVIEW, PAGE = page_of("figures", "bytes", "speed"), page_of("figures", "real-models", "figures")


def test_pages_show_the_newest_figures(synthetic, tmp_path):
    overview, page = tmp_path / "benchmarks.md", tmp_path / "figures.md"
    overview.write_text(OVERVIEW)
    page.write_text(PAGE)
    command = (page_tables, "--results", synthetic, "--overview", overview, "--page", page)
    assert run_main(*command)[0] == 0
    text = overview.read_text()
    for each in (text, page.read_text()):
        assert "old" not in each
        assert "prose that stays" in each
        assert each.endswith("the end\n")
    figures = "| 100.0 | 50.0 (mixed) | 40.0 | -20 % | 30.0 | -40 % |"
    assert f"| float32 parameters and sums {figures}  |  |\n" in text
    assert f"| float32 parameters under autocast(bfloat16) {figures} 25.0 | -50 % |\n" in text
    assert "a window took this time: 0.80 to 2.00, median 1.40. With `model=`: 0.80 to 2.00" in text
    assert "`keep_casts=True`, relative to `model=` alone: 0.80 to 0.80, median 0.80" in text
    assert "another CPU (commit c0ffee)" in text
    text = page.read_text()
    assert "| model | float32 | autocast | bfloat16 | bfloat16 sums |" in text
    assert "| mlp |  | 0.80 / 0.80 / 0.80 |  |  |" in text
    assert "| lstm | 2.00 / 2.00 |  |  |  |" in text
    line = "| gpt2, window k=8 | bfloat16 into float32 | fusedacc | 400.00 ms | "
    assert line + "1.25 times the speed of `PyTorch mixed` (500.00 ms), goal 1 |" in text
    before = overview.read_text()
    assert run_main(*command)[0] == 0
    assert (overview.read_text(), page.read_text()) == (before, text), "a second run changes the pages"


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("docs/benchmarks.md", *page_tables.BYTES),
        ("docs/benchmarks.md", *page_tables.SPEED),
        ("docs/figures.md", *page_tables.MODELS),
        ("docs/figures.md", *page_tables.FIGURES),
    ],
)
def test_the_pages_have_the_markers(name, begin, end):
    text = (ROOT / name).read_text()
    assert text.count(begin) == text.count(end) == 1
    assert text.index(begin) < text.index(end)


def test_the_tables_of_heads_show_the_rows():
    rows, page = read(RESULTS), head_chart.PAGE.read_text()
    for name, table in head_chart.TABLES.items():
        assert pages.shown(table(rows)) in page, f"{name}: run make head-figures"


def test_a_run_of_heads_is_resumed(tmp_path):
    for _ in range(2):
        head.figures(Results(tmp_path / "rows.csv"), "quick", "head_memory", resume=True)
    assert len(read(tmp_path / "rows.csv")) == 2


@pytest.mark.parametrize(("found", "wanted"), [(-3.0, "yes"), (0.0, "yes"), (4.0, "yes"), (6.0, "no")])
def test_a_difference_below_zero_is_within_its_limit(found, wanted):
    assert at_most(5.0, found)["reached"] == wanted
