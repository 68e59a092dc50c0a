"""Helpers for the tests of the benchmarks: the environment, rows of results, and commands."""

import contextlib
import importlib
import io
import os
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

pytest.importorskip("tqdm", reason="the benchmarks show progress by tqdm")

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]

# Importing the package sets variables that pin threads. Other tests must not inherit them.
with mock.patch.dict(os.environ):
    importlib.import_module("benchmarks")

from benchmarks.records import Case, Results, row  # noqa: E402  (after the environment is back)


def some_rows(count=1, provider="ours", case="case", **columns):
    columns = {"median": 2.0, "p20": 1.0, "p80": 3.0, **columns}
    return [row(Case("tests", case), provider, **columns) for _ in range(count)]


def write_rows(path: Path, *figures: tuple, **conditions: str) -> Path:
    """Write a results file of (provider, median, p20, p80, columns), measured under these conditions."""
    kept = Results(path)
    kept.conditions = {**kept.conditions, **conditions}
    for provider, median, p20, p80, columns in figures:
        kept.add(some_rows(provider=provider, median=median, p20=p20, p80=p80, **columns))
    return path


def page_of(target: str, *parts: str) -> str:
    """Return a page whose parts `make target` writes."""
    marked = "".join(
        f"<!-- {part}: written by make {target} -->\nold\n<!-- end of {part} -->\n" for part in parts
    )
    return f"# name\nprose that stays\n{marked}the end\n"


def run_main(module: ModuleType, *options: object) -> tuple[int, str, str]:
    """Run a command in this process. Return its exit status, standard output and standard error."""
    code: object = 0
    argv = [f"{module.__name__}.py", *map(str, options)]
    with (
        mock.patch.object(sys, "argv", argv),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            module.main()
        except SystemExit as end:
            code = end.code
    if isinstance(code, str):
        return 1, out.getvalue(), err.getvalue() + code
    return int(code or 0), out.getvalue(), err.getvalue()
