"""Which parameters are accumulated: a slot for each, kept in step with the inner optimizer's groups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..accumulators import Lane, Slot, default_accumulate_dtype
from ..accumulators.param import check_backend
from ..accumulators.passes import Passes
from ..autograd.capture import Capture
from ..kernels import grouped, matmul, selftest
from ..kernels.dtypes import PAIRS, allowed_pairs
from ..nn import KeptCasts, Replacements
from .master_weights import MasterWeights


class ParameterSet:
    """The slots of every parameter in the groups of `inner`, each parameter once, in the groups' order.

    `lenient`: let in a parameter that was cast since it was accepted. Raises as `AccumulatingOptimizer`.
    """

    def __init__(
        self,
        inner: Optimizer,
        accumulate_dtype: torch.dtype | None,
        backend: str,
        model: torch.nn.Module | None = None,
        lenient: bool = False,
    ) -> None:
        if accumulate_dtype is not None and not isinstance(accumulate_dtype, torch.dtype):
            raise TypeError(f"accumulate_dtype must be a torch.dtype or None, got {accumulate_dtype!r}")
        self._inner, self._dtype, self._backend = inner, accumulate_dtype, backend
        self._model = model
        self._replacements: Replacements | None = None
        #: What modules keep over a window, if they are to, and a context in which weights change.
        self.casts: KeptCasts | None = None
        self.without_casts: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self._slot_of: dict[int, Slot] = {}
        self._accepted: set[Lane] = set()
        #: Of self-tests, when backends were last chosen.
        self._num_failures = selftest.num_failures
        #: Shared with whoever works on the parameters, and changed in place.
        self.slots: list[Slot] = []
        self.slots += self._new_slots(range(len(inner.param_groups)), lenient)
        self._note(self.slots)
        #: Each group's parameters, when the slots were last in step with them.
        self._seen = self._present()

    def replace_in(
        self,
        model: torch.nn.Module,
        capture: Capture,
        why_left: Callable[[Tensor, MutableMapping[str, str]], str | None],
        keep_casts: bool,
        warns: bool = True,
    ) -> None:
        """Have those modules of `model` that can add gradients of these parameters to the sums.

        why_left: why a Linear of this weight is better left to PyTorch; empty where it is replaced.
        keep_casts: and keep the casts of their weights, and of convolutions', in `casts`.
        warns: if no module can.
        """
        if keep_casts:
            self.casts = KeptCasts()
            self.without_casts = self.casts.dropped
        self._replacements = Replacements(model, capture, why_left, self.casts, warns)
        self._check_products()

    def forget_casts(self) -> None:
        """Let go of the casts that modules keep: weights may change where nothing tells."""
        if self.casts is not None:
            self.casts.drop()

    def choose_again(self, passes: Passes) -> None:
        """Run self-tests that a capture has deferred; if a backend has failed, keep no choice of it."""
        if selftest.deferred:
            selftest.retry()
        if selftest.num_failures != self._num_failures:
            self._num_failures = selftest.num_failures
            passes.clear()
            self.forget_choices()

    def forget_choices(self) -> None:
        """Have the modules ask anew what was found out by trial."""
        if self._replacements is not None:
            self._replacements.forget_choices()

    def restore_modules(self) -> None:
        """Give every module its own forward back."""
        if self._replacements is not None:
            self._replacements.remove()
        self.forget_casts()

    def _present(self) -> list[list[Tensor]]:
        return [list(group["params"]) for group in self._inner.param_groups]

    def _note(self, slots: Sequence[Slot]) -> None:
        self._slot_of.update((id(slot.param), slot) for slot in slots)

    def _named(self, indices: Sequence[int]) -> Iterator[tuple[int, str, Tensor]]:
        """The parameters of these groups, each with its group's index and its name."""
        for index in indices:
            group = self._inner.param_groups[index]
            names, params = group.get("param_names") or (), group["params"]
            if len(names) != len(params):  # none, or of a group that was changed by hand
                names = [f"{index}.{position}" for position in range(len(params))]
            for name, param in zip(names, params, strict=True):
                yield index, name, param

    def _new_slots(self, indices: Sequence[int], lenient: bool = False) -> list[Slot]:
        """Slots for those parameters of these groups that have none."""
        found: dict[int, Slot] = {}
        for index, name, param in self._named(indices):
            if id(param) not in self._slot_of and id(param) not in found:
                number = len(self.slots) + len(found)
                found[id(param)] = self._new_slot(index, name, param, lenient, number)
        return list(found.values())

    def _new_slot(self, index: int, name: str, param: Any, lenient: bool, number: int) -> Slot:
        if not isinstance(param, Tensor):
            raise TypeError(
                f"param_groups[{index}] holds {type(param).__name__} {name!r}, which is no Tensor"
            )
        if is_lazy(param):
            raise ValueError(
                f"{self._place_of(param, name)} has no shape yet, because its module is lazy; run one "
                "forward pass of the model before an AccumulatingOptimizer gets the parameter"
            )
        dtype = self._dtype
        fits = dtype is None or (param.dtype, dtype) in PAIRS or not param.is_floating_point()
        if not fits and not lenient:
            raise ValueError(
                f"accumulate_dtype={dtype} does not go with parameter {name!r} of {param.dtype}; allowed "
                f"(gradient into sum): {allowed_pairs()}"
            )
        lane = param.device, param.dtype, dtype or default_accumulate_dtype(param)
        if lane not in self._accepted and lane[1:] in PAIRS and param.device.type != "meta":
            check_backend(lane, self._backend)
            self._accepted.add(lane)
        return Slot(param, index, name, dtype, number)

    def _check_products(self) -> None:
        """On a GPU, run the self-test of products that modules add to the sums."""
        for path, lane in {(path, slot.lane) for slot in self.slots for path in slot.paths}:
            device, operand, accumulator = lane
            if device.type != "cpu" and path == "gemm":
                matmul.select(device, accumulator, operand, self._backend, tokens=1)
            elif device.type != "cpu" and path == "grouped":
                grouped.select(device, accumulator, operand, self._backend)

    def _place_of(self, param: Tensor, name: str) -> str:
        """A parameter, and the module that has it, in words; `name` is the optimizer's."""
        for prefix, module in () if self._model is None else self._model.named_modules():
            for own, each in module._parameters.items():
                if each is param:
                    kind = type(module).__name__
                    if not prefix:
                        return f"parameter {own!r} of the {kind}"
                    return f"parameter {f'{prefix}.{own}'!r} of the {kind} {prefix!r}"
        return f"parameter {name!r}"

    def add_last_group(self, capture: Capture) -> None:
        """Take in the group that was added last, or take it out of the inner optimizer and raise."""
        groups = self._inner.param_groups
        last = len(groups) - 1
        try:
            slots = self._new_slots([last])
            capture.registry.claim(slots)
        except Exception:
            groups.pop()
            raise
        if len(self._seen) == last:  # else `sync_param_groups` finds out what has become of the others
            self._seen.append(list(groups[last]["params"]))
        self.slots.extend(slots)
        self._take_in(slots, capture)

    def _take_in(self, slots: Sequence[Slot], capture: Capture) -> None:
        self._note(slots)
        if slots and self._replacements is not None:
            self._replacements.follow(slots)
        capture.registry.refresh(slots)

    @property
    def in_step(self) -> bool:
        """Whether each group has the parameters that it had, by identity."""
        groups, seen = self._inner.param_groups, self._seen
        if len(groups) != len(seen):
            return False
        for group, known in zip(groups, seen, strict=True):
            params = group["params"]
            if len(params) != len(known) or not all(map(is_, params, known)):
                return False
        return True

    def sync_param_groups(self, capture: Capture, masters: MasterWeights | None) -> list[Slot]:
        """Be in step with groups that were changed by hand: parameters put in, taken out, or replaced.

        What is new is hooked; what is gone is given back as `close` would, and what was summed of its
        gradients in the window at hand is dropped. While a backward runs, nothing is done yet. Returns the
        slots that are new, for whose gradients autograd may have been left to store. If it raises, nothing is
        changed.
        """
        if self.in_step or capture.tasks:
            return []
        groups = range(len(self._inner.param_groups))
        places: dict[int, tuple[int, str]] = {}
        for index, name, param in self._named(groups):
            places.setdefault(id(param), (index, name))
        fresh = self._new_slots(groups, lenient=True)
        capture.registry.claim(fresh)
        gone = [slot for slot in self.slots if id(slot.param) not in places]
        for slot in gone:
            del self._slot_of[id(slot.param)]
        capture.registry.release(gone)
        capture.accumulators.drop(gone)
        if masters is not None:
            masters.drop(gone)
        if self._replacements is not None:
            self._replacements.drop(gone)
        self._note(fresh)
        self.slots[:] = [self._slot_of[key] for key in places]
        for slot in self.slots:
            slot.group, slot.name = places[id(slot.param)]
        capture.accumulators.noise.number(self.slots)
        if self._replacements is not None:
            self._replacements.name(self.slots)
        self._seen = self._present()
        self._take_in(fresh, capture)
        return fresh
