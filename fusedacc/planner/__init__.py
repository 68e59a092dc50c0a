"""What fits in memory, which micro-batch, and why: `plan` predicts, `find_micro_batch_size` tries."""

from .allocations import KINDS
from .budget import available, format_bytes, parse_bytes
from .find import FoundSize, Try, find_micro_batch_size
from .plans import Plan, plan
from .prediction import DataDependentError

__all__ = [
    "KINDS",
    "DataDependentError",
    "FoundSize",
    "Plan",
    "Try",
    "available",
    "find_micro_batch_size",
    "format_bytes",
    "parse_bytes",
    "plan",
]
