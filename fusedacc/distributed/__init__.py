"""Data parallelism: a window's sums are reduced over the ranks once, in few pieces of memory."""

from .data_parallel import DataParallel, check
from .ddp import parallel_in
from .reducer import Part, Totals
from .rows import Place

__all__ = ["DataParallel", "Part", "Place", "Totals", "check", "parallel_in"]
