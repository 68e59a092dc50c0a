"""Each parameter's accumulator and its p.grad: one record, one state machine; adding of gradients."""

from .accumulators import Accumulators
from .param import GradState, Lane, Path, Slot, default_accumulate_dtype

__all__ = ["Accumulators", "GradState", "Lane", "Path", "Slot", "default_accumulate_dtype"]
