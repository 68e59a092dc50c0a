"""Gradient scaling and accumulation for PyTorch in one fused pass."""

from __future__ import annotations

from . import functional

__all__ = ["functional"]
