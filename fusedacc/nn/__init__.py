"""Linear and Embedding modules that accumulate in their backward, and write no weight gradient."""

from .modules import Replacements

__all__ = ["Replacements"]
