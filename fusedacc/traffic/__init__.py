"""Bytes moved: computed from dtypes (`bytes_per_micro_batch`), or counted in a run (`TrafficMeter`)."""

from .accounting import LOOPS, Part, bytes_per_micro_batch, bytes_per_window, total
from .meter import TrafficMeter

__all__ = ["LOOPS", "Part", "TrafficMeter", "bytes_per_micro_batch", "bytes_per_window", "total"]
