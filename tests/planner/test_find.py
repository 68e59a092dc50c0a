"""The search for a micro-batch size, without processes: sizes that it tries, failures, bad input."""

import resource
import sys
import types
from unittest import mock

import pytest
import torch
from searched_steps import MIB, Run, blocks

from fusedacc.planner import find, find_micro_batch_size

# The search itself, without processes


def searched(start: int, maximum: int, largest: int, doubtful: bool = False) -> tuple[int, list[int]]:
    asked: list[int] = []

    def attempt(size: int) -> find.Outcome:
        asked.append(size)
        return find.Outcome(size <= largest, doubtful=doubtful)

    return find.search(attempt, start, maximum), asked


def test_the_search_finds_the_largest_size_from_anywhere_and_asks_once():
    for maximum in (1, 2, 3, 7, 24):
        for start in range(1, maximum + 1):
            for largest in range(maximum + 3):
                for doubtful in (False, True):
                    found, asked = searched(start, maximum, largest, doubtful)
                    assert found == min(largest, maximum)
                    assert len(asked) == len(set(asked))
                    assert asked[0] == start
                    assert max(asked) <= maximum


def test_the_search_doubles_halves_and_bisects():
    assert searched(4, 1000, 37)[1] == [4, 8, 16, 32, 64, 48, 40, 36, 38, 37]
    assert searched(64, 1000, 9)[1] == [64, 32, 16, 8, 12, 10, 9]
    assert searched(64, 64, 64)[1] == [64]
    assert searched(64, 64, 2, doubtful=True)[1][:2] == [64, 1]


ORDER = find.Order(b"", {}, "cpu", 1, 0, 3, budget=1000 * MIB, margin=0.1)


class Confirmed(find._Finder):
    """Sizes up to `largest` run three updates. Sizes up to `lasting` run all updates."""

    largest, lasting = 9, 7

    def attempt(self, size: int, updates: int = find.TRIED_UPDATES) -> find.Outcome:
        fits = size <= (self.largest if updates == find.TRIED_UPDATES else self.lasting)
        self.outcomes[size] = find.Outcome(fits, why="too large")
        self.tries.append(find.Try(size, fits, 1.0))
        return self.outcomes[size]


def test_a_size_that_fails_later_is_replaced_by_the_next_smaller():
    found = Confirmed(ORDER, 1.0, 100, 64).find(8)
    assert (found.micro_batch_size, found.margin_bytes, found.budget_bytes) == (7, 100 * MIB, 1000 * MIB)
    assert [each.size for each in found.tries][-4:] == [9, 8, 6, 7]
    assert str(found).splitlines() == [
        "micro-batch size 7: 100 updates ran within 900 MiB; 8 does not fit",
        "budget 1000 MiB, of which 100 MiB were kept free as a margin",
        f"{len(found.tries)} tries in {len(found.tries)} s",
    ]
    Confirmed.lasting = 0
    with pytest.raises(torch.OutOfMemoryError, match="size 1 does not fit within 900 MiB, the bud"):
        Confirmed(ORDER, 1.0, 100, 64).find(8)


def test_a_slightly_smaller_size_is_found_in_few_tries():
    for largest in (1, 2, 20):
        for fits in range(largest + 1):
            attempt = mock.Mock(side_effect=lambda size, fits=fits: find.Outcome(size <= fits))
            assert find.search(attempt, largest, largest, near=True) == fits
            asked = [each.args[0] for each in attempt.call_args_list]
            assert asked[:2] in ([largest], [largest, largest - 1], [1])
            assert len(asked) == len(set(asked)) <= 9


# What an exception means


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (MemoryError(), "memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "memory"),
        (RuntimeError("std::bad_alloc"), "memory"),
        (RuntimeError("can't start new thread"), "memory"),
        (OSError(12, "Cannot allocate memory"), "memory"),
        (RuntimeError("could not create a primitive"), "doubtful"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), "doubtful"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "error"),
        (KeyError("out of memory"), "error"),
        (SystemExit(0), "error"),
    ],
)
def test_what_an_exception_means(problem: BaseException, kind: str):
    assert find.kind_of(problem) == kind
    outer = ValueError("the batch failed")
    outer.__cause__ = problem
    assert find.kind_of(outer) == kind


def test_a_step_must_return_a_callable():
    told = r"step\(\) must return a callable run\(micro_batch_size\); it returned 7"
    with pytest.raises(TypeError, match=told):
        next(find._updates(lambda: 7, ORDER, torch.device("cpu")))


def test_the_limit_of_a_gpu_is_a_share_of_all_its_memory(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[float, torch.device]] = []
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *both: asked.append(both))
    limit = find.LIMITS["cuda"](gpu)
    limit.set(570)
    limit.set(2000)
    limit.lift()
    assert asked == [(0.6, gpu), (1.0, gpu), (1.0, gpu)]


def test_an_earlier_limit_is_not_raised(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[int, int]] = []
    limit = find.Limit(torch.device("cpu"))
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: asked.append(both))
    infinite = resource.RLIM_INFINITY
    for before in ((infinite, infinite), (limit.base + 5, infinite), (infinite, limit.base + 7)):
        limit.before = before
        limit.set(50)
    limit.before = (infinite, infinite)
    limit.set(2**70)
    assert [soft - limit.base for soft, _ in asked[:3]] == [50, 5, 7]
    assert [hard for _, hard in asked] == [infinite, infinite, limit.base + 7, infinite]
    assert asked[3][0] == sys.maxsize


# Bad input, before anything is started


class Unpicklable:
    def __call__(self) -> Run:
        return blocks()

    def __reduce__(self) -> str:
        raise ValueError("holds a lock")


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"step": 7}, TypeError, "step is a callable without arguments, .*; it was 7"),
        ({"step": lambda: None}, TypeError, "Move lambdas and local functions to module level"),
        ({"step": Unpicklable()}, TypeError, "must be picklable.*holds a lock"),
        ({"start": 0}, ValueError, "start is an int of at least 1; it was 0"),
        ({"start": 9}, ValueError, "start is at most maximum, 8; it was 9"),
        ({"start": 2.0}, TypeError, "start is an int of at least 1; it was 2.0"),
        ({"maximum": 0}, ValueError, "maximum is an int of at least 1; it was 0"),
        ({"maximum": True}, TypeError, "maximum is an int of at least 1; it was True"),
        ({"steps": 2}, ValueError, "steps is an int of at least 3; it was 2"),
        ({"margin": 1.0}, ValueError, "margin is a number, at least 0 and below 1; it was 1.0"),
        ({"margin": "5%"}, TypeError, "margin is a number, .*'5%'"),
        ({"timeout": 0}, ValueError, "timeout is a number, seconds above 0; it was 0"),
        ({"timeout": float("nan")}, ValueError, "timeout is a number, seconds above 0; it was nan"),
        ({"memory_budget": "a lot"}, ValueError, "memory_budget is a number of bytes.*it was 'a lot'"),
        ({"memory_budget": 1.5}, TypeError, "memory_budget is a number of bytes.*it was 1.5, float"),
        ({"device": "meta"}, ValueError, 'device is "cpu" or "cuda"; it was "meta"'),
    ],
)
def test_bad_input(monkeypatch, changed, error, said):
    monkeypatch.setattr(find, "Child", None)
    options = {"step": blocks, "maximum": 8, "memory_budget": "1GiB", "progress": False, **changed}
    with pytest.raises(error, match=said):
        find_micro_batch_size(options.pop("step"), **options)


def test_a_step_of_an_interactive_session(monkeypatch: pytest.MonkeyPatch):
    main = types.ModuleType("__main__")
    exec("def step():\n    pass", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(TypeError, match=r"from an interactive session.*; move it to a module"):
        find_micro_batch_size(main.step, maximum=8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_does_not_exist():
    with pytest.raises(ValueError, match=r'device is "cuda:1", and torch.cuda.is_available\(\) is false'):
        find_micro_batch_size(blocks, maximum=8, device="cuda:1")


def test_a_search_inside_a_try_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(find, "in_child", True)
    with pytest.raises(RuntimeError, match='under `if __name__ == "__main__":`'):
        find_micro_batch_size(blocks, maximum=8)
