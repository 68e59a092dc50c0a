"""Linear and Embedding modules that accumulate in their backward, and write no weight gradient."""

from .patches import Replacements, name_slots

__all__ = ["Replacements", "name_slots"]
