"""Which modules of a model can accumulate in their backward, and why the others are left alone."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from ..accumulators import Slot
from ..autograd.capture import Capture
from .convolution import kind_of as kind_of_convolution
from .embedding import PatchedEmbedding
from .experts import PatchedExperts, may_read_experts
from .head import HeadSum
from .head_loss import PatchedHeadLoss, weight_of
from .kept_cast import KeptCasts
from .linear import PatchedConv1D, PatchedLinear
from .patched_forward import PatchedForward, is_stock
from .stacked import StackedSum

WhyLeft = Callable[[Tensor, MutableMapping[str, str]], str | None]
REPLICAS = "DataParallel calls replicas of the modules, whose weights are others"


class Replacements:
    """The forwards that replace those of the modules of `model` whose weights are among the slots.

    Args:
        model: searched through; a module that is in it many times is replaced once.
        capture: of the wrapper that has the slots.
        why_left: given a Linear's weight and decisions to stay with, the reason not to replace it, or None.
        casts: keeps the casts of weights over a window, those of convolutions too; None: they are not kept.
        warns: where no module is replaced, and FSDP2 has sharded none of the parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        capture: Capture,
        why_left: WhyLeft,
        casts: KeptCasts | None = None,
        warns: bool = True,
    ) -> None:
        self._model, self._capture, self._why_left = model, capture, why_left
        self._casts = casts
        self._patched: dict[nn.Module, PatchedForward] = {}
        #: Of stacked weights (experts, ...).
        self._stacked: dict[Slot, StackedSum] = {}
        #: Of weights (classes, width) that `linear_cross_entropy` may be called with.
        self._heads: dict[Slot, HeadSum] = {}
        self._search()
        self.follow(capture.accumulators.slots)
        sharded = any(slot.sharded for slot in capture.accumulators.slots)
        if warns and not (self._patched or self._stacked or sharded):
            warnings.warn(
                "model= was given, but this optimizer has the weight of none of its Linear and Embedding "
                "modules that could be replaced: nothing will accumulate inside a backward but weights of "
                "linear_cross_entropy(); see explain()",
                stacklevel=3,
            )

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.remove()

    def follow(self, slots: Sequence[Slot]) -> None:
        """Replace what can be replaced among the modules of these slots' parameters, and name those."""
        if not all(self._places_of(slot) for slot in slots):
            self._search()
        casts = self._casts is not None
        for slot in slots:
            if slot.sharded:  # modules work with the unsharded parameter
                continue
            if slot.param.dim() == 3 and not self._is_convolved(slot):
                self._stacked[slot] = StackedSum(slot, self._capture)
            if slot.param.dim() == 2 and not self._replicas:
                self._heads[slot] = HeadSum(slot, self._capture)
                self._replace_losses(slot)
            for module, name, _ in self._places_of(slot):
                known = self._patched.get(module)
                if isinstance(known, PatchedExperts):
                    self._stack(known, name, slot)
                if known is not None:
                    continue
                kind, why = (None, REPLICAS) if self._replicas else _kind_of(module, name, casts)
                if kind is not None and issubclass(kind, PatchedLinear):
                    why = self._why_left(slot.param, self._capture.accumulators.choices)
                if kind is None or why:
                    slot.left_to = slot.left_to or why or ""
                    continue
                patched = self._patched[module] = kind(module, slot, self._capture)
                if self._casts is not None and kind.keeps_cast:
                    patched.kept, slot.keeps_cast = self._casts, True
                    if slot in self._heads:
                        self._heads[slot].kept = self._casts
                patched.install()
                if isinstance(patched, PatchedExperts):
                    self._stack(patched, name, slot)
                elif kind.path:
                    patched.declare(kind.path)
        self.name(slots)

    def _replace_losses(self, slot: Slot) -> None:
        """Replace the `LinearCrossEntropyLoss` modules whose weight is the slot's."""
        for reference in self._losses.get(id(slot.param), ()):
            module = reference()
            if module is not None and module not in self._patched and weight_of(module) is slot.param:
                patched = self._patched[module] = PatchedHeadLoss(module, slot, self._capture)
                patched.install()

    def _is_convolved(self, slot: Slot) -> bool:
        """Whether it is a convolution's weight."""
        return any(isinstance(module, _ConvNd) for module, _, _ in self._places_of(slot))

    def _stack(self, patched: PatchedExperts, name: str, slot: Slot) -> None:
        if slot in self._stacked and may_read_experts(patched.module, slot.param):
            patched.stand_for(name, self._stacked[slot])

    def name(self, slots: Sequence[Slot]) -> None:
        """As `name_slots`, for what the last search has found."""
        for slot in slots:
            for _, _, name in self._places_of(slot)[:1]:
                slot.name = name

    def forget_choices(self) -> None:
        """What was found out by trial is to be asked anew, also whether a module is to be replaced."""
        for patched in self._patched.values():
            patched.forget_choices()
        for target in self._stacked.values():
            target.forget_choices()
        choices = self._capture.accumulators.choices
        linears = {patched.slot for patched in self._patched.values() if isinstance(patched, PatchedLinear)}
        self.drop([slot for slot in linears if self._why_left(slot.param, choices)])
        self.follow(self._capture.accumulators.slots)

    def _search(self) -> None:
        """Note where each parameter is: a search for each group that is added would be too much."""
        self._places: dict[int, list[tuple[weakref.ref[nn.Module], str, str]]] = {}
        #: By the weight's identity.
        self._losses: dict[int, list[weakref.ref[nn.Module]]] = {}
        self._replicas = any(isinstance(module, nn.DataParallel) for module in self._model.modules())
        for prefix, module in self._model.named_modules():
            weight = weight_of(module)
            if weight is not None:
                self._losses.setdefault(id(weight), []).append(weakref.ref(module))
            for name, param in module._parameters.items():
                place = weakref.ref(module), name, f"{prefix}.{name}" if prefix else name
                self._places.setdefault(id(param), []).append(place)

    def _places_of(self, slot: Slot) -> list[tuple[nn.Module, str, str]]:
        """The modules that have the slot's parameter, what they call it, and what the model does."""
        places = [(module(), own, name) for module, own, name in self._places.get(id(slot.param), ())]
        return [
            (module, own, name)
            for module, own, name in places
            if module is not None and module._parameters.get(own) is slot.param
        ]

    def remove(self) -> None:
        """Stock's forward everywhere."""
        self.drop([*self._stacked, *self._heads, *(patched.slot for patched in self._patched.values())])

    def drop(self, slots: Iterable[Slot]) -> None:
        """Stock's forward for the modules of these slots' parameters."""
        dropped = set(slots)
        for module in [module for module, patched in self._patched.items() if patched.leave(dropped)]:
            self._patched.pop(module).remove()
        for slot in dropped:
            for known in (self._heads.pop(slot, None), self._stacked.pop(slot, None)):
                if known is not None:
                    known.remove()
            slot.paths, slot.keeps_cast = (), False
        if self._casts is not None:
            self._casts.forget(dropped)


def name_slots(model: nn.Module, slots: Sequence[Slot]) -> None:
    """Call the parameters of the model as it calls them."""
    names = {id(param): name for name, param in model.named_parameters()}
    for slot in slots:
        slot.name = names.get(id(slot.param), slot.name)


def _kind_of(module: nn.Module, name: str, casts: bool) -> tuple[type[PatchedForward] | None, str | None]:
    """What patches a module whose own parameter `name` is optimized, and the reason why nothing does.

    Args:
        module, name: the module, and what it calls the parameter.
        casts: convolutions too, which gain by a kept cast alone.

    Returns:
        The class, or None; and the reason for `explain()`, None where there is nothing to say.
    """
    kind, parameter = _by_forward(module), module._parameters.get(name)
    if kind is None and casts:
        kind = kind_of_convolution(module, module._parameters.get("weight"))
    if kind is None and parameter is not None and may_read_experts(module, parameter):
        kind = PatchedExperts
    if name == "bias":
        kind = None
    reason = next((reason for holds, reason in _REASONS if holds(module, name, kind)), None)
    return (kind if reason is None else None), reason


#: Why a module is not patched: the first reason that holds for the module, its name of the parameter, and the
#: class that would patch it.
_REASONS: tuple[tuple[Callable[[nn.Module, str, type[PatchedForward] | None], bool], str], ...] = (
    (
        lambda module, name, kind: isinstance(module, parametrize.ParametrizationList),
        "parametrized: its gradient goes on through the parametrization",
    ),
    (
        lambda module, name, kind: kind not in (None, PatchedExperts) and name != "weight",
        "weight or spectral norm: its gradient goes on through the norm",
    ),
    (
        lambda module, name, kind: kind is not None and not is_stock(module),
        "somebody has replaced the module's forward",
    ),
    (
        lambda module, name, kind: kind is not None and hasattr(type(module), "__copy__"),
        "its class has a __copy__ of its own, which would copy the forward too",
    ),
    (
        lambda module, name, kind: kind is PatchedEmbedding and bool(module.sparse),
        "sparse=True: its gradients are sparse already",
    ),
)

#: What patches a module, by the forward that it runs, which a subclass may have inherited. Read at import,
#: before a user can have replaced the forward of one of torch's classes.
_KINDS: dict[Any, type[PatchedForward]] = {
    nn.Linear.forward: PatchedLinear,
    nn.Embedding.forward: PatchedEmbedding,
}


def _by_forward(module: nn.Module) -> type[PatchedForward] | None:
    kind = type(module)
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        return PatchedConv1D
    return _KINDS.get(kind.forward)
