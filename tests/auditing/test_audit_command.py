"""`python -m fusedacc audit`: exit statuses, the script's own environment, and bad input."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from subprocess import CompletedProcess

import forked
import pytest

import fusedacc
from fusedacc import __main__

PROGRAM = "import sys; from fusedacc.__main__ import main; sys.exit(main())"
#: A script that trains with windows of 4 micro-batches; `divisor` divides the loss.
TRAIN = """
import sys
import torch
from torch import nn
torch.manual_seed(0)
divisor = float(sys.argv[1]) if len(sys.argv) > 1 else 4
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(12):
    (model(torch.randn(5, 8)).square().mean() / divisor).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def run(folder: Path, *arguments: str, script: str | None = None) -> CompletedProcess[str]:
    """Run the command in a folder. script: text that replaces train.py."""
    if script is not None:
        (folder / "train.py").write_text(textwrap.dedent(script))
    return forked.run(PROGRAM, "audit", *arguments, folder=folder)


def test_no_problem(folder):
    done = run(folder, "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(
        "Gradient accumulation of train.py: 12 micro-batches, 3 updates, SGD, float32"
    )
    assert "No problem found." in done.stderr


def test_a_problem_names_the_line_and_json_has_it(folder):
    done = run(folder, "--json", "report.json", "train.py", "1")
    assert done.returncode == 1, done.stderr
    assert "nothing divides by their number\n    Where: backward() at train.py:10\n" in done.stderr
    found = json.loads((folder / "report.json").read_text())
    assert (found["status"], found["problems"][0]["location"]) == (1, "train.py:10")


def test_the_script_sees_its_own_surroundings(folder):
    script = """
    import os, pickle, sys
    class Value: pass
    assert pickle.loads(pickle.dumps(Value())).__class__ is Value
    print(sys.argv, __name__, os.path.basename(__file__), sys.modules["__main__"].Value is Value)
    print(sys.path[0] == os.path.dirname(os.path.realpath(__file__)))
    """
    done = run(folder, "train.py", "--json", "x", "-m", script=script)
    assert done.stdout == "['train.py', '--json', 'x', '-m'] __main__ train.py True\nTrue\n"
    assert not (folder / "x").exists()


def test_a_module(folder):
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "train.py").write_text(TRAIN)
    done = run(folder, "-m", "package.train", "1")
    assert done.returncode == 1, done.stderr
    assert "Gradient accumulation of package.train: " in done.stderr
    assert "Where: backward() at train.py:10\n" in done.stderr


def test_a_failure_of_the_script_is_shown_before_the_report(folder):
    done = run(folder, "train.py", script=TRAIN + "\nraise ValueError('broken')")
    assert done.returncode == 2
    traceback, report = done.stderr.split("ValueError: broken\n")
    assert traceback.count("File ") == 1
    assert 'train.py", line 15' in traceback
    assert "No problem found." in report


@pytest.mark.parametrize(
    ("end", "arguments", "status"),
    [
        ("sys.exit(0)", ["1"], 1),
        ("sys.exit(0)", [], 0),
        ("sys.exit(3)", [], 2),
        ("sys.exit('good bye')", [], 2),
        ("raise KeyboardInterrupt", [], 0),
        ("raise KeyboardInterrupt", ["1"], 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", ["1"], 1),
    ],
)
def test_the_end_of_the_script(folder, end, arguments, status):
    done = run(folder, "train.py", *arguments, script=f"{TRAIN}\n{end}")
    assert done.returncode == status, done.stderr
    assert "12 micro-batches, 3 updates" in done.stderr
    assert "Traceback" not in done.stderr
    if "Keyboard" in end:
        assert done.stderr.startswith("Interrupted.\n")
    if "good bye" in end:
        assert done.stderr.startswith("good bye\n")


def test_updates_and_stop(folder):
    script = f"{TRAIN}\nprint('went on')"
    done = run(folder, "--updates", "2", "train.py", script=script)
    assert (done.returncode, done.stdout) == (0, "went on\n")
    assert "8 micro-batches, 2 updates" in done.stderr
    done = run(folder, "--updates", "2", "--stop", "train.py", "1", script=script)
    assert (done.returncode, done.stdout) == (1, "")


def test_a_script_may_change_to_another_folder(folder):
    done = run(folder, "--json", "report.json", "train.py", script=f"{TRAIN}\nimport os; os.chdir('/')")
    assert done.returncode == 0, done.stderr
    assert (folder / "report.json").exists()


def test_a_failure_after_the_audited_updates_is_not_hidden(folder):
    done = run(folder, "--updates", "2", "train.py", script=f"{TRAIN}\nsys.exit(3)")
    assert done.returncode == 2, done.stderr
    assert "8 micro-batches, 2 updates" in done.stderr


def test_the_script_inherits_no_future_statement(folder):
    script = """
    from dataclasses import dataclass, fields
    @dataclass
    class Options:
        size: int
    print(fields(Options)[0].type)
    """
    assert run(folder, "train.py", script=script).stdout == "<class 'int'>\n"


BAD_INPUT = {
    "no update": ("print('hello')", "no update was seen: the script called no optimizer's step()"),
    "no gradient": (
        "import torch\nlayer = torch.nn.Linear(2, 2)\ntorch.optim.SGD(layer.parameters()).step()",
        "no update was seen: step() was called, but no parameter of the optimizer had a gradient",
    ),
    "meta device": (
        "import torch\nlayer = torch.nn.Linear(2, 2, device='meta')\n"
        "layer(torch.ones(1, 2, device='meta')).sum().backward()",
        "the model is on the meta device, where gradients have no numbers: train it on a real device",
    ),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_what_cannot_be_checked(folder, name):
    script, message = BAD_INPUT[name]
    done = run(folder, "train.py", script=script)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Nothing could be checked." in done.stderr
    assert "Traceback" not in done.stderr


def test_two_audits_at_once_are_refused(folder):
    script = "import fusedacc\nwith fusedacc.audit(): pass"
    done = run(folder, "train.py", script=script)
    assert done.returncode == 2
    assert "RuntimeError: an audit is already running: end it before you begin another one" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "there is no file missing.py: name a script, or use -m with a module's name"),
        (["--updates", "-1", __file__], "updates must be 0 (all) or more, not -1"),
        (["--ignore", "typo", __file__], "there is no kind of problem 'typo': choose from lost, double"),
        (["--scale", "-2", __file__], "scale must be positive, not -2.0"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(arguments, message, capsys):
    assert __main__.main(["audit", *arguments]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"python -m fusedacc audit: {message}")
    assert printed.count("\n") == 1


def test_torchrun(folder):
    """Both ranks train alone, on different data, which is a problem of the ranks."""
    script = TRAIN.replace(
        "torch.manual_seed(0)",
        "import atexit; atexit.register(lambda: print('divisor', divisor))\n"
        "torch.distributed.init_process_group('gloo')\ntorch.manual_seed(torch.distributed.get_rank())",
    )
    (folder / "train.py").write_text(script + "\ntorch.distributed.destroy_process_group()")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    root = Path(fusedacc.__file__).parents[1]
    done = subprocess.run(
        [*torchrun, "-m", "fusedacc", "audit", "train.py"],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert "each rank uses only its own gradients: nothing averages them over the ranks" in done.stderr
    assert "24 micro-batches, 3 updates, SGD, float32, 2 ranks" in done.stderr
    assert done.stdout.count("divisor 4") == 2  # __main__ stays until the end
    assert done.returncode == 1
