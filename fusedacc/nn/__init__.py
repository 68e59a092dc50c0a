"""Modules and functions that accumulate in their backward, and write no weight gradient."""

from . import functional
from .kept_cast import KeptCasts
from .offered_sums import Sinks
from .patches import Replacements, name_slots
from .sinks import Sink, sink

__all__ = ["KeptCasts", "Replacements", "Sink", "Sinks", "functional", "name_slots", "sink"]
