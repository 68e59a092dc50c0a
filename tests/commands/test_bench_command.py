"""`python -m fusedacc bench`: cases, checks, output and errors, on tiny sizes."""

import json
import math
import shutil
from pathlib import Path
from unittest import mock

import forked
import pytest
import torch
from loops import fail
from tiny_bench import TINY, with_tiny_cases

import fusedacc
from fusedacc import __main__
from fusedacc.commands import bench, machine
from fusedacc.commands.bench import comparison, report
from fusedacc.commands.bench.cases import OURS, STOCK, Additions, BenchVariant, cases_of
from fusedacc.kernels import registry

CPU = torch.device("cpu")
F32 = torch.float32

#: The number of PyTorch's variants of each kind.
STOCK_FORMS = {"add": 9, "norm": 6}
#: Parts of the reasons of variants that are not available on a CPU or for a dtype.
REASONS = ("nothing to cast", "too long", "wide already")
WORDS = "name role status why inexact note bytes calls uncounted seconds samples gb_per_s percent_of_copy"
ENTRY = {*WORDS.split(), "host_seconds", "against", "speed", "interval"}
WORDS = "what name title dtypes sizes warm sets backend reason why rounds ways"
CASE = set(WORDS.split())


@pytest.fixture(scope="module", autouse=True)
def _tiny_cases_exist():
    with with_tiny_cases():
        yield


@pytest.fixture(scope="module")
def found():
    return bench.collect(CPU, TINY)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(comparison, "SHORT", TINY)


@pytest.fixture
def nothing_measured(monkeypatch):
    monkeypatch.setattr(bench, "collect", fail)


def entries(found):
    return [(case, entry) for case in found["cases"] for entry in case["ways"]]


def stock_forms(case):
    return {entry["name"] for entry in case["ways"] if entry["role"] == STOCK}


# What is measured


def test_every_variant_of_pytorch_is_measured_or_has_a_reason(found):
    assert {case["what"] for case in found["cases"]} == set(STOCK_FORMS)
    for case in found["cases"]:
        assert len(stock_forms(case)) == STOCK_FORMS[case["what"]], case["title"]
    for case, entry in entries(found):
        if entry["status"] != comparison.MEASURED:
            assert entry["role"] == STOCK
            assert any(reason in entry["why"] for reason in REASONS), (case["title"], entry)


def test_every_entry_has_its_figures(found):
    for case, entry in entries(found):
        assert set(entry) == ENTRY
        if entry["status"] == comparison.MEASURED:
            assert len(entry["samples"]) == case["rounds"] == 7
            assert min(entry["samples"]) <= entry["seconds"]["median"] <= max(entry["samples"])
            assert (entry["bytes"] is None) == bool(entry["uncounted"])
            if entry["bytes"] is not None:
                rate = entry["bytes"] / entry["seconds"]["median"] / 1e9
                assert entry["gb_per_s"] == pytest.approx(rate)
        if entry["role"] == OURS:
            low, high = entry["interval"]
            assert low <= entry["speed"] <= high
            assert entry["against"] in stock_forms(case)
        else:
            assert entry["speed"] is None


@pytest.mark.parametrize("effort", ["short", "full"])
def test_no_case_exceeds_the_memory_limit(effort):
    for limit in (2**24, 2**27, 2**29, 2**31, 2**34):
        for work in cases_of(effort, CPU):
            sets = comparison._sets(work, comparison.SHORT, limit)
            assert sets == 0 or sets * (work.set_bytes + work.moved) + work.working_bytes <= limit


def test_a_case_that_does_not_fit_says_what_it_needs():
    work = Additions("one", ((4096,),), (F32, F32), CPU)
    case = comparison.measure(work, work.variants(["auto"]), TINY, 1000)
    assert case["ways"] == []
    assert case["why"].startswith("needs ")
    assert "allowed: 1000, a quarter of the free memory" in case["why"]
    assert f"not measured: {case['why']}" in report.table(case)


def test_a_full_run_measures_every_available_backend():
    assert comparison.our_backends(CPU, "short") == ["auto"]
    taken = registry.select(CPU, F32, F32).backend.name
    others = comparison.our_backends(CPU, "full")[1:]
    assert ("eager" in others) == (taken != "eager")
    work = Additions("one", ((8,),), (F32, F32), CPU)
    case = comparison.measure(work, work.variants(["auto", "eager"]), TINY, 2**30)
    assert {e["name"] for e in case["ways"] if e["role"] == OURS} == {
        *("fusedacc, prepared", "fusedacc, fresh lists"),
        *("fusedacc eager, prepared", "fusedacc eager, fresh lists"),
    }


# Wrong results


def breaks(*_):
    raise OSError("no such device")


def forgets_the_scale(accumulators, gradients, scale, overwrite, keep=1.0):
    for accumulator, gradient in zip(accumulators, gradients, strict=True):
        accumulator.add_(gradient)


EAGER = registry.get("eager")
#: What the report says, and the function that is broken.
WRONG = {
    "fusedacc, fresh lists: ": (EAGER, "accumulate_", forgets_the_scale),
    "fusedacc, total_norm: the norm is ": (EAGER, "norm_partials", lambda *_: torch.ones(1).double()),
    "fusedacc, total_norm: OSError: no such device": (EAGER, "norm_partials", breaks),
}


@pytest.mark.parametrize("said", WRONG)
def test_wrong_results_are_reported_and_fail(monkeypatch, capsys, tiny, said):
    monkeypatch.setenv(registry.VARIABLE, "eager")
    monkeypatch.setattr(*WRONG[said])
    assert __main__.main(["bench"]) == 1
    text = capsys.readouterr().out
    assert said in text[text.index("WRONG RESULTS") :]


def test_checks_find_small_errors():
    work = Additions("one", ((3000,), (7,)), (F32, F32), CPU)

    def problem(tensors, factor=1.0):
        def run():
            for accumulator, gradient in zip(*tensors, strict=True):
                accumulator.add_(gradient)
            accumulator[3] *= factor

        return work.check(BenchVariant("variant", STOCK, lambda tensors: run, 1.0), run, tensors)

    assert problem(work.make()) is None
    assert problem(work.make(), 1 + 2**-20) == "1 of 3007 elements are wrong"
    nan = work.make()
    nan[0][0][5] = math.nan
    assert problem(nan) == "1 of 3007 elements are wrong"


# The command


def test_the_output_has_the_table_and_the_summary(capsys, tiny):
    assert __main__.main(["bench", "--device", "cpu"]) == 0
    done = capsys.readouterr()
    assert done.out.startswith(f"cpu: {machine.cpu_name()}")
    for form in ("torch._foreach_add_(accs, gs)", "acc.add_(g, alpha=s)", "autograd into .grad"):
        assert form in done.out
    slower = "slower than the fastest PyTorch variant"
    for title in ("our fastest variant in each case", slower, "chosen", "not measured"):
        assert f"\n{title}\n" in done.out
    assert "WRONG" not in done.out
    chosen = registry.select(CPU, F32, F32)
    assert f"  {chosen.backend.name}: add float32 into float32" in done.out
    assert chosen.reason in done.out
    assert done.err.splitlines()[0] == "[1/6] 4 tensors, float32 into float32"
    assert "[1/6]" not in done.out


def test_full_sets_the_effort_and_restores_threads_and_random_state(monkeypatch, capsys):
    monkeypatch.setattr(comparison, "FULL", TINY)
    monkeypatch.setattr(comparison, "SHORT", None)
    before, state = torch.get_num_threads(), torch.get_rng_state()
    assert __main__.main(["bench", "--full", "--threads", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)  # fails if anything else is printed
    assert set(found) == {"machine", "effort", "seconds", "cases"}
    assert set(found["cases"][0]) == CASE
    assert (found["effort"], found["machine"]["threads"]) == ("tiny", 1)
    assert torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "gpu"], "argument --device: 'gpu' is not an available device; allowed: cpu"),
        (["--device", "cuda:99"], "argument --device: 'cuda:99' is not an available device; allowed: cpu"),
        (["--threads", "0"], "argument --threads: '0' is not a count; allowed: integers of at least 1"),
        (["--threads", "two"], "argument --threads: 'two' is not a count"),
        (["--size", "3"], "unrecognized arguments: --size 3"),
    ],
)
def test_wrong_arguments_are_refused_before_measuring(capsys, nothing_measured, arguments, said):
    with pytest.raises(SystemExit) as caught:
        __main__.main(["bench", *arguments])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (registry.VARIABLE, "gpu", "FUSEDACC_BACKEND='gpu' is no backend; allowed: "),
        (registry.VARIABLE, "cuda", "FUSEDACC_BACKEND='cuda' cannot run float32 into float32 on cpu: "),
    ],
)
def test_wrong_variables_are_refused(monkeypatch, capsys, nothing_measured, name, value, said):
    monkeypatch.setenv(name, value)
    assert __main__.main(["bench", "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err


def test_an_interrupt_prints_no_traceback(monkeypatch, capsys, tiny):
    monkeypatch.setattr(comparison, "measure", mock.Mock(side_effect=KeyboardInterrupt))
    assert __main__.main(["bench"]) == 130
    assert "stopped" in capsys.readouterr().err


def test_bench_runs_without_the_native_library(tmp_path):
    """Copy the package as an installed wheel has it that was built without a compiler."""
    package = Path(fusedacc.__file__).parent
    skip = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(package, tmp_path / "fusedacc", ignore=skip)
    program = (
        f"import sys; sys.path.append({str(Path(__file__).parent)!r}); from fusedacc import __main__; "
        "import tiny_bench; tiny_bench.with_tiny_cases().start(); "
        "tiny_bench.comparison.SHORT = tiny_bench.TINY; "
        "sys.exit(__main__.main(['bench', '--json', '--device', 'cpu']))"
    )
    done = forked.run(program, root=tmp_path, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {case["backend"].split()[0] for case in found["cases"]} == {"eager"}
    assert all("not cpu: " in case["reason"] for case in found["cases"])
