"""The set of accumulated parameters: one slot for each, synchronised with the inner optimizer's groups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..accumulators import Lane, Slot, default_accumulate_dtype
from ..accumulators.param import check_backend
from ..autograd.capture import Capture
from ..kernels import grouped, lists, matmul, selftest
from ..kernels.dtypes import PAIRS, allowed_pairs
from ..nn import KeptCasts, Replacements, Sinks
from .master_weights import MasterWeights


class ParameterSet:
    """One slot for each parameter in the groups of the inner optimizer, in their order.

    Args:
        inner: the inner optimizer.
        accumulate_dtype: the wrapper's argument.
        backend: the wrapper's argument.
        model: the wrapper's argument.
        lenient: whether to accept a parameter that was cast after it was first accepted.

    Raises:
        TypeError, ValueError, RuntimeError: as `AccumulatingOptimizer`.
    """

    def __init__(
        self,
        inner: Optimizer,
        accumulate_dtype: torch.dtype | None,
        backend: str,
        model: torch.nn.Module | None = None,
        *,
        lenient: bool = False,
    ) -> None:
        if accumulate_dtype is not None and not isinstance(accumulate_dtype, torch.dtype):
            raise TypeError(f"accumulate_dtype must be a torch.dtype or None, got {accumulate_dtype!r}")
        self._inner = inner
        self._accumulate_dtype = accumulate_dtype
        self._backend = backend
        self._model = model
        self._replacements: Replacements | None = None
        #: Lets `fusedacc.sink` find the parameters. `offer_sinks` creates it.
        self._sinks: Sinks | None = None
        #: The casts that modules keep for a window (with `keep_casts`), and a context that drops them.
        self.casts: KeptCasts | None = None
        self.without_casts: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self._slot_of: dict[int, Slot] = {}
        self._accepted: set[Lane] = set()
        #: The number of failed self-tests when backends were last chosen.
        self._num_failures = selftest.num_failures
        #: Shared with all components that use the parameters, and changed in place.
        self.slots: list[Slot] = []
        self.slots += self._new_slots(range(len(inner.param_groups)), lenient=lenient)
        self._register(self.slots)
        #: Each group's parameters when the slots were last synchronised. The engine reads it.
        self.seen = self._list_parameters()

    def replace_in(
        self,
        model: torch.nn.Module,
        capture: Capture,
        keep_casts: bool,
        warns: bool = True,
    ) -> None:
        """Replace the forwards of modules that add these gradients; arguments as `Replacements`."""
        if keep_casts:
            self.casts = KeptCasts()
            self.without_casts = self.casts.dropped
        self._replacements = Replacements(model, capture, self.casts, warns)
        self._check_products()

    def offer_sinks(self, capture: Capture) -> None:
        """Let `fusedacc.sink` and `fusedacc.nn.functional.linear` find the parameters."""
        self._sinks = Sinks(capture)
        self._sinks.follow(self.slots)

    def forget_casts(self) -> None:
        """Drop the casts that modules keep, because weights may change without notice."""
        if self.casts is not None:
            self.casts.drop()

    @property
    def must_choose_again(self) -> bool:
        """Whether a backend has failed a self-test since backends were chosen, or a self-test is deferred."""
        return bool(selftest.deferred) or selftest.num_failures != self._num_failures

    def choose_again(self, capture: Capture) -> None:
        """Run self-tests that a CUDA graph capture has deferred. If a backend failed, choose again."""
        if selftest.deferred:
            selftest.retry()
        if selftest.num_failures != self._num_failures:
            self._num_failures = selftest.num_failures
            capture.registry.choose_again()
            if self._replacements is not None:
                self._replacements.select_again()
            if self._sinks is not None:
                self._sinks.select_again()

    def restore_modules(self) -> None:
        """Restore every module's own forward, and offer no sinks any more."""
        if self._replacements is not None:
            self._replacements.close()
        if self._sinks is not None:
            self._sinks.close()
        self.forget_casts()

    def _list_parameters(self) -> list[list[Tensor]]:
        """Return each group's parameters."""
        return [list(group["params"]) for group in self._inner.param_groups]

    def _register(self, slots: Sequence[Slot]) -> None:
        self._slot_of.update((id(slot.param), slot) for slot in slots)

    def _named_parameters(self, indices: Sequence[int]) -> Iterator[tuple[int, str, Tensor]]:
        """Yield the parameters of these groups, each with its group's index and its name."""
        for index in indices:
            group = self._inner.param_groups[index]
            names = group.get("param_names") or ()
            params = group["params"]
            if len(names) != len(params):  # no names, or the user has changed the group
                names = [f"{index}.{position}" for position in range(len(params))]
            for name, param in zip(names, params, strict=True):
                yield index, name, param

    def _new_slots(self, indices: Sequence[int], *, lenient: bool = False) -> list[Slot]:
        """Create slots for the parameters of these groups that have none."""
        new_slots: dict[int, Slot] = {}
        for index, name, param in self._named_parameters(indices):
            if id(param) not in self._slot_of and id(param) not in new_slots:
                number = len(self.slots) + len(new_slots)
                new_slots[id(param)] = self._new_slot(index, name, param, number, lenient=lenient)
        return list(new_slots.values())

    def _new_slot(self, index: int, name: str, param: Any, number: int, *, lenient: bool) -> Slot:
        if not isinstance(param, Tensor):
            kind = type(param).__name__
            raise TypeError(f"param_groups[{index}] holds {name!r} of type {kind}; allowed: a Tensor")
        if is_lazy(param):
            raise ValueError(
                f"{self._describe(param, name)} has no shape yet, because its module is lazy; run one "
                "forward pass of the model before an AccumulatingOptimizer gets the parameter"
            )
        dtype = self._accumulate_dtype
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
        """On a GPU, run the self-tests of what modules add in place."""
        for path, lane in {(path, slot.lane) for slot in self.slots for path in slot.paths}:
            device, operand, accumulator = lane
            if device.type != "cpu" and path == "gemm":
                matmul.select(device, accumulator, operand, self._backend, tokens=1)
            elif device.type != "cpu" and path == "grouped":
                grouped.select(device, accumulator, operand, self._backend)
            elif device.type != "cpu" and path == "embedding":
                lists.select_for_rows(device, accumulator, operand, self._backend)

    def _describe(self, param: Tensor, name: str) -> str:
        """Describe a parameter and its module in words; `name` is the optimizer's name for it."""
        if self._model is not None:
            for module_name, module in self._model.named_modules():
                for attribute, candidate in module._parameters.items():
                    if candidate is not param:
                        continue
                    kind = type(module).__name__
                    if not module_name:
                        return f"parameter {attribute!r} of the {kind}"
                    return f"parameter {f'{module_name}.{attribute}'!r} of the {kind} {module_name!r}"
        return f"parameter {name!r}"

    def add_last_group(self, capture: Capture) -> None:
        """Add slots for the last group, or remove the group from the inner optimizer and raise."""
        groups = self._inner.param_groups
        last = len(groups) - 1
        try:
            slots = self._new_slots([last])
            capture.registry.claim(slots)
        except Exception:
            groups.pop()
            raise
        if len(self.seen) == last:  # else `sync_param_groups` compares all groups
            self.seen.append(list(groups[last]["params"]))
        self.slots.extend(slots)
        self._register(slots)
        capture.engine.set_slots(self.slots)
        self._hook(slots, capture)

    def _hook(self, slots: Sequence[Slot], capture: Capture) -> None:
        """Let modules and hooks accumulate the gradients of new slots."""
        if slots and self._replacements is not None:
            self._replacements.follow(slots)
        if self._sinks is not None:
            self._sinks.follow(slots)
        capture.registry.refresh(slots)

    @property
    def in_step(self) -> bool:
        """Whether each group still has the same parameters, by identity."""
        groups = self._inner.param_groups
        seen = self.seen
        if len(groups) != len(seen):
            return False
        for group, known in zip(groups, seen, strict=True):
            params = group["params"]
            if len(params) != len(known) or not all(map(is_, params, known)):
                return False
        return True

    def sync_param_groups(self, capture: Capture, masters: MasterWeights | None) -> list[Slot]:
        """Pick up parameters that the user has added to groups, removed or replaced; return the new slots.

        New parameters get hooks; autograd may already have stored gradients for them. Removed ones are
        restored as by `close()`, and their sums of this window are dropped. Nothing is done while a backward
        pass runs. If it raises, nothing is changed.
        """
        if self.in_step or capture.engine.backwards():
            return []
        groups = range(len(self._inner.param_groups))
        places: dict[int, tuple[int, str]] = {}
        for index, name, param in self._named_parameters(groups):
            places.setdefault(id(param), (index, name))
        added = self._new_slots(groups, lenient=True)
        capture.registry.claim(added)
        removed = [slot for slot in self.slots if id(slot.param) not in places]
        for slot in removed:
            del self._slot_of[id(slot.param)]
        capture.registry.release(removed)
        capture.accumulators.drop(removed)
        if masters is not None:
            masters.drop(removed)
        self._register(added)
        self.slots[:] = [self._slot_of[key] for key in places]
        for slot in self.slots:
            slot.group, slot.name = places[id(slot.param)]
        capture.accumulators.noise.number(self.slots)
        if self._replacements is not None:
            self._replacements.drop(removed)
            self._replacements.name(self.slots)
        if self._sinks is not None:
            self._sinks.drop(removed)
        self.seen = self._list_parameters()
        capture.engine.set_slots(self.slots)
        self._hook(added, capture)
        return added
