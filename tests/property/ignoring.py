"""What backwards inside `ignore()` leave, for those who play the optimizer without hooks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor


class Ignoring:
    """The gradients that stand in `p.grad` and count for nothing.

    They are there only where no parameter's `p.grad` holds one that counts.
    """

    def __init__(self) -> None:
        self._left: list[Tensor] = []

    def has(self, p: Tensor) -> bool:
        return any(p.grad is gradient for gradient in self._left)

    @contextmanager
    def around(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Context around such backwards: what counts is out of `p.grad`."""
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
        """They are gone, or the user has set them to zero."""
        self._left = []
