"""Linear and Embedding modules that accumulate in their backward, and write no weight gradient."""

from .kept_cast import KeptCasts
from .patches import Replacements, name_slots

__all__ = ["KeptCasts", "Replacements", "name_slots"]
