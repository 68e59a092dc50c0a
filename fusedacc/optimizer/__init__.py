"""`AccumulatingOptimizer`: loops, windows, update, checkpoints."""

from .wrapper import AccumulatingOptimizer

__all__ = ["AccumulatingOptimizer"]
