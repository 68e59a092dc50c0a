"""Linear and Embedding modules that accumulate in their backward: their weight gradients are never written."""

from .modules import Replacements

__all__ = ["Replacements"]
