"""Gradient scaling and accumulation for PyTorch in one fused pass."""

from __future__ import annotations

from . import amp, functional, nn
from .optimizer import AccumulatingOptimizer

__all__ = ["AccumulatingOptimizer", "amp", "functional", "nn"]
__version__ = "0.1.0"
