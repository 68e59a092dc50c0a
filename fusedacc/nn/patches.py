"""Decides which modules of a model accumulate in their backward, and why the others do not."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils import parametrize

from ..accumulators import Slot
from ..autograd.capture import Capture
from ..kernels import native_module
from ..kernels.closing import ClosesItself
from .convolution import CONVOLUTIONS
from .convolution import kind_of as kind_of_convolution
from .cross_entropy import PatchedHeadLoss, loss_weight
from .embedding import PatchedEmbedding
from .head import HeadSum
from .kept_cast import KeptCasts
from .linear import PatchedConv1D, PatchedLinear
from .patched_forward import PatchedForward, is_stock, reads_parameter
from .stacked import PatchedExperts, StackedSum, may_read_experts

REPLICAS = "DataParallel runs replicas of the modules, which have other weights"
NOT_BUILT = "without the native engine (see `python -m fusedacc info`) PyTorch computes its gradient"
WHOLE_GRADIENTS = 'rounding="stochastic" takes whole gradients'


class Place(NamedTuple):
    """A module that has a parameter."""

    module: nn.Module
    #: The parameter's name in the module, and in the model.
    name: str
    full_name: str


class Replacements(ClosesItself):
    """Replaces the forwards of the modules of `model` whose weights are among the wrapper's slots.

    casts: keeps the casts of weights over a window, also those of convolutions;
    None: casts are not kept. warns: whether to warn if no module is replaced and FSDP2 has sharded no
    parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        capture: Capture,
        casts: KeptCasts | None = None,
        warns: bool = True,
    ) -> None:
        self._model = model
        self._capture = capture
        self._casts = casts
        self._patched: dict[nn.Module, PatchedForward] = {}
        #: The sums of stacked weights (experts, ...).
        self._stacked: dict[Slot, StackedSum] = {}
        #: The sums of weights (classes, width) that `linear_cross_entropy` may be called with.
        self._heads: dict[Slot, HeadSum] = {}
        self._search()
        self.follow(capture.accumulators.slots)
        explained = any(
            slot.sharded or slot.left_to == WHOLE_GRADIENTS for slot in capture.accumulators.slots
        )
        if warns and not (self._patched or self._stacked or explained):
            warnings.warn(
                "model= was given, but this optimizer has the weight of none of its Linear and Embedding "
                "modules that could be replaced: nothing will accumulate inside a backward but weights of "
                "linear_cross_entropy(); see explain()",
                stacklevel=3,
            )

    def follow(self, slots: Sequence[Slot]) -> None:
        """Replace all supported modules of these slots' parameters, and name the parameters."""
        if not all(self._places_of(slot) for slot in slots):
            self._search()
        casts = self._casts is not None
        for slot in slots:
            if slot.sharded:  # the modules use the unsharded parameter
                continue
            takes_products = not self._capture.accumulators.noise.rounds(slot.accumulate_dtype)
            built = native_module.module() is not None
            if slot.param.dim() == 3 and built and takes_products and not self._is_convolved(slot):
                self._stacked[slot] = StackedSum(slot, self._capture)
            if slot.param.dim() == 2 and not self._replicas:
                if takes_products:
                    self._heads[slot] = HeadSum(slot, self._capture)
                self._replace_losses(slot)
            for module, name, _full_name in self._places_of(slot):
                known = self._patched.get(module)
                if isinstance(known, PatchedExperts):
                    self._stack(known, name, slot)
                if known is not None:
                    continue
                kind, why = (None, REPLICAS) if self._replicas else _kind_of(module, name, casts)
                if kind is not None and not (takes_products or (casts and kind.keeps_cast)):
                    kind = None
                    why = WHOLE_GRADIENTS
                if kind is None:
                    slot.left_to = slot.left_to or why or ""
                    continue
                patched = self._patched[module] = kind(module, slot, self._capture)
                if self._casts is not None and kind.keeps_cast:
                    patched.kept = self._casts
                    slot.keeps_cast = True
                    if slot in self._heads:
                        self._heads[slot].kept = self._casts
                patched.install()
                slot.left_to = ""
                if isinstance(patched, PatchedExperts):
                    self._stack(patched, name, slot)
                elif kind.path and takes_products:
                    patched.declare(kind.path)
                elif kind.path:
                    slot.left_to = WHOLE_GRADIENTS
        self.name(slots)

    def _replace_losses(self, slot: Slot) -> None:
        """Replace the `LinearCrossEntropyLoss` modules whose weight is the slot's."""
        for reference in self._losses.get(id(slot.param), ()):
            module = reference()
            if module is not None and module not in self._patched and loss_weight(module) is slot.param:
                patched = self._patched[module] = PatchedHeadLoss(module, slot, self._capture)
                patched.install()

    def _is_convolved(self, slot: Slot) -> bool:
        """Whether the parameter is a convolution's weight."""
        return any(isinstance(place.module, CONVOLUTIONS) for place in self._places_of(slot))

    def _stack(self, patched: PatchedExperts, name: str, slot: Slot) -> None:
        if slot in self._stacked and may_read_experts(patched.module, slot.param):
            patched.stand_for(name, self._stacked[slot])

    def name(self, slots: Sequence[Slot]) -> None:
        """Name the slots' parameters as the last search found them (see `name_slots`)."""
        for slot in slots:
            for place in self._places_of(slot)[:1]:
                slot.name = place.full_name

    def select_again(self) -> None:
        """Let all modules select their products again, because a backend has failed its self-test."""
        for patched in self._patched.values():
            patched.select_again()
        for target in self._stacked.values():
            target.select_again()

    def _search(self) -> None:
        """Record where each parameter is. A search for each added parameter group would take too long."""
        self._places: dict[int, list[tuple[weakref.ref[nn.Module], str, str]]] = {}
        #: The `LinearCrossEntropyLoss` modules, by the weight's id.
        self._losses: dict[int, list[weakref.ref[nn.Module]]] = {}
        self._replicas = any(isinstance(module, nn.DataParallel) for module in self._model.modules())
        for prefix, module in self._model.named_modules():
            weight = loss_weight(module)
            if weight is not None:
                self._losses.setdefault(id(weight), []).append(weakref.ref(module))
            for name, param in module._parameters.items():
                place = weakref.ref(module), name, f"{prefix}.{name}" if prefix else name
                self._places.setdefault(id(param), []).append(place)

    def _places_of(self, slot: Slot) -> list[Place]:
        """Return the modules that have the slot's parameter now."""
        places = []
        for reference, name, full_name in self._places.get(id(slot.param), ()):
            module = reference()
            if module is not None and module._parameters.get(name) is slot.param:
                places.append(Place(module, name, full_name))
        return places

    def close(self) -> None:
        """Restore the forwards of all modules."""
        self.drop([*self._stacked, *self._heads, *(patched.slot for patched in self._patched.values())])

    def drop(self, slots: Iterable[Slot]) -> None:
        """Restore the forwards of the modules of these slots' parameters."""
        dropped = set(slots)
        for module in [module for module, patched in self._patched.items() if patched.leave(dropped)]:
            self._patched.pop(module).remove()
        for slot in dropped:
            for known in (self._heads.pop(slot, None), self._stacked.pop(slot, None)):
                if known is not None:
                    known.remove()
            slot.paths = ()
            slot.keeps_cast = False
        if self._casts is not None:
            self._casts.forget(dropped)


def name_slots(model: nn.Module, slots: Sequence[Slot]) -> None:
    """Give the slots the names that their parameters have in the model."""
    names = {id(param): name for name, param in model.named_parameters()}
    for slot in slots:
        slot.name = names.get(id(slot.param), slot.name)


def _kind_of(module: nn.Module, name: str, casts: bool) -> tuple[type[PatchedForward] | None, str | None]:
    """Return the class that patches a module with this parameter, or None; and the reason for `explain()`, or
    None. Convolutions are patched only if casts are kept.
    """
    kind = _by_forward(module)
    parameter = module._parameters.get(name)
    if kind is None and casts:
        kind = kind_of_convolution(module, module._parameters.get("weight"))
    if kind is None and parameter is not None and may_read_experts(module, parameter):
        kind = PatchedExperts
    if name == "bias":
        kind = None
    reason = _why_not(module, name, kind)
    return (kind if reason is None else None), reason


def _why_not(module: nn.Module, name: str, kind: type[PatchedForward] | None) -> str | None:
    """Return why a module with a parameter of this name is not patched, or None."""
    if isinstance(module, parametrize.ParametrizationList):
        return "parametrized: its gradient goes on through the parametrization"
    if kind is None:
        return None
    if native_module.module() is None:
        return NOT_BUILT
    if kind is not PatchedExperts and name != "weight":
        return "pruned, or with weight or spectral norm: its gradient goes on through the module's weight"
    if not reads_parameter(module, name, module._parameters[name]):
        return f"the module's {name} is not its parameter of this name: a property or another value hides it"
    if not is_stock(module):
        return "the module's forward has been replaced"
    if hasattr(type(module), "__copy__"):
        return "its class defines __copy__, which would copy the replaced forward too"
    if kind is PatchedEmbedding and bool(module.sparse):
        return "sparse=True: its gradients are sparse already"
    return None


#: The class that patches a module, by the module's forward, which a subclass may inherit. Read at import,
#: before a user can replace the forward of one of torch's classes.
_KINDS: dict[Any, type[PatchedForward]] = {
    nn.Linear.forward: PatchedLinear,
    nn.Embedding.forward: PatchedEmbedding,
}


def _by_forward(module: nn.Module) -> type[PatchedForward] | None:
    forward = type(module).forward
    for kind in type(module).__mro__:
        if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
            own = kind.__dict__.get("forward") is forward and forward.__qualname__.endswith("Conv1D.forward")
            return PatchedConv1D if own else None
    return _KINDS.get(forward)
