"""The script for a machine with a GPU and the check of the byte counter with ncu, both tested without one."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from bench_setup import ROOT, run_main

from benchmarks.contestants import model_shapes
from benchmarks.harness import chosen
from benchmarks.records import Results, read
from benchmarks.suites import dram_check, head, kernels

SCRIPT = ROOT / "benchmarks" / "gpu_run.sh"
#: The most seconds of each part that someone may run who has a GPU for a quarter of an hour.
PART_SECONDS = {"first": 420, "second": 240}


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "FUSEDACC_COMMIT": "some", **variables}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


# The script


def steps(*arguments: str, **variables: str) -> list[tuple[str, str, int, str]]:
    """Return the part, name, seconds and command of each step."""
    found = run("bash", SCRIPT, *arguments, DRY_RUN="1", **variables)
    assert found.returncode == 0, found.stderr
    rows = [text.split("\t") for text in found.stdout.splitlines()]
    return [(part, name, int(limit.removesuffix(" s")), command) for part, name, limit, command in rows]


def test_the_limits_of_each_part_add_up(tmp_path):
    for part, most in PART_SECONDS.items():
        found = steps(part, OUT=str(tmp_path / "out"))
        assert {each[0] for each in found} == {part}
        assert sum(limit for *_, limit, _ in found) <= most
        assert "build" in [name for _, name, *_ in found][:2]
    assert not (tmp_path / "out").exists(), "a dry run wrote files"


def test_what_matters_most_is_run_first():
    first = [name for _, name, *_ in steps("first")]
    assert first == ["machine", "build", "backends", "selftest", "tests", "end_to_end"]
    second = [name for _, name, *_ in steps("second")]
    assert second == ["build", "kernels", "experts", "head", "host_time", "memcheck", "dram_check"]
    everything = {name for _, name, *_ in steps("all")}
    assert {*first, *second} <= everything
    assert {"racecheck", "initcheck", "update", "models", "training", "peak_memory"} <= everything


@pytest.mark.parametrize("arguments", [(), ("third",), ("first", "second")], ids=" ".join)
def test_an_unknown_part_is_an_error(arguments):
    found = run("bash", SCRIPT, *arguments, DRY_RUN="1")
    assert (found.returncode, found.stdout) == (2, "")
    assert "allowed: first second all" in found.stderr


@pytest.mark.parametrize("effort", ["quick", "short"])
def test_the_options_of_benchmarks_name_what_exists(effort):
    """Otherwise a wrong name would fail only on the GPU."""
    commands = {name: command for _, name, _, command in steps("second", EFFORT=effort)}

    def option(benchmark: str, name: str) -> str:
        (given,) = re.findall(rf" --{name} (.*?)(?= --|$)", commands[benchmark])
        return given

    chosen(option("kernels", "sizes"), kernels.SIZES, "size")
    chosen(option("kernels", "dtypes"), tuple(kernels.DTYPES), "dtypes")
    chosen(option("kernels", "providers"), kernels.PROVIDERS, "provider")
    chosen(option("dram_check", "cases"), list(dram_check.CHECKS), "case")
    cases = [size.case("head") for size in head.main_sizes(effort, torch.device("cuda"))]
    assert cases
    assert all(option("head", "only") in f"{case.benchmark} {case.case} {case.dtypes}" for case in cases)
    (command,) = [command for _, name, _, command in steps("all", EFFORT="short") if name == "models"]
    (listed,) = re.findall(r" --models (.*) --results", command)
    assert {"resnet50", "gpt2"} < set(listed.split(",")) <= set(model_shapes.NAMES)


def test_the_script_runs_every_file_of_gpu_tests():
    (command,) = [command for _, name, _, command in steps("first") if name == "tests"]
    named = command.split("-m cuda ")[1].split()
    marked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^(@|pytestmark = )pytest\.mark\.cuda$", file.read_text(), re.MULTILINE)
        and "emulation" not in file.parts
    }
    assert marked
    assert all(any(file == path or file.startswith(f"{path}/") for path in named) for file in marked)


STUB = """#!/usr/bin/env bash
case "$*" in
  *"-m cuda tests/cuda"*) head -c 900000 /dev/zero | tr '\\0' x; echo; echo the end of the tests ;;
  *"benchmarks.suites.models "*) echo no models; exit 3 ;;
  *dram_check*) echo skipped: no counters; exit 77 ;;
esac
while [ $# -gt 0 ]; do
  [ "$1" = --results ] && echo row >>"$2"
  shift
done
exit 0
"""
TIMEOUT = """#!/usr/bin/env bash
[[ "$*" == *benchmarks.suites.training* ]] && exit 124
while [[ "$1" == --* ]]; do shift; done
shift
exec "$@"
"""


def test_later_steps_run_after_a_failed_step_and_few_files_remain(tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    python = executable(tools / "python-stub", STUB)
    executable(tools / "nvidia-smi", "#!/bin/sh\n")
    executable(tools / "timeout", TIMEOUT)
    executable(tools / "compute-sanitizer", '#!/bin/sh\necho "sanitizer $*"\n')
    out = tmp_path / "out"
    path = os.pathsep.join([str(tools), os.environ["PATH"]])
    found = run("bash", SCRIPT, "all", PATH=path, PYTHON=str(python), OUT=str(out))
    assert found.returncode == 1, found.stderr
    summary = (out / "summary.txt").read_text()
    results = dict(re.findall(r"^all  (\S+) +(\S.*?) +\d+ s of \d+$", summary, re.MULTILINE))
    assert len(summary.splitlines()) == len(steps("all"))
    wrong = {name: result for name, result in results.items() if result != "passed"}
    assert wrong == {"dram_check": "skipped", "models": "FAILED (3)", "training": "TIMED OUT"}
    assert found.stdout.splitlines()[-1].startswith("FAILED: models training")
    files = {file.name: file.stat().st_size for file in out.iterdir()}
    assert set(files) == {"results.csv", "summary.txt", "all.log"}
    assert max(files.values()) < 2_000_000
    log = (out / "all.log").read_text()
    assert all(words in log for words in ("bytes left out", "the end of the tests", "--tool racecheck"))


# The check against the DRAM counters

#: Behaves like ncu: writes its listing, and prints the output of the program.
NCU = """#!/bin/sh
while [ $# -gt 0 ]; do
  case "$1" in
    --log-file) /bin/cat "{folder}/listing" >"$2" ;;
    --launch) [ ! -f "{folder}/$2" ] || exec /bin/cat "{folder}/$2" ;;
  esac
  shift
done
exit 1
"""
COLUMNS = ("ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value")
COUNTERS = (  # of two kernels
    ("0", "k", "dram__bytes_read.sum", "byte", "3,500"),
    ("0", "k", "dram__bytes_write.sum", "byte", "4,000"),
    ("1", "l", "dram__bytes_read.sum", "byte", "2,500"),
    ("1", "l", "dram__bytes_write.sum", "byte", "0"),
)


def test_cases_are_measured_even_if_one_fails(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("FUSEDACC_COMMIT", raising=False)
    listing = [",".join(map('"{}"'.format, row)) for row in (COLUMNS, *COUNTERS)]
    (tmp_path / "listing").write_text("\n".join(["==PROF== Connected to process 2583", *listing]))
    executable(tmp_path / "ncu", NCU.format(folder=tmp_path))
    names = ["fusedacc cuda bf16", "torch mixed add_", "torch AdamW fused"]
    for name in names[1:]:  # what the program prints, if it can run
        options = ("--launch", name, "--elements", 1000, "--device", "cpu")
        (tmp_path / name).write_text(run_main(dram_check, *options)[1])
    dram_check.figures(Results(tmp_path / "results.csv"), "short", names, 1000)
    ours, add, update = read(tmp_path / "results.csv")
    assert ours["note"].startswith("not run: ended with status 1")
    assert (add["bytes"], add["median"], add["reached"]) == ("10000", "10000", "yes")
    assert add["commit"] == "unknown", "there is no git on PATH"
    # Per element: 16 bytes read (weight, gradient, two moments) and 12 written; and one step count.
    assert 28_000 <= int(update["bytes"]) <= 28_100
    assert (update["mode"], update["reached"]) == ("update", "no")
