"""Audits gradient accumulation: which micro-batches reach the optimizer, and with which weight.

It watches any PyTorch training, with or without the wrapper of this package, of which it imports nothing.
"""

from .session import Audit, audit

__all__ = ["Audit", "audit"]
