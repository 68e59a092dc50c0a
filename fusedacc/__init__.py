"""Gradient scaling and accumulation for PyTorch in one fused pass."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import amp, functional, nn
    from .auditing import audit
    from .nn import Sink, sink
    from .optimizer import AccumulatingOptimizer

__all__ = ["AccumulatingOptimizer", "Sink", "amp", "audit", "functional", "nn", "sink"]
__version__ = "0.2.0"

#: Where public names are defined that are no modules of this package.
_DEFINED_IN = {"AccumulatingOptimizer": "optimizer", "Sink": "nn", "audit": "auditing", "sink": "nn"}


def __getattr__(name: str) -> Any:
    """Import what defines a public name, and PyTorch with it, when the name is first used.

    So `python -m fusedacc --help` answers at once.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_DEFINED_IN.get(name, name)}", __name__)
    value = getattr(module, name) if name in _DEFINED_IN else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
