"""Fixtures and hooks for all tests: seeds, the skip of GPU tests, and the choice of cases in a sweep."""

import gc
import importlib.metadata
import os
import re
import sys
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
    """Return the frameworks that `tests/integrations` needs and this environment lacks.

    `make test-integrations` uses an environment that has them.
    """
    wanted = re.findall(r"^[A-Za-z0-9][\w.-]*", FRAMEWORKS.read_text(), re.MULTILINE)
    return [name for name in wanted if not any(importlib.metadata.distributions(name=name))]


# Ignore modules whose framework is missing, because collecting them would stop the whole run.
collect_ignore = ["integrations"] if missing_frameworks() else []
# Only the emulated GPU runs its own tests.
collect_ignore += [] if "emulation.plugin" in sys.modules else ["emulation"]

# Inductor's default cache is a temporary folder that a restart of the machine deletes.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(build_cache.CACHE / "inductor"))
# Inductor would compile six programs per cache to see whether the instructions that the CPU reports work, and
# headers that save no time here.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")

# Disable the self-test: the tests check more, and they count launches, memory and waits.
os.environ["FUSEDACC_SELFTEST"] = "0"

# A copy of the package without the native engine would build it.
os.environ["FUSEDACC_BUILD"] = "0"

# Most tensors of the tests are so small that a second thread makes operators slower.
torch.set_num_threads(1)

if not torch.cuda.is_available():
    # Set this before anything imports Triton, so that Triton interprets its kernels on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(trylast=True)  # sees only the tests that -k and -m select
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
    """Exclude the objects that exist now from garbage collections, because many tests collect garbage."""
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
    """Seed torch's global generators with the test's name, so that no other test affects the numbers.

    Without a GPU, `torch.manual_seed` would keep a formatted stack for each kind of device.
    """
    seed = _seed(request.node.nodeid)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    """Return a CPU generator for this test."""
    return torch.Generator().manual_seed(_seed(request.node.nodeid))


@pytest.fixture(autouse=True)
def _no_backend_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSEDACC_BACKEND", raising=False)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Disable garbage collection, to test that objects are freed as soon as their last reference is gone."""
    # The first optimizer imports torch._dynamo. Errors in this import keep the frames of the caller alive.
    torch.optim.SGD([torch.zeros(1)], lr=0.0)
    gc.disable()
    yield
    gc.enable()
