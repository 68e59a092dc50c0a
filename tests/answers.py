"""Trials whose outcome a test decides."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

from fusedacc.kernels import tuning


@contextlib.contextmanager
def trials(**variables: str) -> Iterator[None]:
    """Trials are allowed, and this process has found nothing yet."""
    with (
        mock.patch.dict(os.environ, {tuning.VARIABLE: "1", **variables}),
        mock.patch.dict(tuning._found, clear=True),
        mock.patch.object(tuning, "preemptions", return_value=0),  # other tests run beside
    ):
        yield


@contextlib.contextmanager
def answer(*answers: str) -> Iterator[None]:
    """This process has found these answers: a question's name, its way, and so on in pairs."""
    with trials():
        for name, way in zip(answers[::2], answers[1::2], strict=True):
            tuning._found[tuning.machine(), name] = tuning.Choice(way, "says the test")
        yield
