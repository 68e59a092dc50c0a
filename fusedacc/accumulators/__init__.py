"""Each parameter's accumulator and its p.grad, the engine that adds gradients, and what Python adds."""

from .accumulators import Accumulators
from .param import GradState, Lane, Path, Slot, default_accumulate_dtype

__all__ = ["Accumulators", "GradState", "Lane", "Path", "Slot", "default_accumulate_dtype"]
