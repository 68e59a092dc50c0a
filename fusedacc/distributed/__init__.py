"""Data parallelism: a window's sums are reduced over the ranks once, in few pieces of memory."""

from .data_parallel import DataParallel, check, parallel_in
from .reducer import RankNumbers, Totals
from .rows import RankPlace

__all__ = ["DataParallel", "RankNumbers", "RankPlace", "Totals", "check", "parallel_in"]
