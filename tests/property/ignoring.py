"""Gradients that backwards inside `ignore()` leave, for optimizers without hooks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor


class Ignoring:
    """Gradients in `p.grad` that do not count. They stay only if no `p.grad` has a gradient that counts."""

    def __init__(self) -> None:
        self._left: list[Tensor] = []

    def has(self, p: Tensor) -> bool:
        return any(p.grad is gradient for gradient in self._left)

    @contextmanager
    def around(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Remove the gradients that count from `p.grad` while ignored backwards run."""
        kept = [None if self.has(p) else p.grad for p in params]
        for p, gradient in zip(params, kept, strict=True):
            if gradient is not None:
                p.grad = None
        try:
            yield
        finally:
            stays = all(gradient is None for gradient in kept)
            for p, gradient in zip(params, kept, strict=True):
                if gradient is not None or not stays:
                    p.grad = gradient
            self._left = [p.grad for p in params if stays and p.grad is not None]

    def clear(self, params: Sequence[Tensor]) -> None:
        for p in params:
            if p.grad is not None and self.has(p):
                p.grad = None
        self.forget()

    def forget(self) -> None:
        """Forget the gradients, because they are gone or set to zero."""
        self._left = []
