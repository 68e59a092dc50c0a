"""Gradient scaling and accumulation for PyTorch in one fused pass."""

from __future__ import annotations

from . import amp, functional
from .optimizer import AccumulatingOptimizer

__all__ = ["AccumulatingOptimizer", "amp", "functional"]
__version__ = "0.1.0"
