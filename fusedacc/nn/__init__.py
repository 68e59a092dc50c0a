"""Modules and functions that accumulate in their backward, and write no weight gradient."""

from . import functional
from .patches import Replacements, name_slots

__all__ = ["Replacements", "functional", "name_slots"]
