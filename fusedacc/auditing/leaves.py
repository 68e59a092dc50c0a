"""The parameters that an audit watches: their numbers, their hooks, and what other code does to `p.grad`.

Ids of parameters are used again after a parameter is freed, so a number stands for each. All references are
weak.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: A tensor hook that is called with the leaf's number and the gradient, and returns nothing.
Receiver = Callable[[int, Tensor], None]


class GradState(NamedTuple):
    """What changes when a gradient is replaced or written."""

    address: int
    version: int


class _Hook:
    """A hook on a leaf that only looks at its gradients."""

    #: Otherwise torch.save and deepcopy warn.
    __torch_unserializable__ = True
    #: fusedacc's modules then add as without the hook, and show it the gradient in parts.
    only_looks = True

    def __init__(self, look: Callable[[Tensor], None]) -> None:
        self._look = look

    def __call__(self, gradient: Tensor | None) -> None:
        if gradient is not None:  # a module has added the gradient by itself
            self._look(gradient)


class _Watched(NamedTuple):
    """A leaf, its number, our last hook, and our first hook if the script has hooks too."""

    leaf: weakref.ref[Tensor]
    number: int
    handle: Any = None
    first_handle: Any = None


def local_part(tensor: Any) -> Tensor:
    """Return the local tensor of a DTensor, and any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def is_distributed(tensor: Any) -> bool:
    """Return whether it is a DTensor, as FSDP2's sharded parameters are."""
    return hasattr(tensor, "_local_tensor")


def grad_state(gradient: Tensor) -> GradState:
    """Return a gradient's state."""
    gradient = local_part(gradient)
    address = gradient.data_ptr() if gradient.layout is torch.strided else id(gradient)
    return GradState(address, gradient._version)


class Leaves:
    """The leaves that are watched.

    Attributes:
        receive: is called with each gradient that autograd delivers. Set it before the first is watched.
    """

    receive: Receiver

    def __init__(self) -> None:
        self._count = 0
        self._by_number: dict[int, weakref.ref[Tensor]] = {}
        self._by_id: dict[int, _Watched] = {}
        #: By the leaf's number: the C++ tensor and the version of a gradient before the hooks of the script.
        self._first_seen: dict[int, tuple[int, int]] = {}
        #: By the leaf's id: the state of p.grad after the last backward pass, and the factor of the last
        #: clipping.
        self._grad_states: dict[int, GradState] = {}
        self._clip_factors: dict[int, float] = {}
        #: By the number of a parameter to which autograd delivers nothing, as FSDP2's shards and float32
        #: copies: the leaf that gets its gradients.
        self._stands_for: dict[int, weakref.ref[Tensor]] = {}

    def watch(self, leaf: Tensor) -> int:
        """Number and hook a leaf. Later hooks may change its gradient, so make this hook the last.

        Returns:
            The leaf's number.
        """
        identity = id(leaf)
        watched = self._by_id.get(identity)
        if watched is None or watched.leaf() is not leaf:
            watched = self._number(leaf)
        handle = watched.handle
        if handle is not None:
            hooks = leaf._backward_hooks
            if hooks and handle.id in hooks and next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)
            if hooks and len(hooks) > 1 and watched.first_handle is None:
                watched = watched._replace(first_handle=self._register_first(leaf, watched.number))
        elif leaf.requires_grad and leaf.is_leaf and not is_distributed(leaf):
            hook = _Hook(functools.partial(self.receive, watched.number))
            watched = watched._replace(handle=leaf.register_hook(hook))
        self._by_id[identity] = watched
        return watched.number

    def _register_first(self, leaf: Tensor, number: int) -> Any:
        """Register a hook that sees a gradient before the hooks of the script."""

        def remember(gradient: Tensor) -> None:
            self._first_seen[number] = gradient._cdata, gradient._version

        handle = leaf.register_hook(_Hook(remember))
        hooks: Any = leaf._backward_hooks
        # Autograd calls hooks in the order of insertion, which `move_to_end` of an OrderedDict leaves alone.
        for key in [key for key in hooks if key != handle.id]:
            hooks[key] = hooks.pop(key)
        return handle

    def is_changed_by_hooks(self, number: int, gradient: Tensor) -> bool:
        """Return whether hooks of the script have changed a gradient that a backward pass delivers."""
        first = self._first_seen.pop(number, None)
        return first is not None and first != (gradient._cdata, gradient._version)

    def _number(self, leaf: Tensor) -> _Watched:
        self._count += 1
        identity, number = id(leaf), self._count

        def forget(reference: weakref.ref[Tensor]) -> None:
            self._by_number.pop(number, None)
            self._grad_states.pop(identity, None)
            self._clip_factors.pop(identity, None)
            watched = self._by_id.get(identity)
            if watched is not None and watched.leaf is reference:
                del self._by_id[identity]

        reference = self._by_number[number] = weakref.ref(leaf, forget)
        return _Watched(reference, number)

    def is_watched(self, leaf: Tensor) -> bool:
        """Return whether a leaf has a number."""
        watched = self._by_id.get(id(leaf))
        return watched is not None and watched.leaf() is leaf

    def find(self, number: int) -> Tensor | None:
        """Return the leaf of a number; None: it is gone."""
        reference = self._by_number.get(number)
        return None if reference is None else reference()

    def find_all(self, numbers: Iterable[int]) -> list[Tensor]:
        """Return the leaves of these numbers that still exist."""
        return [leaf for number in numbers if (leaf := self.find(number)) is not None]

    def let_stand_for(self, param: Tensor, leaf: Tensor) -> int:
        """Note that a parameter is updated with the gradients of another. Return the parameter's number."""
        number = self.watch(param)
        self._stands_for[number] = weakref.ref(leaf)
        return number

    def is_substituted(self, param: Tensor) -> bool:
        """Return whether a parameter is updated with the gradients of another."""
        return self.watch(param) in self._stands_for

    @property
    def has_substitutes(self) -> bool:
        """Whether any parameter stands for another."""
        return bool(self._stands_for)

    def number_of_gradient(self, param: Tensor) -> int:
        """Return the number of the leaf whose gradients a parameter gets."""
        number = self.watch(param)
        reference = self._stands_for.get(number)
        leaf = None if reference is None else reference()
        return number if leaf is None else self.watch(leaf)

    # What other code does to p.grad

    def remember(self, leaves: Iterable[Tensor]) -> None:
        """Note the state of p.grad, to see whether other code changes it."""
        for leaf in leaves:
            if leaf.grad is not None:
                self._grad_states[id(leaf)] = grad_state(leaf.grad)

    def is_changed(self, leaf: Tensor, gradient: Tensor) -> bool:
        """Return whether other code has changed a leaf's gradient since `remember`."""
        known = self._grad_states.get(id(leaf))
        return known is not None and known != grad_state(gradient)

    def changed(self, leaves: Iterable[Tensor]) -> set[int]:
        """Return the ids of leaves whose p.grad other code has changed."""
        return {id(leaf) for leaf in leaves if leaf.grad is not None and self.is_changed(leaf, leaf.grad)}

    def multiply_clip_factor(self, leaf: Tensor, factor: float) -> None:
        """Note that clipping has multiplied p.grad."""
        self._clip_factors[id(leaf)] = self.clip_factor(leaf) * factor

    def clip_factor(self, leaf: Tensor) -> float:
        """Return by what clipping has multiplied p.grad since the last backward pass."""
        return self._clip_factors.get(id(leaf), 1.0)

    def forget_clip_factors(self, leaves: Iterable[Tensor]) -> None:
        """Forget them, because a backward pass has changed p.grad, or an update has used it."""
        for leaf in leaves:
            self._clip_factors.pop(id(leaf), None)

    def remove_hooks(self) -> None:
        """Remove all hooks."""
        for watched in self._by_id.values():
            for handle in (watched.handle, watched.first_handle):
                if handle is not None:
                    handle.remove()
