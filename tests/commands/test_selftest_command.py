"""`python -m fusedacc selftest`: report and exit status, and what `info` says about self-tests."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from broken_backends import breaks, self_tests

from fusedacc import __main__
from fusedacc.commands import arguments, info, selftest
from fusedacc.kernels import dtypes, library, registry
from fusedacc.kernels import selftest as kept

FIRST = "cpu" if library.load_error() is None else "eager"


@pytest.fixture(autouse=True)
def _short(monkeypatch, tmp_path):
    """Use one dtype pair and small lists, and write the report into the test's folder."""
    monkeypatch.setattr(dtypes, "PAIRS", frozenset([(torch.bfloat16, torch.float32)]))
    monkeypatch.setattr(selftest, "ELEMENTS", {"cpu": 4096})
    monkeypatch.setattr(selftest, "devices", lambda: [torch.device("cpu")])
    monkeypatch.chdir(tmp_path)


def run(*arguments):
    return __main__.main(["selftest", *arguments])


def test_the_report_is_complete(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDACC_BACKEND", "eager")  # does not change the default
    assert run("--output", "own.json") == 0
    report = json.loads((tmp_path / "own.json").read_text())
    assert report["passed"]
    assert report["driver"] == "none"
    (entry,) = report["devices"]
    assert entry["machine"]["torch"] == torch.__version__
    assert entry["machine"]["device"] == "cpu"
    assert entry["unavailable"]["cuda"]
    assert all(check["problem"] is None for check in entry["checks"])
    defaults = {check["who"] for check in entry["checks"] if check["is_default"]}
    kinds = {f"{FIRST}, {kind}" for kind in ("grouped products", "rows of a table", "slices of logits")}
    assert defaults == {FIRST, "model= product", *kinds, "AccumulatingOptimizer"}
    kernels = {(row["backend"], row["kernel"]) for row in entry["bandwidth"]}
    assert len(kernels) == 4 * len({FIRST, "eager"})
    assert all(row["gb_per_s"] > 0 and row["percent_of_copy"] > 0 for row in entry["bandwidth"])
    output = capsys.readouterr()
    assert f"  {FIRST}, used by default: 1 checks passed" in output.out
    assert f"  {FIRST:<7} norm of float32 " in output.out
    assert "% of a copy" in output.out
    assert output.out.endswith("self-test passed\nreport: own.json\n")
    assert f"[1/{len(entry['checks'])}] cpu: {FIRST}: bfloat16 into float32" in output.err


@pytest.mark.skipif(FIRST == "eager", reason=f"no backend but eager: {library.load_error()}")
@pytest.mark.parametrize(("name", "status"), [("cpu", 1), ("eager", 0)])
@pytest.mark.parametrize("what", ["tail", "raises"])
def test_only_a_wrong_default_backend_fails(capsys, name, status, what):
    with breaks(name, what):
        assert run("--no-benchmark") == status
    (entry,) = json.loads(Path(arguments.SELFTEST_FILE).read_text())["devices"]
    failed = {check["who"] for check in entry["checks"] if check["problem"]}
    assert name in failed
    output, shown = capsys.readouterr()
    # A failure is shown before the next check, because the run may be interrupted.
    after = shown.partition(f"cpu: {name}: bfloat16 into float32\n")[2]
    assert after.startswith(f"cpu: {name}: bfloat16 into float32: FAILED: ")
    assert f"  {name}{', used by default' if status else ''}: 1 of 1 checks FAILED\n" in output
    assert ("self-test FAILED: please report it: run `python -m fusedacc selftest`" in output) == bool(status)


def test_a_wrong_wrapper_fails(capsys):
    def wrong(steps, *others, **options):
        return torch.optim.SGD(steps.param_groups, lr=0.25)

    with mock.patch.object(selftest, "AccumulatingOptimizer", wrong):
        assert run("--no-benchmark") == 1
    assert "AccumulatingOptimizer, used by default: 2 of 2 checks FAILED" in capsys.readouterr().out


def test_a_report_that_cannot_be_written_is_an_error(capsys):
    assert run("--output", "no/such/folder.json") == 2
    assert "error: [Errno 2]" in capsys.readouterr().err


def test_results_replace_those_of_the_self_test_at_first_use(tmp_path):
    with self_tests(tmp_path, "cpu"):
        kept.record("eager", "bfloat16 into float32", torch.device("cpu"), "was wrong")
        kept.forget()
        assert run("--no-benchmark") == 0
        assert kept.results(torch.device("cpu"))["eager: bfloat16 into float32"] is None
        assert kept.failure("eager", torch.device("cpu")) is None


def test_info_shows_whether_self_tests_run(monkeypatch, tmp_path):
    assert "self-test: off (FUSEDACC_SELFTEST=0)" in info.summary(info.collect())
    monkeypatch.setenv("FUSEDACC_SELFTEST", "1")
    assert "self-test: none needed without a GPU" in info.summary(info.collect())
    monkeypatch.setenv("FUSEDACC_SELFTEST", "maybe")
    facts = info.collect()
    assert not info.healthy(facts)
    assert "self-test: FUSEDACC_SELFTEST='maybe': allowed are '0'" in info.summary(facts)


@pytest.mark.skipif(FIRST == "eager", reason=f"no backend but eager: {library.load_error()}")
def test_info_shows_the_results_of_self_tests(tmp_path):
    with self_tests(tmp_path, "cpu"):
        cpu = torch.device("cpu")
        facts = info.collect()
        assert info.healthy(facts)
        assert "self-test on cpu: passed: cpu: float32 into float32" in " ".join(info.summary(facts).split())
        kept.record("cpu", "bfloat16 into float32", cpu, "addition: 3 of 9 elements are wrong")
        facts = info.collect()
        assert not info.healthy(facts)
        said = "FAILED: cpu: bfloat16 into float32: addition: 3 of 9 elements are wrong"
        assert said in " ".join(info.summary(facts).split())
        assert facts["devices"][0]["auto"]["backend"] == "eager"
        assert "its self-test has failed" in registry.obstacle("cpu", cpu, torch.float32, torch.float32)
