"""A pytest plugin that runs tests on the emulated device: `pytest -p emulation.plugin -m cuda`.

Environment:
    EMULATION_SEED: from which the order of blocks and threads follows, with each test's name (default: a random
        one, which is printed).
    EMULATION_PTX=1: the kernels run as the PTX that nvcc makes of them.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterator

import pytest

from . import build, unsupported
from .activation import activate

PROBLEM = build.obstacle()
SEED = int(os.environ.setdefault("EMULATION_SEED", str(random.SystemRandom().randrange(2**32))))
RUNS_PTX = os.environ.get("EMULATION_PTX") == "1"


kernels = None if PROBLEM else activate(RUNS_PTX)


def pytest_report_header() -> str:
    if PROBLEM:
        return f"emulated GPU: {PROBLEM}"
    return f"emulated GPU: EMULATION_SEED={SEED}, kernels {'as nvcc made PTX of them' if RUNS_PTX else 'by g++'}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = PROBLEM or unsupported.reason(item.nodeid, RUNS_PTX)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test fails, too, if the device reports a mistake while it runs."""
    if kernels is None:
        return (yield)
    from . import torch_cuda

    kernels.emu_set_seed(zlib.crc32(f"{SEED} {item.nodeid}".encode()))
    torch_cuda.take_reports()
    result = yield
    torch_cuda.device.device_synchronize()
    count, last = torch_cuda.take_reports()
    if count:
        pytest.fail(f"the emulated device reports {count} mistakes, the last: {last}")
    return result
