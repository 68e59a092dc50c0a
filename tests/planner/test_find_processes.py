"""Searches in processes: what is found runs and the next does not, and nothing is left behind."""

from __future__ import annotations

import dataclasses
import functools
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from searched_steps import (
    UNIT,
    Run,
    blocks,
    dies_from,
    gpu_blocks,
    hangs,
    layers,
    wrong_from,
)

import fusedacc
from fusedacc.planner import child, find, find_micro_batch_size

# Processes: a few searches at a time


def start(pool: ThreadPoolExecutor, step: Callable[[], Run], **options: Any) -> Future[find.FoundSize]:
    options = {"maximum": 1, "memory_budget": "1GiB", "steps": 3, "progress": False, **options}
    return pool.submit(find_micro_batch_size, step, **options)


def children() -> set[int]:
    """All processes that this one has started and that are there, zombies included."""
    listed = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {int(number) for each in listed for number in each.read_text().split()}


def all_end(numbers: str) -> bool:
    """Whether processes are gone, or soon are; one that nobody has waited for does not count."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        states = [Path(f"/proc/{number}/stat") for number in numbers.split()]
        if all(not path.exists() or path.read_text().rpartition(")")[2].split()[0] == "Z" for path in states):
            return True
        time.sleep(0.05)
    return False


def wait_for(path: Path) -> str:
    """What is written there by and by."""
    while not (path.exists() and path.read_text()):
        time.sleep(0.05)
    return path.read_text()


def time_out(where: Path) -> str:
    """What is said of a hanging update: the time that processes take to load is not to be told from here."""
    order = find._order(functools.partial(hangs, str(where)), "cpu", "1GiB", 0.0)
    with child.Child(dataclasses.replace(order, size=3), 500.0, lambda *update: None) as one:
        watch = threading.Thread(target=lambda: (wait_for(where), setattr(one, "timeout", 0.25)))
        watch.start()
        with pytest.raises(TimeoutError) as raised:
            one.outcome()
        watch.join()
    assert all_end(wait_for(where))
    return str(raised.value)


def train() -> tuple[find.FoundSize, child.Outcome]:
    """What is found for a model, and how it ends with two samples more and the same limit."""
    found = find_micro_batch_size(layers, start=2, maximum=3, memory_budget="215MiB", steps=4, progress=False)
    order = find._order(layers, "cpu", found.budget_bytes, 0.05)
    return found, find._Finder(order, 500.0, 4, 64).attempt(found.micro_batch_size + 2, 4)


SCRIPT = """
import signal, sys, fusedacc.planner, searched_steps

class Step:
    def __call__(self):
        return searched_steps.hangs(sys.argv[1])

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs lack
    fusedacc.planner.find_micro_batch_size(Step(), maximum=1, memory_budget="1GiB")
"""


def interrupt(where: Path) -> tuple[int, str]:
    """What comes of Ctrl-C, in a script with a step of its own."""
    script = where.with_suffix(".py")
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(Path(fusedacc.__file__).parents[1]), str(Path(__file__).parent)])
    process = subprocess.Popen(
        [sys.executable, str(script), str(where)],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
    )
    numbers = wait_for(where)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert all_end(numbers)
    return process.returncode, said


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[Any]]:
    """Several searches, with what of this process was there before and after."""
    folder, temporary = tmp_path_factory.mktemp("find"), tmp_path_factory.mktemp("temporary")
    torch.manual_seed(0)
    before = (torch.get_rng_state().tolist(), resource.getrlimit(resource.RLIMIT_AS), children())
    eight = int((8 * UNIT + UNIT // 2) / 0.95)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(tempfile, "tempdir", str(temporary))
        patch.setenv("TMPDIR", str(temporary))
        found: dict[str, Future[Any]] = {
            "layers": pool.submit(train),
            "blocks": start(pool, blocks, start=8, maximum=9, memory_budget=eight, steps=20, progress=True),
            "interrupt": pool.submit(interrupt, folder / "interrupted"),
            "time out": pool.submit(time_out, folder / "hanging"),
            "wrong": start(pool, functools.partial(wrong_from, 2), start=2, maximum=2, memory_budget=None),
            "dies": start(pool, functools.partial(dies_from, 1, signal.SIGSEGV)),
            "too small": start(pool, blocks, memory_budget=UNIT // 2, margin=0.0),
        }
    assert (torch.get_rng_state().tolist(), resource.getrlimit(resource.RLIMIT_AS), children()) == before
    # torch has a cache there.
    assert [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []
    return found


def the_largest_that_fits_is_found(ends: dict[str, Future[Any]]):
    found = ends["blocks"].result()
    assert found.micro_batch_size == 8
    assert [each[:2] for each in found.tries] == [(8, True), (9, False), (8, True)]
    assert found.margin_bytes == int(found.budget_bytes * 0.05)
    assert "20 updates ran within 340 MiB; 9 does not fit" in str(found)


def training_runs_with_what_is_found_and_not_with_more(ends: dict[str, Future[Any]]):
    found, above = ends["layers"].result()
    assert found.tries[-1][:2] == (found.micro_batch_size, True)
    assert not above.fits
    assert "can't allocate memory" in above.why


def the_exception_of_a_step_is_raised(ends: dict[str, Future[Any]]):
    with pytest.raises(
        RuntimeError, match="update 1 with micro-batch size 2 failed: KeyError: 'no such'"
    ) as raised:
        ends["wrong"].result()
    assert isinstance(raised.value.__cause__, KeyError)
    assert "in run\n" in str(raised.value)
    assert "this was printed" in str(raised.value)


def a_process_that_dies_with_size_1_is_an_error(ends: dict[str, Future[Any]]):
    said = r"does not run with micro-batch size 1: the process died by SIGSEGV"
    with pytest.raises(RuntimeError, match=said) as raised:
        ends["dies"].result()
    assert "searched_steps.py" in str(raised.value)  # the stack


def not_even_one_fits(ends: dict[str, Future[Any]]):
    said = r"size 1 does not fit within 20 MiB, .* which lacked 20(\.\d)? MiB at least: .*can't alloc"
    with pytest.raises(torch.OutOfMemoryError, match=said):
        ends["too small"].result()


def an_update_that_hangs(ends: dict[str, Future[Any]]):
    said = ends["time out"].result()
    assert said.startswith("update 1 with micro-batch size 3 took longer than the timeout of 0.25 s")
    assert "in run\n" in said


def an_interrupt_ends_all(ends: dict[str, Future[Any]]):
    status, said = ends["interrupt"].result()
    assert status == -signal.SIGINT
    assert "KeyboardInterrupt" in said


def test_real_searches(ends: dict[str, Future[Any]]):
    """One test, so that no two workers make all of them."""
    the_largest_that_fits_is_found(ends)
    training_runs_with_what_is_found_and_not_with_more(ends)
    the_exception_of_a_step_is_raised(ends)
    a_process_that_dies_with_size_1_is_an_error(ends)
    not_even_one_fits(ends)
    an_update_that_hangs(ends)
    an_interrupt_ends_all(ends)


@pytest.mark.cuda
def test_the_largest_that_fits_on_a_gpu_is_found():
    budget = int(2.5 * UNIT / 0.95)
    found = find_micro_batch_size(
        gpu_blocks, maximum=4, memory_budget=budget, device="cuda", steps=3, progress=False
    )
    assert found.micro_batch_size == 2
