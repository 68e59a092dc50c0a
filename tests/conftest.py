"""What all tests share: seeds, the skip of GPU tests with its reason, and which part of a sweep runs."""

import gc
import importlib.metadata
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import build_cache
import interpreter
import pytest
import sweeps
import torch
from backends import cpu_backends

FRAMEWORKS = Path(__file__).parents[1] / "requirements-integrations.txt"


def missing_frameworks() -> list[str]:
    """What `tests/integrations` needs and this environment lacks; `make test-integrations` has its own."""
    wanted = re.findall(r"^[A-Za-z0-9][\w.-]*", FRAMEWORKS.read_text(), re.MULTILINE)
    return [name for name in wanted if not any(importlib.metadata.distributions(name=name))]


# Collecting a module whose framework is missing would stop the whole run.
collect_ignore = ["integrations"] if missing_frameworks() else []

# Inductor's own default is a folder that goes with the machine's next start.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(build_cache.CACHE / "inductor"))

# Tests name the way that they want; what a trial finds differs from machine to machine.
os.environ["FUSEDACC_TUNE"] = "0"
# They check more than a self-test, and count launches, memory and waits, of which it has its own.
os.environ["FUSEDACC_SELFTEST"] = "0"

if not torch.cuda.is_available():
    # Before anything imports Triton: its kernels then run on CPU tensors, interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(trylast=True)  # of what -k and -m have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not sweeps.FULL:
        dropped = sweeps.left_out(items)
        config.hook.pytest_deselected(items=dropped)
        gone = set(dropped)
        items[:] = [item for item in items if item not in gone]
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU: torch.cuda.is_available() is false")
    for item in items:
        if item.get_closest_marker("cuda") is not None:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What is there by now stays: collections in tests, which many ask for, need not look at it each time."""
    interpreter.quicken()
    gc.collect()
    gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cpu_backend" in metafunc.fixturenames:
        metafunc.parametrize("cpu_backend", cpu_backends())


def _seed(node: str) -> int:
    return zlib.crc32(node.encode())


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Seed torch's global generator by the test's own name: the same numbers whatever ran before."""
    torch.manual_seed(_seed(request.node.nodeid))


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    """A CPU generator of the test's own."""
    return torch.Generator().manual_seed(_seed(request.node.nodeid))


@pytest.fixture(autouse=True)
def _no_backend_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSEDACC_BACKEND", raising=False)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No garbage collection: what must go by itself must go at once."""
    gc.disable()
    yield
    gc.enable()
