"""A pytest plugin that runs tests on the emulated device.

    PYTHONPATH=tests python -m pytest -p emulation.plugin -m cuda

Environment:
    EMULATION_SEED: the seed. The seed and a test's name determine the order of blocks and threads. By default
        the seed is random. The header of the run shows it.
    EMULATION_PTX=1: run the kernels as the PTX that nvcc generates. Tests of Triton are deselected.
    EMULATION_SHARE=N: run one in N tests, chosen by the seed.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterator

import pytest

from . import build, unsupported
from .activation import activate

SEED = int(os.environ.setdefault("EMULATION_SEED", str(random.SystemRandom().randrange(2**32))))
RUNS_PTX = os.environ.get("EMULATION_PTX") == "1"
SHARE = int(os.environ.get("EMULATION_SHARE", "1"))
PROBLEM = build.obstacle()
if PROBLEM is None and RUNS_PTX:
    from .ptx import nvcc

    PROBLEM = nvcc.obstacle()

kernels = None if PROBLEM else activate(RUNS_PTX)


def chosen(purpose: str, node: str) -> int:
    """Return a number that depends on the seed, a purpose and a test's name."""
    return zlib.crc32(f"{SEED} {purpose} {node}".encode())


def pytest_report_header() -> str:
    if PROBLEM:
        return f"emulated GPU: {PROBLEM}"
    kernels_are = "nvcc's PTX" if RUNS_PTX else "compiled by g++"
    return f"emulated GPU: EMULATION_SEED={SEED}, kernels are {kernels_are}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if PROBLEM:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=PROBLEM))
        return
    kept = [item for item in items if chosen("share", item.nodeid) % SHARE == 0]
    kept = [item for item in kept if not (RUNS_PTX and "triton" in item.nodeid)]
    here = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in here])
    items[:] = kept
    for item in items:
        reason = unsupported.reason(item.nodeid)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"not emulated: {reason}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test if the device reports an error while the test runs."""
    if kernels is None:
        return (yield)
    from . import torch_cuda

    kernels.emu_set_seed(chosen("order", item.nodeid))
    torch_cuda.take_reports()
    result = yield
    torch_cuda.device.device_synchronize()
    found = torch_cuda.take_reports()
    if found:
        pytest.fail(f"the emulated device reports {len(found)} errors, the last: {found[-1]}")
    return result
