"""The native engine is built at first use. A script stands for the compiler: it copies the engine."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import forked
import pytest
from loops import TRAINS

import fusedacc
from fusedacc.kernels import cache_folder, engine_build, engine_command, native_module

ENGINE = native_module.path()
pytestmark = pytest.mark.skipif(ENGINE is None, reason="there is no engine to copy")
#: Runs a command for each call, notes its arguments, and makes the file that follows -o.
COMPILER = f"""#!/bin/sh
echo "$*" >> "$0.calls"
{{}}
target=
for word; do [ "$last" = -o ] && target=$word; last=$word; done
case "$*" in *-shared*) cp "{ENGINE}" "$target" ;; *) : > "$target" ;; esac
"""


class Installed:
    """A copy of the package without an engine, an empty cache folder, and a script in place of a compiler.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        package = Path(fusedacc.__file__).parent
        ignored = shutil.ignore_patterns("_autograd*", "__pycache__")
        shutil.copytree(package, folder / "fusedacc", ignore=ignored)
        self.sources = folder / "fusedacc" / "csrc"
        sources = engine_build.sources()
        assert sources is not None
        shutil.copytree(sources, self.sources)
        self.cache = folder / "cache"
        self.compiler = folder / "compiler"
        self.write_compiler()

    def write_compiler(self, before: str = "") -> None:
        """Write the compiler's script. before: a command that it runs first."""
        self.compiler.write_text(COMPILER.format(before))
        self.compiler.chmod(0o755)

    def start(self, program: str = TRAINS, **variables: str | None) -> forked.Running:
        here = {
            "CXX": str(self.compiler),
            cache_folder.VARIABLE: str(self.cache),
            engine_build.VARIABLE: None,
        }
        return forked.start(program, root=self.folder, folder=self.folder, **{**here, **variables})

    def run(self, program: str = TRAINS, **variables: str | None) -> tuple[str, str]:
        """Return what a program writes to standard output and to standard error."""
        done = self.start(program, **variables).wait()
        assert done.returncode == 0, done.stderr
        return done.stdout.strip(), done.stderr.strip()

    def calls(self) -> int:
        """Return how often the compiler was called."""
        calls = self.folder / "compiler.calls"
        return len(calls.read_text().splitlines()) if calls.exists() else 0


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    return Installed(tmp_path)


def test_the_engine_is_built_once_by_the_first_that_needs_it(installed):
    kernels = "import fusedacc, fusedacc.functional, fusedacc.traffic; fusedacc.audit\n"
    kernels += "with fusedacc.traffic.TrafficMeter(): pass"
    assert installed.run(kernels) == ("", "")
    assert installed.calls() == 0  # the program makes no wrapper
    said, line = installed.run()
    assert said == "None"
    assert installed.calls() == 2  # to compile and to link
    assert line.count("\n") == 0
    assert "building the native engine for torch" in line
    assert engine_build.DURATION in line
    assert installed.run() == ("None", "")
    assert installed.calls() == 2


@pytest.mark.parametrize("change", ["sources", "compiler command"])
def test_another_version_of_the_sources_gets_its_own_engine(installed, change):
    installed.run()
    changed = installed.sources / "common/functors.h"
    if change == "compiler command":
        changed = installed.folder / "fusedacc/kernels/engine_command.py"
    changed.write_text(changed.read_text() + "\n")
    assert "building" in installed.run()[1]
    assert installed.calls() == 4


def test_of_several_processes_one_builds_and_the_others_wait(installed):
    installed.write_compiler("sleep 1")
    done = [running.wait() for running in [installed.start() for _ in range(3)]]
    assert [each.stdout.strip() for each in done] == ["None"] * 3
    assert installed.calls() == 2
    lines = [each.stderr.strip() for each in done]
    assert sum("building the native engine" in line for line in lines) == 1
    assert any("waiting for another process" in line for line in lines)


def test_a_build_that_fails_warns_once_and_is_not_tried_again(installed):
    installed.write_compiler('echo "engine.cpp:1: error: bad header" >&2; exit 3')
    said, warned = installed.run()
    (log,) = installed.cache.glob("engine/*.log")
    for text in (said, warned):
        assert f"exit status 3: engine.cpp:1: error: bad header). The whole output is in {log}" in text
    assert "UserWarning: fusedacc runs without its native engine, and saves nothing" in warned
    assert "bad header" in log.read_text()
    assert installed.calls() == 1
    again, nothing = installed.run()
    assert (again, nothing) == (said, "")
    assert installed.calls() == 1
    installed.run(FUSEDACC_BUILD="1")
    assert installed.calls() == 2
    # Another compiler may do better.
    installed.write_compiler()
    os.utime(installed.compiler, (1, 1))
    assert installed.run()[0] == "None"


#: Makes Python's headers appear to be missing.
NO_HEADERS = """
import sysconfig
found = sysconfig.get_paths
sysconfig.get_paths = lambda *args, **kwargs: {**found(*args, **kwargs), "include": "/nowhere"}
"""
#: Makes every folder appear to belong to another user. Root could write to it.
NOT_WRITABLE = "import os; os.access = lambda path, mode, **_: not mode & os.W_OK\n"
NO_HOME = """
import os, pathlib
os.environ.pop("XDG_CACHE_HOME", None)
def home():
    raise RuntimeError("Could not determine home directory.")
pathlib.Path.home = home
"""


@pytest.mark.parametrize(
    ("before", "variables", "reason"),
    [
        ("", {"FUSEDACC_BUILD": "0"}, "FUSEDACC_BUILD=0 prevents building it"),
        ("", {"FUSEDACC_ENGINE": "0"}, "FUSEDACC_ENGINE=0"),
        ("", {"CXX": "no-compiler"}, "CXX=no-compiler was not found, so it cannot be built. Install g++"),
        (
            "",
            {"CXX": None, "PATH": "/nowhere"},
            "no C++ compiler was found, so it cannot be built. Install g++",
        ),
        (NO_HEADERS, {}, "Python.h is not in /nowhere, so it cannot be built. Install Python's headers"),
        ("", {"FUSEDACC_CACHE": "/dev/null"}, "Set FUSEDACC_CACHE to a folder"),
        (NOT_WRITABLE, {}, "engine, which is not writable. Set FUSEDACC_CACHE to a folder"),
        (NO_HOME, {"FUSEDACC_CACHE": None}, "there is no home folder to build it in. Set FUSEDACC_CACHE"),
        ("", {"CXX": "'g++"}, "CXX='g++: No closing quotation"),
        ("import shutil; shutil.rmtree('fusedacc/csrc')\n", {}, "its sources are not in"),
    ],
)
def test_without_a_build_training_works_and_the_reason_says_what_to_do(installed, before, variables, reason):
    said, warned = installed.run(before + TRAINS, **variables)
    assert reason in said
    assert warned == ""
    assert installed.calls() == 0


@pytest.mark.parametrize(
    "end", ["kill -9 $$", "echo 'fatal error: Killed signal terminated program cc1plus' >&2; exit 1"]
)
def test_a_compiler_that_was_stopped_is_tried_again(installed, end):
    installed.write_compiler(end)
    said, warned = installed.run()
    assert "The next run tries again" in said
    assert "fusedacc runs without its native engine" in warned
    installed.write_compiler()
    os.utime(installed.compiler, (1, 1))
    assert installed.run()[0] == "None"


@pytest.mark.parametrize(("choice", "would_repeat"), [("1", True), ("", True), ("", False)])
def test_processes_that_waited_do_not_try_again_what_has_failed(tmp_path, monkeypatch, choice, would_repeat):
    monkeypatch.setenv(engine_build.VARIABLE, choice)
    note = engine_build._Note(tmp_path / "engine.so", [sys.executable])
    assert note.read(0.0) is None
    note.write("it failed\ntwice", would_repeat)
    (written,) = tmp_path.iterdir()
    os.utime(written, (1000, 1000))
    assert note.read(began=999) == "it failed\ntwice"
    later = "it failed\ntwice" if would_repeat and choice != "1" else None
    assert note.read(began=1001) == later


def test_an_error_of_the_linker_is_named(installed):
    output = "In file included from c10/util/error.h:3\ncollect2: error: ld returned 1 exit status\n"
    output += "/usr/bin/ld: cannot find -ltorch"
    installed.write_compiler(f"printf '{output}\n' >&2; exit 1")
    assert "(exit status 1: /usr/bin/ld: cannot find -ltorch)" in installed.run()[0]


def test_a_compiler_of_spaces_is_none():
    with mock.patch.dict(os.environ, {"CXX": " ", "PATH": "/nowhere"}):
        assert engine_command.find_compiler() is None


def test_info_works_without_a_home(installed):
    program = NO_HOME + "from fusedacc import __main__; __main__.main(['info'])"
    said, _ = installed.run(program, FUSEDACC_CACHE=None)
    assert "there is no home folder to build it in" in " ".join(said.split())


def test_info_and_explain_say_what_is_lost(installed):
    program = """
import torch, fusedacc
from fusedacc import __main__
p = torch.nn.Parameter(torch.zeros(3))
print(fusedacc.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2).explain())
__main__.main(["info"])
"""
    said, _ = installed.run(program, CXX="no-compiler")
    assert " ".join(said.split()).count(f"The next run builds the engine): {native_module.LOST}") == 2


def test_an_unknown_value_is_an_error_when_a_wrapper_is_made(installed):
    done = installed.start(FUSEDACC_BUILD="yes").wait()
    assert "ValueError: FUSEDACC_BUILD='yes': allowed are '0' " in done.stderr


def test_an_engine_that_does_not_load_can_be_deleted(installed):
    installed.run()
    (engine,) = installed.cache.glob("engine/*.so")
    engine.write_bytes(b"no library")
    said, _ = installed.run()
    assert f"{engine} does not load" in said
    assert said.endswith(f"To build it again, delete {engine}")


def test_a_released_engine_is_found_by_the_commit_of_torch(installed):
    """The builds of one commit have the same headers, for CPUs and for every version of CUDA."""
    program = """
import sysconfig, torch
from fusedacc.kernels import engine_command
soabi = sysconfig.get_config_var("SOABI")
print(engine_command.released_file_name(torch.__version__, torch.version.git_version, soabi))
"""
    name, _ = installed.run(program)
    assert "+" not in name
    shutil.copy(ENGINE, installed.folder / "fusedacc" / name)
    for changed in ("torch.version.git_version = '0' * 40", "torch.__version__ = '2.99'"):
        said, _ = installed.run(f"import torch; {changed}{TRAINS}", FUSEDACC_BUILD="0")
        assert "none is installed for torch 2." in said
    assert installed.run() == ("None", "")
    assert installed.calls() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs flock")
def test_a_killed_build_leaves_nothing_that_is_used(installed):
    installed.write_compiler("echo $$ > $0.pid; exec sleep 60")
    running = installed.start()
    while not (installed.folder / "compiler.pid").exists():
        running.process.join(0.05)
    running.process.kill()
    running.wait()
    subprocess.run(["kill", (installed.folder / "compiler.pid").read_text().strip()], check=True)
    installed.write_compiler()
    assert installed.run()[0] == "None"
