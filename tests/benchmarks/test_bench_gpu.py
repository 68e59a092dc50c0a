"""The script for a machine with a GPU and the check of the byte counter with ncu, both tested without one."""

import os
import re
import subprocess
from pathlib import Path

from bench_setup import ROOT, run_main

from benchmarks.contestants import model_shapes
from benchmarks.harness import chosen
from benchmarks.suites import dram_check, kernels, models
from fusedacc.commands.measuring.records import Results, read

SCRIPT = ROOT / "benchmarks" / "gpu_run.sh"
PART_SECONDS = 570


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **variables}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


# The script


def steps(*arguments: str, **variables: str) -> list[tuple[str, str, int, str]]:
    """Return the part, name, seconds and command of each step."""
    found = run("bash", SCRIPT, *arguments, DRY_RUN="1", **variables)
    assert found.returncode == 0, found.stderr
    rows = [text.split("\t") for text in found.stdout.splitlines()]
    return [(part, name, int(limit.removesuffix(" s")), command) for part, name, limit, command in rows]


def test_every_part_builds_first_and_ends_within_ten_minutes(tmp_path):
    parts: dict[str, list[tuple[str, int]]] = {}
    for part, name, limit, _ in steps(OUT=str(tmp_path / "out")):
        parts.setdefault(part, []).append((name, limit))
    assert list(parts) == ["part 1", "part 2", "part 3", "part 4", "part 5"]
    parts["part first"] = [(name, limit) for _, name, limit, _ in steps("first")]
    for part, found in parts.items():
        assert sum(limit for _, limit in found) <= PART_SECONDS, part
        assert "build" in [name for name, _ in found][:2], part
    names = [name for found in parts.values() for name, _ in found]
    wanted = "tests memcheck racecheck initcheck kernels update dram_check models training"
    assert set(wanted.split()) <= set(names)
    assert not (tmp_path / "out").exists(), "a dry run wrote files"


def test_the_steps_of_the_first_part():
    found = {name: command for _, name, _, command in steps("first")}
    order = "machine build info selftest backends tests dram_check kernels models memcheck wrapper_window"
    assert list(found) == order.split()
    # Check names here, because otherwise a wrong name would fail only on the GPU.
    asked = dict(
        re.findall(r"--(sizes|dtypes|providers|cases|models|settings) (.*?)(?= --|$)", found["kernels"])
    )
    chosen(asked["sizes"], kernels.SIZES, "size")
    chosen(asked["dtypes"], tuple(kernels.DTYPES), "dtypes")
    chosen(asked["providers"], kernels.PROVIDERS, "provider")
    (settings,) = re.findall(r"--settings (\S+)", found["models"])
    chosen(settings, models.SETTINGS, "setting")
    (command,) = [command for _, name, _, command in steps() if name == "models"]
    (listed,) = re.findall(r" --models (.*) --results", command)
    assert {"resnet50", "gpt2"} < set(listed.split(",")) <= set(model_shapes.NAMES)
    counted = [command for _, name, _, command in steps("3") if name == "dram_check"]
    for command in (found["dram_check"], *counted):
        (named,) = re.findall(r"--cases (.*?) --results", command)
        assert 2 <= len(chosen(named, list(dram_check.CHECKS), "case")) <= 4


def test_the_script_runs_every_file_of_gpu_tests():
    (command,) = [command for _, name, _, command in steps("first") if name == "tests"]
    named = command.split("-m cuda ")[1].split()
    marked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^(@|pytestmark = )pytest\.mark\.cuda$", file.read_text(), re.MULTILINE)
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
    found = run("bash", SCRIPT, PATH=path, PYTHON=str(python), OUT=str(out))
    assert found.returncode == 1, found.stderr
    summary = (out / "summary.txt").read_text()
    results = dict(re.findall(r"^part \d  (\S+) +(\S.*?) +\d+ s of \d+$", summary, re.MULTILINE))
    assert len(summary.splitlines()) == len(steps())
    wrong = {name: result for name, result in results.items() if result != "passed"}
    assert wrong == {"dram_check": "skipped", "models": "FAILED (3)", "training": "TIMED OUT"}
    assert found.stdout.splitlines()[-1].startswith("FAILED: models training")
    files = {file.name: file.stat().st_size for file in out.iterdir()}
    assert set(files) == {"results.csv", "summary.txt", *(f"part{part}.log" for part in range(1, 6))}
    assert max(files.values()) < 2_000_000
    for part, words in ((1, "bytes left out"), (1, "the end of the tests"), (2, "--tool racecheck")):
        assert words in (out / f"part{part}.log").read_text()


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
