"""The arguments of all commands, and their help, which answers without PyTorch."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusedacc import __main__
from fusedacc.commands.arguments import COMMANDS

ROOT = Path(__file__).parents[2]
COMMANDS_PAGE = ROOT / "docs" / "commands.md"


def run_fresh(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a new interpreter, which has not imported torch."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_does_not_import_pytorch(command):
    program = """
import sys
from fusedacc import __main__
slow = ("torch", "numpy", "matplotlib", "triton")
try:
    __main__.main(sys.argv[1:])
finally:
    print([name for name in slow if name in sys.modules], file=sys.stderr)
"""
    found = run_fresh(program, *filter(None, [command]), "--help")
    assert (found.returncode, found.stderr) == (0, "[]\n")
    assert found.stdout.startswith(f"usage: python -m fusedacc {command}".rstrip())


def test_a_public_name_is_imported_when_it_is_used():
    program = """
import sys, fusedacc
assert {*fusedacc.__all__} <= {*dir(fusedacc)} and "torch" not in sys.modules
for name in fusedacc.__all__:
    print(name, getattr(fusedacc, name) is getattr(fusedacc, name))
try:
    fusedacc.accumulate
except AttributeError as error:
    print(error)
"""
    found = run_fresh(program)
    assert found.returncode == 0, found.stderr
    *names, error = found.stdout.splitlines()
    assert len(names) >= 5
    assert all(line.endswith(" True") for line in names)
    assert error == "module 'fusedacc' has no attribute 'accumulate'"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_of_commands_and_the_help_name_the_same_exit_statuses(command, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        __main__.main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    (row,) = [
        line for line in COMMANDS_PAGE.read_text().splitlines() if f"python -m fusedacc {command}" in line
    ]
    for status in ("1", "2", "130"):
        in_help = f" {status} " in text.partition("Exit status: 0")[2].partition("options:")[0]
        assert (f"{status} if" in row or f"{status} after" in row) == in_help, status


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["audit", "--updates", "many", "train.py"], "argument --updates: invalid int value: 'many'"),
        (
            ["bench", "--device", "cuda:99"],
            "argument --device: 'cuda:99' is not an available device; allowed: cpu",
        ),
        (
            ["bench", "--threads", "0"],
            "argument --threads: '0' is not a count; allowed: integers of at least 1",
        ),
        (["plan", "--device", "h900"], "argument --device: 'h900' is not a device; allowed: cpu, cuda"),
        (["plan", "--memory", "12 apples"], "argument --memory: --memory"),
        (["train"], "invalid choice: 'train'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_argument_is_named_with_what_is_allowed(arguments, error, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        __main__.main(arguments)
    output, errors = capsys.readouterr()
    assert output == ""
    assert error in errors


def test_interrupted_selftest(monkeypatch, tmp_path, capsys):
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "device_count", interrupt)
    monkeypatch.chdir(tmp_path)
    assert __main__.main(["selftest", "--no-benchmark"]) == 130
    assert capsys.readouterr() == ("", "stopped\n")
