"""Gradient scaling and accumulation for PyTorch in one fused pass."""

from __future__ import annotations

from . import amp, functional, nn
from .auditing import audit
from .nn import Sink, sink
from .optimizer import AccumulatingOptimizer

__all__ = ["AccumulatingOptimizer", "Sink", "amp", "audit", "functional", "nn", "sink"]
__version__ = "0.1.0"
