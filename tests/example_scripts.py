"""Runs a script of examples/: in a new process, in this process, or on a pool of ranks."""

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import sweeps
import torch.distributed as dist
from ranks import on_ranks

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def output_of(script: str, *arguments: str, ranks: int | None = None) -> str:
    """Run a script in a new process in an empty folder, and return its output.

    Args:
        script: the script's name.
        arguments: the script's.
        ranks: the number of ranks for torchrun. None: run it without torchrun.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    paths = os.pathsep.join(filter(None, [str(EXAMPLES.parent), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run(
            [sys.executable, *(torchrun if ranks else []), str(EXAMPLES / script), *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert found.returncode == 0, found.stderr
    return found.stdout


def printed_by(script: str, changes: Mapping[str, str] = {}) -> str:
    """Return a script's output, in `make test-full` from a new process, else from this one with changes."""
    return output_of(script) if sweeps.FULL else run_here(script, changes)[1]


def updates_and_accuracy(printed: str) -> tuple[int, float]:
    """Return the number of updates and the accuracy that a script on handwritten digits prints."""
    found = re.search(r"(\d+) updates, accuracy .*?([\d.]+)%", printed)
    assert found is not None, printed
    return int(found[1]), float(found[2])


def assert_learns_digits(script: str, epochs: int) -> None:
    """Check that a script learns. An epoch of 47 micro-batches makes 24 updates; the last has one."""
    updates, accuracy = updates_and_accuracy(printed_by(script))
    assert updates == epochs * 24
    assert accuracy > 85


def run_here(script: str, changes: Mapping[str, str] = {}) -> tuple[dict[str, Any], str]:
    """Run a script in this process, in an empty folder, and return its variables and its output.

    Args:
        script: the script's name.
        changes: text to replace in the script, for example to train fewer epochs.
    """
    source = (EXAMPLES / script).read_text()
    for old, new in changes.items():
        assert old in source, f"{script} has no {old!r}"
        source = source.replace(old, new)
    variables: dict[str, Any] = {"__name__": "__main__"}
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as printed:
        os.chdir(folder)
        try:
            exec(compile(source, script, "exec"), variables)
        finally:
            os.chdir(before)
    return variables, printed.getvalue()


def _printed_on_a_rank(script: str, changes: Mapping[str, str]) -> str:
    """Run a script in the process group that this rank already has, and return its output."""
    with mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT):
        return run_here(script, changes)[1]


def output_on_ranks(script: str, ranks: int, changes: Mapping[str, str]) -> str:
    """Return what a script for torchrun prints on all ranks, with these changes to its text."""
    return "".join(on_ranks(ranks, _printed_on_a_rank, script, changes))
