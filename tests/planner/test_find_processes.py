"""Searches in processes: the size that is found runs and the next does not, and no process remains.

A process that loads torch takes seconds. If only its end matters, it runs a stand-in for `planner.find`.
"""

import _thread
import dataclasses
import os
import pickle
import resource
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from searched_steps import UNIT, blocks, gpu_blocks

from fusedacc.planner import find, find_micro_batch_size

#: Seconds after which a process that should write something, or end, has failed.
PATIENCE = 600


def children() -> set[int]:
    """Return all child processes of this one, including zombies."""
    listed = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {int(number) for each in listed for number in each.read_text().split()}


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))

    def state() -> tuple:
        return torch.get_rng_state().tolist(), resource.getrlimit(resource.RLIMIT_AS), children()

    before = state()
    yield
    assert state() == before
    # torch has a cache there.
    assert [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []


def until(condition: Callable[[], object]) -> None:
    """Wait until the condition is true."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def has_ended(number: str) -> bool:
    """Return whether a process has ended, also if it is a zombie."""
    path = Path(f"/proc/{number}/stat")
    return not path.exists() or path.read_text().rpartition(")")[2].split()[0] == "Z"


def test_the_largest_that_fits_is_found():
    budget = int((8 * UNIT + UNIT // 2) / 0.95)
    finder = find._Finder(find._trial_spec(blocks, "cpu", budget, 0.05), PATIENCE, 20, 9)
    with find._bar(True) as finder.bar:
        found = finder.find(8)
    assert found.micro_batch_size == 8
    assert [each[:2] for each in found.tries] == [(8, True), (9, False), (8, True)]
    assert found.margin_bytes == int(found.budget_bytes * 0.05)
    assert "20 updates ran within 340 MiB; 9 does not fit" in str(found)
    # If there is room, the C library reserves 64 MiB when it tries again.
    said = r"does not fit within 340 MiB, .* which lacked (20|84)(\.\d)? MiB at least: .*can't alloc"
    with pytest.raises(torch.OutOfMemoryError, match=said):
        finder._refuse(finder.outcomes[9])


SCRIPT = """
import searched_steps

class Step:
    def __call__(self):
        return searched_steps.trains_and_fails()
"""


def test_a_script_trains_until_its_exception_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    main = types.ModuleType("__main__")
    main.__file__ = str(tmp_path / "script.py")
    Path(main.__file__).write_text(SCRIPT)
    exec(SCRIPT, main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    said = "update 3 with micro-batch size 2 failed: KeyError: 'no such'"
    with pytest.raises(RuntimeError, match=said) as raised:
        find_micro_batch_size(main.Step(), start=2, maximum=2, steps=3, progress=False)
    assert isinstance(raised.value.__cause__, KeyError)
    assert "in run\n" in str(raised.value)
    assert "this was printed" in str(raised.value)


STAND_IN = """
import os, signal, subprocess, time
from multiprocessing.connection import Connection

def main(handle):
    connection = Connection(handle)
    connection.recv_bytes()
    connection.send_bytes({loaded!r})
    {act}()

def dies():
    os.kill(os.getpid(), signal.SIGSEGV)

def hangs():
    other = subprocess.Popen(["sleep", "600"])
    with open({where!r} + "-", "w") as file:
        file.write(f"{{os.getpid()}} {{other.pid}}")
    os.rename({where!r} + "-", {where!r})
    time.sleep(600)
"""


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, act: str) -> Path:
    """Make processes report that they are loaded, and then die or hang. Return the file with their ids."""
    where, package = folder / "numbers", folder / "fusedacc" / "planner"
    package.mkdir(parents=True)
    loaded = pickle.dumps(2**30)
    (package / "find.py").write_text(STAND_IN.format(loaded=loaded, act=act, where=str(where)))
    for each in (package, package.parent):
        (each / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(folder))
    return where


def test_a_process_that_dies_with_size_1_is_an_error(tmp_path, monkeypatch):
    stand_in(monkeypatch, tmp_path, "dies")
    said = r"does not run with micro-batch size 1: the process died by SIGSEGV"
    with pytest.raises(RuntimeError, match=said) as raised:
        find_micro_batch_size(blocks, maximum=1, memory_budget="1GiB", progress=False)
    assert "find.py" in str(raised.value), "the stack"


def test_an_update_that_hangs(tmp_path, monkeypatch):
    where = stand_in(monkeypatch, tmp_path, "hangs")
    order = dataclasses.replace(find._trial_spec(blocks, "cpu", "1GiB", 0.0), size=3)
    with find.Child(order, PATIENCE, lambda *update: None).started() as one:

        def hasten() -> None:
            until(where.exists)
            one.timeout = 0.25

        watch = threading.Thread(target=hasten)
        watch.start()
        said = "update 1 with micro-batch size 3 took longer than the timeout of 0.25 s"
        with pytest.raises(TimeoutError, match=said) as raised:
            one.outcome()
        watch.join()
    assert "in hangs\n" in str(raised.value)
    until(lambda: all(map(has_ended, where.read_text().split())))


def test_an_interrupt_ends_all(tmp_path, monkeypatch):
    where = stand_in(monkeypatch, tmp_path, "hangs")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs lack it
    watch = threading.Thread(target=lambda: (until(where.exists), _thread.interrupt_main()))
    try:
        watch.start()
        with pytest.raises(KeyboardInterrupt):
            find_micro_batch_size(blocks, maximum=1, memory_budget="1GiB", progress=False)
    finally:
        watch.join()
        signal.signal(signal.SIGINT, before)
    until(lambda: all(map(has_ended, where.read_text().split())))


@pytest.mark.cuda
def test_the_largest_that_fits_on_a_gpu_is_found():
    budget = int(2.5 * UNIT / 0.95)
    options = {"maximum": 4, "memory_budget": budget, "device": "cuda", "steps": 3, "progress": False}
    found = find_micro_batch_size(gpu_blocks, **options)
    assert found.micro_batch_size == 2
