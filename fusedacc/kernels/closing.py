"""Objects that put back what they have replaced when nothing refers to them any more."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable


class ClosesItself(ABC):
    """Closes an object when it is freed, but not when the interpreter exits.

    At exit the variables of modules may be None already, but not the default value of an argument.
    """

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting():
            self.close()

    @abstractmethod
    def close(self) -> None:
        """Put everything back. A second call does nothing."""
