"""The search for a micro-batch size: which sizes it tries, what it frees and restores, and bad input.

The tests marked `cuda` allocate on a GPU. The others replace what the search calls of `torch.cuda`.
"""

import contextlib
import gc
import random
import weakref
from collections.abc import Callable

import pages
import pytest
import torch
from torch import nn

import fusedacc
from fusedacc.planner import FoundSize, Try, find, find_micro_batch_size, prediction

MIB = 2**20
UNIT = 40 * MIB
Run = Callable[[int], None]

# The order of sizes


def searched(start: int, maximum: int, largest: int) -> tuple[int, list[int]]:
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= largest

    return find.largest_fitting(fits, start, maximum), asked


def test_the_search_finds_the_largest_size_from_anywhere_and_asks_once():
    for maximum in (1, 2, 3, 7, 24):
        for start in range(1, maximum + 1):
            for largest in range(1, maximum + 3):
                found, asked = searched(start, maximum, largest)
                assert found == min(largest, maximum)
                assert len(asked) == len(set(asked))
                assert all(1 < size <= maximum for size in asked)


def test_the_search_doubles_and_halves_the_interval():
    assert searched(4, 1000, 37)[1] == [4, 8, 16, 32, 64, 48, 40, 36, 38, 37]
    assert searched(64, 1000, 9)[1] == [64, 32, 16, 8, 12, 10, 9]
    assert searched(64, 64, 64)[1] == [64]
    assert searched(1, 6, 6)[1] == [2, 4, 6]


# Without a GPU


@pytest.fixture
def fractions(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replaces a GPU of 1000 MiB, of which 700 are free and 30 reserved. Returns the limits that were set."""
    limits = [0.9]
    replaced = {
        "is_available": lambda: True,
        "current_device": lambda: 1,
        "empty_cache": lambda: None,
        "synchronize": lambda device: None,
        "device": lambda device: contextlib.nullcontext(),
        "mem_get_info": lambda device: (700 * MIB, 1000 * MIB),
        "memory_reserved": lambda device: 30 * MIB,
        "get_device_properties": lambda device: type("Properties", (), {"total_memory": 1000 * MIB}),
        "get_per_process_memory_fraction": lambda device: limits[-1],
        "set_per_process_memory_fraction": lambda share, device: limits.append(share),
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    replaced_state = prediction.kept_random_state
    monkeypatch.setattr(find, "kept_random_state", lambda device: replaced_state(torch.device("cpu")))
    return limits


class Limited:
    """A step that runs out of memory above a size, and after some updates above another one."""

    def __init__(self, largest: int, lasting: int | None = None) -> None:
        self.largest, self.lasting = largest, lasting or largest
        self.updates: dict[int, int] = {}
        self.calls = 0

    def __call__(self) -> Run:
        self.calls += 1
        return self.update

    def update(self, size: int) -> None:
        self.updates[size] = self.updates.get(size, 0) + 1
        limit = self.largest if self.updates[size] <= find.TRIED_UPDATES else self.lasting
        if size > limit:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2 GiB.\nSee the documentation"
            )


def test_the_step_is_called_once_and_the_found_size_runs_all_updates(fractions):
    step = Limited(9)
    found = find_micro_batch_size(step, start=8, maximum=64, memory_budget="400MiB", margin=0.1, steps=20)
    assert step.calls == 1
    sizes = [(tried.size, tried.fits) for tried in found.tries]
    ends = [(1, True), (8, True), (16, False), (12, False), (10, False), (9, True), (9, True)]
    assert sizes == ends
    assert step.updates[9] == find.TRIED_UPDATES + 20
    *lines, last = str(found).splitlines()
    assert lines == [
        "micro-batch size 9: 20 updates ran within 360 MiB; 10 does not fit",
        "budget 400 MiB, of which 40 MiB were kept free as a margin",
    ]
    assert last.startswith("7 tries in ")


def test_a_size_that_fails_later_is_replaced_by_the_next_smaller(fractions):
    found = find_micro_batch_size(Limited(9, 7), start=8, maximum=64, progress=False)
    assert found.micro_batch_size == 7
    assert found.updates == 100
    assert [tried.size for tried in found.tries] == [1, 8, 16, 12, 10, 9, 9, 1, 8, 4, 6, 7]
    with pytest.raises(torch.OutOfMemoryError):
        find_micro_batch_size(Limited(9, -1), start=8, maximum=64, progress=False)
    with pytest.raises(torch.OutOfMemoryError):
        find_micro_batch_size(Limited(1, -1), maximum=64, progress=False)


def test_a_maximum_that_fits():
    found = FoundSize(4, 0, MIB, 4, 3, (Try(4, True, 0.0),))
    assert "; 4 is the maximum" in str(found)


def test_one_sample_that_does_not_fit_is_an_error_that_says_why(fractions):
    said = "size 1 does not fit within 665 MiB, the budget of 700 MiB less a margin of 35 MiB: CUDA out of "
    with pytest.raises(torch.OutOfMemoryError, match=said) as raised:
        find_micro_batch_size(Limited(-1), start=4, maximum=8, progress=False)
    assert "documentation" not in str(raised.value)


def test_the_limit_of_the_allocator_is_lowered_and_restored(fractions):
    find_micro_batch_size(Limited(1), maximum=1, memory_budget="600MiB", margin=0.05, progress=False)
    assert fractions == [0.9, 0.6, 0.9]
    # A limit that is already lower stays.
    fractions[:] = [0.2]
    with pytest.raises(torch.OutOfMemoryError):
        find_micro_batch_size(Limited(-1), maximum=1, progress=False)
    assert fractions == [0.2, 0.2, 0.2]


def test_random_states_are_restored(fractions):
    def step() -> Run:
        return lambda size: (torch.rand(1), random.random())

    before = torch.get_rng_state(), random.getstate()
    find_micro_batch_size(step, maximum=2, progress=False)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_what_a_failed_update_held_is_freed_before_the_next_size(fractions):
    alive: list[weakref.ref] = []
    counts: list[int] = []

    def step() -> Run:
        def inner(size: int) -> None:
            held = nn.Linear(1, 1)  # a cycle of the failed frames would keep it
            alive.append(weakref.ref(held))
            try:
                raise torch.OutOfMemoryError("the first")
            except torch.OutOfMemoryError as error:
                cause = error
                raise torch.OutOfMemoryError("CUDA out of memory") from cause

        def run(size: int) -> None:
            counts.append(sum(one() is not None for one in alive))
            if size > 1:
                inner(size)

        return run

    gc.disable()
    try:
        find_micro_batch_size(step, maximum=9, start=8, steps=3, progress=False)
    finally:
        gc.enable()
    assert len(alive) == 3
    assert set(counts) == {0}
    assert not any(one() is not None for one in alive)


def test_the_step_is_freed_at_the_end(fractions):
    built: list[weakref.ref] = []

    def step() -> Run:
        model = nn.Linear(1, 1)
        built.append(weakref.ref(model))
        return lambda size: model(torch.zeros(size, 1))

    find_micro_batch_size(step, maximum=1, progress=False)
    assert built[0]() is None


def test_another_error_is_raised_with_the_size_and_ends_the_search(fractions):
    def step() -> Run:
        def run(size: int) -> None:
            if size == 4:
                raise KeyError("no such")

        return run

    with pytest.raises(KeyError) as raised:
        find_micro_batch_size(step, maximum=8, progress=False)
    if hasattr(raised.value, "__notes__"):
        assert "a micro-batch of 4" in raised.value.__notes__[-1]
    assert fractions[-1] == fractions[0]


def test_a_step_must_return_a_callable(fractions):
    with pytest.raises(TypeError, match=r"step\(\) must return a callable run\(micro_batch_size\); got 7"):
        find_micro_batch_size(lambda: 7, maximum=1, progress=False)


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"step": 7}, TypeError, "step is a callable without arguments, .*; it was 7"),
        ({"start": 0}, ValueError, "start is an int of at least 1; it was 0"),
        ({"start": 9}, ValueError, "start is at most maximum, 8; it was 9"),
        ({"start": 2.0}, TypeError, "start is an int of at least 1; it was 2.0"),
        ({"maximum": 0}, ValueError, "maximum is an int of at least 1; it was 0"),
        ({"maximum": True}, TypeError, "maximum is an int of at least 1; it was True"),
        ({"steps": 2}, ValueError, "steps is an int of at least 3; it was 2"),
        ({"margin": 1.0}, ValueError, "margin is a number, at least 0 and below 1; it was 1.0"),
        ({"margin": "5%"}, TypeError, "margin is a number, .*'5%'"),
        ({"memory_budget": "a lot"}, ValueError, "memory_budget is a number of bytes.*it was 'a lot'"),
        ({"memory_budget": 1.5}, TypeError, "memory_budget is a number of bytes.*it was 1.5, float"),
        ({"device": "meta"}, ValueError, 'device is a CUDA GPU, such as "cuda"; it was "meta"'),
        ({"device": "cpu"}, ValueError, r"Linux kills a process .* fusedacc\.planner\.plan\(verify=True\)"),
    ],
)
def test_bad_input(fractions, changed, error, said):
    step = Limited(1)
    options = {"step": step, "maximum": 8, "memory_budget": "1GiB", "progress": False, **changed}
    with pytest.raises(error, match=said):
        find_micro_batch_size(options.pop("step"), **options)
    assert step.calls == 0
    assert len(fractions) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_does_not_exist():
    with pytest.raises(ValueError, match=r'device is "cuda:1", and torch.cuda.is_available\(\) is false'):
        find_micro_batch_size(Limited(1), maximum=8, device="cuda:1")


# On a GPU


@pytest.mark.cuda
def test_the_largest_that_fits_on_a_gpu_is_found():
    def blocks() -> Run:
        """Needs a block for each sample, and nothing else."""
        return lambda size: torch.empty(size * UNIT, dtype=torch.uint8, device="cuda")

    before = torch.cuda.get_per_process_memory_fraction()
    options = {"maximum": 8, "memory_budget": int(5.5 * UNIT / 0.95), "steps": 3, "progress": False}
    for start in (1, 8):
        assert find_micro_batch_size(blocks, start=start, **options).micro_batch_size == 5
    assert torch.cuda.get_per_process_memory_fraction() == before
    torch.empty(8 * UNIT, dtype=torch.uint8, device="cuda")


@pytest.mark.cuda
def test_training_goes_on_after_an_update_that_ran_out_of_memory():
    width = 64
    gc.collect()  # other tests' tensors
    held = torch.cuda.memory_allocated()

    def step() -> Run:
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())]
        model = nn.Sequential(*layers).cuda()
        optimizer = fusedacc.AccumulatingOptimizer(torch.optim.AdamW(model.parameters()), 2, model=model)

        def run(size: int) -> None:
            optimizer.discard()
            for _ in range(2):
                model(torch.randn(size * 256, width, device="cuda")).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        return run

    found = find_micro_batch_size(step, maximum=64, memory_budget="12MiB", steps=4, progress=False)
    sizes = {tried.size: tried.fits for tried in found.tries}
    assert 1 < found.micro_batch_size < 64
    assert sizes[found.micro_batch_size + 1] is False
    gc.collect()
    assert torch.cuda.memory_allocated() == held


@pytest.mark.cuda
def test_the_example_of_the_memory_page_runs():
    found = pages.run(
        "../memory",
        only="find_micro_batch_size(",
        torch=torch,
        plan=type("Plan", (), {"micro_batch_size": 2}),
        build_model=lambda: nn.Linear(4, 2),
        sample=lambda size: torch.zeros(size, 4, device="cuda"),
        loss_fn=lambda model, batch: model(batch).sum(),
    )
    assert found["found"].micro_batch_size == 64
