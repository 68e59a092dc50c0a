"""All benchmarks run once with the smallest sizes: the rows that they write. No test checks times."""

import multiprocessing
import re

import forked
import pytest
import torch
from bench_setup import CPU, run_main
from ranks import on_ranks

from benchmarks import harness, run_all
from benchmarks.records import Results
from benchmarks.suites import (
    data_parallel,
    dram_check,
    fsdp,
    host_time,
    kernels,
    layers,
    models,
    peak_memory,
    rounding,
    training,
)


def measured_here(loop, config, updates):
    """Return what `peak_memory` measures in a new process, with a constant for resident memory."""
    return peak_memory.measure_here(loop, config, updates) | {"resident": 3_000_000}


def on_two_ranks(measure, *given):
    return on_ranks(2, measure, *given)[0]


@pytest.fixture(scope="module")
def rows():
    """Return the rows of every benchmark, by its name."""
    results, threads = Results(None, CPU), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        # The compiler and Triton's interpreter are slow.
        fast = [name for name in kernels.PROVIDERS if not {"compiled", "triton"} & set(name.split())]
        patch.setattr(kernels, "PROVIDERS", fast)
        patch.delitem(data_parallel.VARIANTS, "bfloat16")
        patch.setattr(multiprocessing, "get_context", lambda method: forked.context)  # has loaded torch
        patch.setattr(data_parallel, "on_all_ranks", on_two_ranks)
        patch.setattr(peak_memory, "measure_fresh", measured_here)
        assert run_all.run(run_all.BENCHMARKS, results, "quick") == {}
    assert torch.get_num_threads() == threads
    return {name: [row for row in results.rows if row.benchmark == name] for name in run_all.BENCHMARKS}


@pytest.mark.parametrize("name", run_all.BENCHMARKS)
def test_every_benchmark_has_rows_or_reasons(name, rows):
    assert any(row.median is not None for row in rows[name])
    notes = {row.note for row in rows[name] if row.median is None}
    if torch.__version__.startswith(("2.10.", "2.11.")):
        notes -= {
            note for note in notes if name == "pipelines"
        }  # torch sends to its own rank, and gloo refuses
    known = "is not installed|sees no CUDA|needs operands|dtypes are equal|addmm.dtype_out|too long"
    assert [note for note in notes if not re.fullmatch(rf"not run: .*({known}).*", note)] == []


def test_layers_move_the_bytes_promised(rows):
    modes = {"weight gradients", "forward and backward", "lookup", "host"}
    assert {row.mode for row in rows["layers"]} == modes
    limits = [row.reached for row in rows["layers"] if row.against == "limit"]
    assert limits == ["yes"] * 2 * len(layers.DTYPES)
    assert not any(row.reached for row in rows["layers"] if row.mode == "lookup"), "no tiny table's goal"


def test_host_time_has_the_calls_of_each_part(rows):
    found = {(row.case, row.provider, row.metric): row.median for row in rows["host_time"]}
    cases = [f"{layers} Linear" for layers in host_time.QUICK_LAYERS]
    wanted = {(case, way, "time") for case in cases for way in host_time.WAYS}
    wanted |= {
        (case, way, f"Python calls: {part}")
        for case in cases
        for way in (harness.WRAPPED, harness.INSIDE)
        for part in host_time.PARTS
    }
    assert set(found) == wanted
    assert found[cases[0], harness.WRAPPED, "Python calls: step"] > 0
    lines = host_time.overview(rows["host_time"]).splitlines()
    assert len(lines) == 2 + len(cases) * len(host_time.WAYS)


@pytest.mark.parametrize("dtypes", ["float32", "bfloat16 into float32"])
def test_training_has_every_measure_and_its_parts_add_up(dtypes, rows):
    ours = [r for r in rows["training"] if (r.provider, r.dtypes) == ("fusedacc, fused AdamW", dtypes)]
    median = {row.metric: row.median for row in ours}
    wanted = {"time", "tokens per second", "peak memory", "bytes", "bytes: others"}
    wanted |= {f"{what}: {phase}" for what in ("time", "bytes") for phase in training.PHASES}
    wanted |= {f"peak memory: {kind}" for kind in training.KINDS}
    assert set(median) == wanted
    kinds = sum(median[f"peak memory: {kind}"] for kind in training.KINDS)
    assert kinds == pytest.approx(median["peak memory"])
    phases = sum(median[f"bytes: {phase}"] for phase in training.PHASES)
    assert phases == pytest.approx(median["bytes"])
    against = {"stock, fused AdamW"}
    if dtypes != "float32":
        against = {"stock, grad_dtype, fused AdamW", "stock, mixed add_ in a hook, fused AdamW"}
    assert {row.against for row in ours if row.goal and row.metric == "time"} == against


def test_fsdp_has_every_measure_of_every_way(monkeypatch):
    monkeypatch.setattr(data_parallel, "on_all_ranks", on_two_ranks)
    monkeypatch.setattr(fsdp, "POLICIES", {"float32": fsdp.POLICIES["float32"]})
    results = Results(None, CPU)
    fsdp.figures(results, "quick")
    found = {(row.metric, row.provider): row for row in results.rows}
    metrics = "time", "peak memory", "gradient bytes"
    errors = {("gradient error", way) for way in ("PyTorch, kept", "model=, kept")}
    assert set(found) == {(metric, way) for metric in metrics for way in fsdp.WAYS} | errors
    assert all(0 < found[error].median < 1e-6 for error in errors)
    assert found["gradient bytes", "model=, kept"].median < found["gradient bytes", "PyTorch, kept"].median
    goals = {way for (metric, way), row in found.items() if metric != "gradient bytes" and row.goal}
    assert goals == {"model=, kept", "model=, resharded"}


@pytest.mark.parametrize(
    ("suite", "option", "said"),
    [
        (run_all, "--only third", "unknown benchmark 'third'; allowed: models, update, kernels, "),
        (kernels, "--providers nonsense", "unknown provider 'nonsense'; allowed: .*torch._foreach_add_"),
        (kernels, "--dtypes nonsense", "unknown dtype 'nonsense'; allowed: .*bfloat16:float32"),
        (kernels, "--sizes nonsense", "unknown size 'nonsense'; allowed: .*1000x1000"),
        (models, "--models gpt5", "unknown model 'gpt5'; allowed: resnet50, vit_b_16"),
        (models, "--settings fp8", "unknown setting 'fp8'; allowed: float32, autocast, bfloat16"),
        (models, "--providers apex", "unknown provider 'apex'; allowed: stock as written, .*floor"),
        (dram_check, "--cases nothing", "unknown case 'nothing'; allowed: fusedacc cuda bf16"),
        (dram_check, "--device cpu", "needs a CUDA GPU"),
        (rounding, "--only others", "unknown .*'others'; allowed: "),
    ],
)
def test_wrong_options_list_what_is_allowed(suite, option, said):
    device = [] if suite is dram_check else ["--device", "cpu"]
    code, _, err = run_main(suite, "--quick", *device, *option.split())
    assert code != 0
    assert re.search(said, err)
