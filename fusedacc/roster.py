"""Which parameters are accumulated: a slot for each, kept in step with the inner optimizer's groups."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from . import backends
from .capture import Capture
from .checks import PAIRS, allowed_pairs
from .nn import Replacements
from .slot import Slot, default_accumulate_dtype


class Roster:
    """The slots of every parameter in the groups of `inner`.

    Args:
        inner: the inner optimizer.
        accumulate_dtype, backend: as in `AccumulatingOptimizer`.
        lenient: let in a parameter that was cast since it was accepted.

    Raises:
        TypeError: `accumulate_dtype` is no dtype. ValueError: it does not go with a parameter.
        RuntimeError: the backend asked for cannot run here.
    """

    def __init__(
        self, inner: Optimizer, accumulate_dtype: torch.dtype | None, backend: str, lenient: bool = False
    ) -> None:
        if accumulate_dtype is not None and not isinstance(accumulate_dtype, torch.dtype):
            raise TypeError(f"accumulate_dtype must be a torch.dtype or None, got {accumulate_dtype!r}")
        self._inner, self._dtype, self._backend = inner, accumulate_dtype, backend
        #: Shared with whoever works on the parameters; it grows in place.
        self.slots: list[Slot] = []
        for index, group in enumerate(inner.param_groups):
            self.slots += self._new_slots(group, index, lenient)
        self._replacements: Replacements | None = None

    def replace_in(self, model: torch.nn.Module, capture: Capture) -> None:
        """Have those modules of `model` that can add gradients of these parameters to the sums."""
        self._replacements = Replacements(model, capture)

    def restore_modules(self) -> None:
        """Give every module its own forward back."""
        if self._replacements is not None:
            self._replacements.remove()

    def _join(self, slots: list[Slot]) -> None:
        self.slots.extend(slots)
        if self._replacements is not None:
            self._replacements.follow(slots)

    def _new_slots(self, group: dict[str, Any], index: int, lenient: bool = False) -> list[Slot]:
        """Slots for those of the group's parameters that have none."""
        dtype = self._dtype
        names = group.get("param_names") or [f"{index}.{i}" for i in range(len(group["params"]))]
        slots = []
        known = {id(slot.param) for slot in self.slots}
        for param, name in zip(group["params"], names, strict=True):
            if id(param) in known:
                continue
            known.add(id(param))
            wanted = dtype or default_accumulate_dtype(param)
            fits = dtype is None or (param.dtype, dtype) in PAIRS or not param.is_floating_point()
            if not fits and not lenient:
                raise ValueError(
                    f"accumulate_dtype={dtype} does not go with parameter {name!r} of {param.dtype}; allowed "
                    f"(gradient into sum): {allowed_pairs()}"
                )
            if (param.dtype, wanted) in PAIRS and param.device.type != "meta":
                backends.select(param.device, wanted, param.dtype, self._backend)
            slots.append(Slot(param, index, name, dtype))
        return slots

    def add_last_group(self, capture: Capture) -> None:
        """Take in the group that was added last, or take it out of the inner optimizer and raise."""
        groups = self._inner.param_groups
        try:
            slots = self._new_slots(groups[-1], len(groups) - 1)
            capture.claim(slots)
        except Exception:
            groups.pop()
            raise
        self._join(slots)
        capture.refresh()

    def follow(self, capture: Capture) -> None:
        """Take in parameters that were put into `param_groups` behind our back, and re-arm what has moved."""
        groups = self._inner.param_groups
        if sum(len(group["params"]) for group in groups) != len(self.slots):
            for index, group in enumerate(groups):
                slots = self._new_slots(group, index, lenient=True)
                capture.claim(slots)
                self._join(slots)
        capture.refresh()
