"""Finds the sums of parameters for functions that are no modules: `sink` and `functional.linear`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ..accumulators import Slot
from ..autograd.capture import Capture
from ..autograd.registration import accumulate_grad_node
from ..kernels import native_module, registry
from ..kernels.closing import ClosesItself
from ..kernels.dtypes import PAIRS
from ..kernels.torch_private import assume_constant_result, runs_as_written
from . import compiled
from .embedding import RowSum
from .linear import ProductSum
from .patched_forward import WeightSum
from .patches import WHOLE_GRADIENTS
from .stacked import GroupedSum


class OfferedSum(WeightSum):
    """A sum of which only calls of `sink` and `linear` tell that functions add to it."""

    @property
    def is_offered(self) -> bool:
        """Whether functions may add to the sum."""
        capture = self._capture()
        if capture is None or self.slot.sharded or self.slot.needs_eager:
            return False
        return not capture.accumulators.noise.rounds(self.slot.accumulate_dtype)

    def announce(self) -> bool:
        """Record for the engine and for `explain()` that functions add to the sum.

        Return whether they may.
        """
        if self.is_offered:
            self.declare(self.path)
            return True
        capture = self._capture()
        if capture is not None and capture.accumulators.noise.rounds(self.slot.accumulate_dtype):
            self.slot.left_to = self.slot.left_to or WHOLE_GRADIENTS
        return False

    def accumulate_in_place(self, *arguments: Any, **options: Any) -> bool:
        """Do the same as `WeightSum.accumulate_in_place`, if functions may add to the sum."""
        # A compiled graph does not ask before.
        return self.announce() and super().accumulate_in_place(*arguments, **options)


class LinearSum(OfferedSum, ProductSum):
    """The sum of a weight that `linear` is called with."""

    path = "gemm"


class SinkSum(OfferedSum, ProductSum, GroupedSum, RowSum):
    """The sum of a parameter that `sink` is called with."""

    path = "sink"
    operands_stay = False
    #: The backward pass in which the sum is open in `Sink.write`; None if it is not.
    open_in: int | None = None

    def node_to_take(self) -> Any:
        """Return the parameter's AccumulateGrad node if a backward function that is running may add to the
        sum; None if PyTorch must get the gradient.
        """
        capture = self._capture()
        slot = self.slot
        node = compiled.end_of_graph(slot.param)
        if capture is None or node is None or not self.is_ordinary or not self.announce():
            return None
        if slot.param._backward_hooks or not capture.will_take_in_place(slot, node):
            return None
        return node

    def select_again(self) -> None:
        """Forget which products were selected."""
        ProductSum.select_again(self)
        GroupedSum.select_again(self)

    def add_gradient(self, node: Any, gradient: Tensor) -> bool:
        """Try to add a gradient to the sum, and return whether it needs no further work.

        node: as in `Capture.take_in_place`.
        """
        device, _, dtype = self.slot.lane
        if (gradient.dtype, dtype) not in PAIRS:
            return False
        backend = registry.select(device, dtype, gradient.dtype, self.backend).backend

        def write(total: Tensor, scale: float | Tensor, beta: float | Tensor) -> None:
            is_first = beta == 0
            backend.accumulate_([total], [gradient], scale, is_first, 1.0 if is_first else beta, None)

        return self.accumulate_in_place(node, write, (gradient,), any_layout=True)


#: The attributes of a parameter that graphs of `sink` and of `linear` read, a `compiled.Traced` each.
SINK = "_accumulating_sink"
LINEAR = "_accumulating_linear"
_KINDS: dict[str, type[OfferedSum]] = {SINK: SinkSum, LINEAR: LinearSum}

#: The attributes that Dynamo has asked for. Parameters of new wrappers get them at once.
_traced: set[str] = set()
_all: weakref.WeakSet[Sinks] = weakref.WeakSet()
#: By a parameter's id.
_owners: weakref.WeakValueDictionary[int, Sinks] = weakref.WeakValueDictionary()


class Sinks(ClosesItself):
    """Lets `sink` and `linear` find the sums of a wrapper's parameters."""

    def __init__(self, capture: Capture) -> None:
        self._capture = weakref.ref(capture)
        self._slots: dict[int, Slot] = {}
        #: The sums that were asked for, by the parameter's id and the attribute.
        self._sums: dict[tuple[int, str], OfferedSum] = {}
        _all.add(self)

    def follow(self, slots: Iterable[Slot]) -> None:
        """Offer the sums of these slots, unless there is no native engine."""
        if native_module.module() is None:
            return
        for slot in slots:
            key = id(slot.param)
            self._slots[key] = slot
            _owners[key] = self
            for attribute in _traced:
                self.offer_to_compiler(key, attribute)

    def sum_of(self, key: int, attribute: str) -> OfferedSum | None:
        """Return the sum of the parameter with this id, for the functions that read this attribute."""
        found = self._sums.get((key, attribute))
        capture = self._capture()
        if found is None and capture is not None:
            # Another thread may make one at the same time.
            found = self._sums.setdefault((key, attribute), _KINDS[attribute](self._slots[key], capture))
        return found

    def offer_to_compiler(self, key: int, attribute: str) -> None:
        """Give the parameter with this id the attribute, unless PyTorch must get its gradient in any case."""
        slot = self._slots[key]
        found = self.sum_of(key, attribute)
        if found is not None and found.is_ordinary and found.is_offered:
            slot.param.__dict__[attribute] = compiled.Traced(found)

    def offer_all_to_compiler(self, attribute: str) -> None:
        for key in self._slots:
            self.offer_to_compiler(key, attribute)

    def select_again(self) -> None:
        """Forget which products were selected, because a backend has failed its self-test."""
        for found in self._sums.values():
            found.select_again()

    def drop(self, slots: Iterable[Slot]) -> None:
        """Offer the sums of these slots no more."""
        for slot in slots:
            key = id(slot.param)
            if self._slots.pop(key, None) is None:
                continue
            if _owners.get(key) is self:
                del _owners[key]
            for attribute in _KINDS:
                slot.param.__dict__.pop(attribute, None)
                self._sums.pop((key, attribute), None)

    def close(self) -> None:
        """Offer no sums any more."""
        self.drop(list(self._slots.values()))


@assume_constant_result  # Dynamo calls it, and does not trace it
@runs_as_written
def offer_to_compiler(attribute: str) -> None:
    """Give all parameters of wrappers the attribute, because a graph that is being traced reads it."""
    if attribute in _traced:
        return
    _traced.add(attribute)
    for sinks in list(_all):
        sinks.offer_all_to_compiler(attribute)


def sum_of_parameter(param: Tensor, attribute: str) -> Any:
    """Return the parameter's sum for the functions that read this attribute; None if it has none."""
    sinks = _owners.get(id(param))
    return None if sinks is None else sinks.sum_of(id(param), attribute)


def parameter_behind(tensor: Tensor) -> Tensor:
    """Return the parameter of which a saved tensor is a copy, as hooks on saved tensors return it.

    Activation checkpointing has such hooks. The copy shares the parameter's AccumulateGrad node.
    """
    if not (_owners and tensor.is_leaf and tensor.requires_grad):
        return tensor
    return accumulate_grad_node(tensor).variable
