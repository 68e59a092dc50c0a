"""One module whose `forward` is ours for a while, and its way back to stock."""

from __future__ import annotations

import contextlib
import copy
import types
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..accumulators import Slot
from ..accumulators.in_place import Write
from ..autograd.capture import Capture
from ..kernels import native_module
from ..kernels.checks import ORDINARY_TYPES
from ..kernels.local_parts import local
from ..kernels.torch_state import runs_as_written
from . import compiled
from .kept_cast import KeptCasts

_grad_enabled, _tracing = torch.is_grad_enabled, torch._C._is_tracing
_transform_at_hand = torch._C._functorch.peek_interpreter_stack
#: The methods by which pickle, copy, DataParallel and torch.jit.script make a module of another: they are
#: looked up on the instance first.
COPYING = ("__reduce_ex__", "__deepcopy__", "_replicate_for_data_parallel", "__prepare_scriptable__")
#: Where a module's `__dict__` has its patched forward.
PATCHED = "_accumulating_site"
#: Where it has what a compiler reads: a `compiled.Traced`, or None.
TRACED = "_accumulating_traced"
#: The functions that stand in for a forward.
_forwards: set[Any] = set()


class WeightSum:
    """What such a function knows of the parameter, its sum, and the wrapper that has both.

    Args:
        slot: the parameter's.
        capture: asked in every backward what is to become of the gradient; referred to weakly.
    """

    def __init__(self, slot: Slot, capture: Capture) -> None:
        self._capture = weakref.ref(capture)
        self.slot = slot

    @property
    def backend(self) -> str:
        """The one that the wrapper was asked for."""
        capture = self._capture()
        return "auto" if capture is None else capture.accumulators.backend

    @property
    def updates(self) -> int:
        """Updates of the inner optimizer so far; its kernels write weights and bump no version."""
        capture = self._capture()
        return 0 if capture is None else capture.num_updates

    @property
    def node(self) -> Any:
        """The AccumulateGrad node that carries the parameter's hook; None where there is none."""
        capture = self._capture()
        return None if capture is None else capture.registry.nodes.get(self.slot, (None,))[0]

    @property
    def accumulates(self) -> bool:
        """Whether a gradient of the parameter would be added to the sum, as far as a forward can tell."""
        return self._capture() is not None and self.slot.param.requires_grad and self.is_ordinary

    @property
    def is_ordinary(self) -> bool:
        """Whether the parameter is no subclass and has memory."""
        return type(self.slot.param) in ORDINARY_TYPES and not self.slot.param.is_meta

    #: What a native function or a compiled graph asks in its backward: whether a gradient is done with.
    adds: Callable[..., bool]

    def remember(self, ticket: int) -> None:
        """Have native code find what this ticket leads to, where native code can add."""

    def declare(self, path: str) -> None:
        """Gradients take this way, as `explain()` shows it."""
        if path not in self.slot.paths:
            self.slot.paths += (path,)

    def begins(self) -> bool:
        """As `Capture.begin_natively`."""
        capture = self._capture()
        return capture is not None and capture.begin_natively()

    def accumulate_in_place(
        self,
        node: Any,
        write: Write,
        operands: tuple[Tensor, ...],
        by_rows: bool = False,
        part: int | None = None,
        may_wait: bool = False,
    ) -> bool:
        """As `Capture.take_in_place`, for the parameter, whose AccumulateGrad node this is.

        `operands`: what `write` reads; where p.grad itself was fed to the function, not while it is written.
        """
        capture, shown = self._capture(), self.slot.param.grad
        if shown is not None:
            shown = local(shown)
        if capture is None or (shown is not None and _share_memory(shown, operands)):
            return False
        return capture.take_in_place(self.slot, node, write, by_rows, part, may_wait)

    def deliver(self, node: Any, gradient: Tensor) -> None:
        """Do what autograd would do with a gradient that a compiled graph adds by an operator.

        Args:
            node: the parameter's AccumulateGrad node in the graph that runs.
            gradient: of the parameter, in the dtype of the products.

        Raises:
            RuntimeError: a hook was registered on the parameter after the forward.
        """
        param, capture = self.slot.param, self._capture()
        if not param.requires_grad:  # frozen since the forward
            return
        if param._backward_hooks:  # the engine will call them without a gradient
            raise RuntimeError(
                f"a hook was registered on parameter {self.slot.name!r} between a compiled forward and its "
                "backward, whose graph has no gradient for it: register hooks before the forward"
            )
        gradient = gradient.to(param.device, param.dtype)
        if capture is not None and capture.receive(self.slot, gradient, True) is not None:
            return
        if param.grad is None:
            param.grad = gradient
        else:
            param.grad.add_(gradient)


def _share_memory(total: Tensor, operands: tuple[Tensor, ...]) -> bool:
    # torch's stubs lack it; public functions ask for a storage, which sparse gradients have none of.
    return any(torch._C._is_alias_of(total, operand) for operand in operands)  # type: ignore[attr-defined]


class PatchedForward(WeightSum):
    """What stands in `module.forward`: the module's own computation, by a function that accumulates.

    It refers to the module and to the wrapper weakly, and stands in the module's `__dict__` under `PATCHED`.
    Whatever copies the module (copy, deepcopy, pickle, DataParallel's replicas) sees nothing of it, and the
    module itself runs the forward of its class once the wrapper is gone.

    Args:
        module: whose class has a forward that this patched knows how to differentiate.
        slot: of the module's weight.
        capture: asked in every backward what is to become of the gradient.
    """

    #: The path's name, as `explain()` shows it.
    path = ""
    #: Whether torch.compile compiles the forward of the module's class when it meets that on its own. It does
    #: not compile the forwards of torch.nn.
    compiled_by_itself = False
    #: Whether its weight's cast under autocast can be kept over a window, and where that is, if it shall be.
    keeps_cast = False
    kept: KeptCasts | None = None
    #: The native patched forward and its function, where there are any.
    _native: Any = None
    _recorded: Any = None

    def __init_subclass__(cls) -> None:
        _forwards.add(runs_as_written(cls.forward, calls_too=not cls.compiled_by_itself))

    def __init__(self, module: torch.nn.Module, slot: Slot, capture: Capture) -> None:
        super().__init__(slot, capture)
        self._module: Callable[[], Any] = weakref.ref(module)
        self._stock = type(module).forward
        #: What `install` has put into the module's `__dict__`.
        self._entries: dict[str, Any] = {}

    @staticmethod
    def forward(module: Any, input: Any) -> Any:
        """What the module's forward is meanwhile: a function of the module, as its class's."""
        raise NotImplementedError

    def __reduce__(self) -> tuple:
        # In a copy of the module's `__dict__` alone; the module itself is copied without a patched forward.
        return type(None), ()

    @property
    def module(self) -> Any:
        return self._module()

    def forget_choices(self) -> None:
        """Ask anew what was found out by trial, if anything."""

    def install(self) -> None:
        """Take the place of the module's forward."""
        # A method of the module: its code is that of all modules of a kind, and Dynamo asks no more of it, so
        # that they share a graph. What copies or pickles it gets the copy's.
        forward = types.MethodType(type(self).forward, self.module)
        large = self.slot.param.numel() > compiled.SMALL
        if self.path and not large:
            self.slot.left_to_compiler = "an operator for so few elements costs more than it saves"
        keeps_cast = self.kept is not None
        traced = compiled.Traced(self, keeps_cast) if self.path and self.is_ordinary and large else None
        self._entries = {"forward": forward, PATCHED: self, TRACED: traced}
        self._entries |= {name: Copying(self, name) for name in COPYING}
        self.module.__dict__.update(self._entries)

    def remove(self) -> None:
        """Give the module its class's forward back, unless somebody has put another in our place."""
        self._withdraw()
        self._entries = {}

    def _withdraw(self) -> dict[str, Any]:
        """Take what is ours out of the module; returns it."""
        module = self.module
        own: dict[str, Any] = {} if module is None else module.__dict__
        return {
            name: own.pop(name) for name, entry in self._entries.items() if name in own and own[name] is entry
        }

    @contextlib.contextmanager
    def aside(self) -> Iterator[Any]:
        """The module, while nothing of ours is in it.

        A forward that another thread runs meanwhile is stock's; its gradient goes the usual way.
        """
        module, ours = self.module, self._withdraw()
        try:
            yield module
        finally:
            if self._entries:  # not removed meanwhile
                module.__dict__.update(ours)

    def uses_stock_forward(self, module: Any, input: Any) -> bool:
        """Whether this call is to be stock's: nothing to accumulate, or a transform wants the operators.

        `input`: what the module was called with.
        """
        param = self.slot.param
        return (
            not self.accumulates
            or module._parameters.get("weight") is not param
            or not self.may_record(module)
            or type(input) not in ORDINARY_TYPES
            or input.layout is not torch.strided
            or input.is_nested
            or input.device != param.device
        )

    def may_record(self, module: Any) -> bool:
        """Whether functions of ours may stand in the graph of a call."""
        return type(module).forward is self._stock and may_record() and not _tracing()

    def remember(self, ticket: int) -> None:
        """As `WeightSum`'s."""
        hook, native = self.slot.native, native_module.module()
        if hook is not None and native is not None and self._native is not None:
            native.remember(ticket, self._native, hook)

    def leave(self, slots: Collection[Slot]) -> bool:
        """Have no more to do with the parameters of these slots; whether nothing is left to do then."""
        return self.slot in slots


def may_record() -> bool:
    """Whether functions of ours may stand in a graph: autograd records, and no transform wants operators."""
    return _grad_enabled() and _transform_at_hand() is None and forward_ad._current_level < 0


@runs_as_written
def adds(patched: Callable[[], Any], *arguments: Any) -> bool:
    """The patched forward's own `adds`, while there is one."""
    known = patched()
    return known is not None and known.adds(*arguments)


@runs_as_written
def begins(patched: Callable[[], Any]) -> bool:
    """The patched forward's own `begins`, while there is one."""
    known = patched()
    return known is not None and known.begins()


class Copying:
    """Stands in a module's `__dict__` before a method that copies the module: the copy holds nothing of ours.

    torch.jit.script asks the module for what it is to compile, and gives no sign when it is done: the patched
    makes way for good.

    Args:
        patched: of the module.
        name: of the method; one of `COPYING`.
    """

    def __init__(self, patched: PatchedForward, name: str) -> None:
        self._patched, self._name = patched, name

    def __call__(self, *arguments: Any) -> Any:
        if self._name == "__prepare_scriptable__":
            self._patched.remove()
        with self._patched.aside() as module:
            if self._name == "__deepcopy__":  # which the class need not have
                return copy.deepcopy(module, *arguments)
            if self._name == "__prepare_scriptable__":
                return getattr(module, self._name, lambda: module)()
            copied = getattr(module, self._name)(*arguments)
            return _apart(copied, module.__dict__) if self._name == "__reduce_ex__" else copied

    def __reduce__(self) -> tuple:
        return getattr, (self._patched.module, self._name, None)


def _apart(state: Any, own: dict[str, Any]) -> Any:
    """A reduced value in which a copy stands for the module's live `__dict__`."""
    if isinstance(state, tuple):
        return tuple(_apart(part, own) for part in state)
    return own.copy() if state is own else state


def is_stock(module: torch.nn.Module) -> bool:
    """Whether the module runs the forward of its class."""
    forward = module.__dict__.get("forward")
    if forward is None:
        return True
    function = getattr(forward, "__func__", None)
    # Of a copy of the `__dict__` alone, ours is left, without its record: it runs the forward of the class.
    abandoned = function in _forwards and module.__dict__.get(PATCHED) is None
    return function is type(module).forward or abandoned
