"""Replaces the forward of one module, and restores it."""

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
from ..kernels import native_module, torch_state
from ..kernels.checks import ORDINARY_TYPES
from ..kernels.local_parts import local
from ..kernels.torch_private import innermost_transform, runs_as_written, share_memory, will_run
from ..kernels.torch_state import weakly
from . import compiled
from .kept_cast import KeptCasts

_grad_enabled = torch.is_grad_enabled
#: The methods that pickle, copy, DataParallel and torch.jit.script call to copy a module. They are looked up
#: on the instance first.
COPYING = ("__reduce_ex__", "__deepcopy__", "_replicate_for_data_parallel", "__prepare_scriptable__")
#: The key of the `PatchedForward` in the module's `__dict__`.
PATCHED = "_accumulating_forward"
#: The key of the `compiled.Traced` that a compiler reads, or None.
TRACED = "_accumulating_traced"
#: Why PyTorch computes a call, for `explain()`.
OTHER_WEIGHT = (
    "a forward has read another tensor as the module's weight (pruned, parametrized, ...), and PyTorch "
    "computed that call"
)
#: All functions that replace a forward.
_forwards: set[Any] = set()


class WeightSum:
    """A parameter, its sum, and the wrapper that has both, for functions that add to the sum. Refers weakly
    to the capture.
    """

    #: The path's name in `explain()`.
    path = ""
    #: Keeps the weight's autocast cast over a window; None: casts are not kept.
    kept: KeptCasts | None = None
    #: Whether a product may be added after the backward pass, because nothing changes its operands.
    operands_stay = True

    def __init__(self, slot: Slot, capture: Capture) -> None:
        self._capture = weakref.ref(capture)
        self.slot = slot
        #: By which operators find this object (see `compiled`).
        self.number = compiled.number_for(self)
        self.ticket = compiled.make_ticket(self.number)
        native: Any = native_module.loaded()
        if native is not None and isinstance(capture.engine, native.Engine):
            add = weakly(self.add_in_backward)
            #: The C++ `WeightSum` (csrc/autograd/weight_sum.h), which adds without Python where it can.
            self._native = native.WeightSum(self.number, capture.engine, slot, add)

    @property
    def backend(self) -> str:
        """The backend that the wrapper requested."""
        capture = self._capture()
        return "auto" if capture is None else capture.accumulators.backend

    @property
    def updates(self) -> int:
        """Number of inner optimizer updates. Its kernels write weights without a version change."""
        capture = self._capture()
        return 0 if capture is None else capture.num_updates

    @property
    def node(self) -> Any:
        """The AccumulateGrad node that carries the parameter's hook; None if there is none."""
        capture = self._capture()
        return None if capture is None else capture.registry.nodes.get(self.slot)

    @property
    def accumulates(self) -> bool:
        """Whether a gradient of the parameter would be added to the sum, as far as a forward can know."""
        return self._capture() is not None and self.slot.param.requires_grad and self.is_ordinary

    @property
    def is_ordinary(self) -> bool:
        """Whether the parameter is not of a subclass and has memory."""
        return type(self.slot.param) in ORDINARY_TYPES and not self.slot.param.is_meta

    def add_in_backward(self, method: str, *arguments: Any) -> bool:
        """Call a method of this object that tries to add a gradient, in the backward of a native function.

        The method gets the weight's node in the running graph, then these arguments.
        """
        return getattr(self, method)(compiled.end_of_graph(self.slot.param), *arguments)

    def declare(self, path: str) -> None:
        """Record the path that gradients take, for `explain()`."""
        if path not in self.slot.paths:
            self.slot.paths += (path,)

    def select_again(self) -> None:
        """Forget which product was selected, if there is one."""

    def left_to_torch(self, weight: Any, input: Any) -> bool:
        """Whether PyTorch computes this call: nothing accumulates, or a transform is active.

        weight: the module's weight as the call has read it. `explain()` says if it is not the parameter.
        """
        param = self.slot.param
        if weight is not param:
            self.note(OTHER_WEIGHT)
            return True
        return (
            not self.accumulates
            or not self.may_record()
            or torch_state.in_function_mode()
            or type(input) not in ORDINARY_TYPES
            or input.layout is not torch.strided
            or input.is_nested
            or input.device != param.device
        )

    def may_record(self) -> bool:
        """Whether this call may add custom functions to the graph."""
        return may_record() and not torch.jit.is_tracing()

    def note(self, why: str) -> None:
        """Record for `explain()` why PyTorch computes a call, if the call may lead to a gradient."""
        if _grad_enabled():
            self.slot.left_to = why

    def accumulate_in_place(
        self,
        node: Any,
        write: Write,
        operands: tuple[Tensor, ...],
        by_rows: bool = False,
        part: int | None = None,
        may_wait: bool = False,
        any_layout: bool = False,
    ) -> bool:
        """Call `Capture.take_in_place` for the parameter, unless an operand shares memory with p.grad or
        `main_grad`.

        operands: the tensors that `write` reads. They must not share memory with the accumulator.
        """
        capture = self._capture()
        shown = self.slot.param.grad if self.slot.main_grad is None else self.slot.main_grad
        if shown is not None:
            shown = local(shown)
        if capture is None or (shown is not None and _share_memory(shown, operands)):
            return False
        may_wait = may_wait and self.operands_stay
        is_taken = capture.take_in_place(self.slot, node, write, by_rows, part, may_wait, any_layout)
        if is_taken and self.slot.param._backward_hooks and will_run(node):
            self._show(write, by_rows, part)
        return is_taken

    def _show(self, write: Write, by_rows: bool, part: int | None) -> None:
        """Give a gradient that was added to the sum to hooks on the weight, all of which only look."""
        param = self.slot.param
        gradient = torch.zeros(param.shape, dtype=self.slot.accumulate_dtype, device=param.device)
        write(gradient, 1.0, 1.0 if by_rows or part is not None else 0.0)
        for hook in list((param._backward_hooks or {}).values()):
            hook(gradient)

    def deliver(self, node: Any, gradient: Tensor) -> None:
        """Handle a gradient that an operator of a compiled graph has computed, as autograd would. Raises
        RuntimeError if a hook was registered on the parameter after the forward.
        """
        param = self.slot.param
        capture = self._capture()
        if not param.requires_grad:  # frozen after the forward pass
            return
        if param._backward_hooks:  # the engine will call them without a gradient
            raise RuntimeError(
                f"a hook was registered on parameter {self.slot.name!r} between a compiled forward and its "
                "backward, whose graph has no gradient for it: register hooks before the forward"
            )
        gradient = gradient.to(param.device, param.dtype)
        if capture is not None:
            reason = capture.engine.reason_for(self.slot)
            if capture.receive(self.slot, gradient, reason, is_unshared=True, of_node=False):
                return
        if param.grad is None:
            param.grad = gradient
        else:
            param.grad.add_(gradient)


def _share_memory(total: Tensor, operands: tuple[Tensor, ...]) -> bool:
    return any(share_memory(total, operand) for operand in operands)


class PatchedForward(WeightSum):
    """Replaces `module.forward` by a function that computes the same and accumulates in its backward.

    It is in the module's `__dict__` under `PATCHED`, and keeps weak references to the module and the wrapper.
    Copies of the module (copy, deepcopy, pickle, DataParallel's replicas) do not contain it. Without the
    wrapper, the module runs the forward of its class.
    """

    #: Whether torch.compile compiles the forward of the module's class if nothing around it is compiled. It
    #: does not compile the forwards of torch.nn.
    compiled_by_itself = False
    #: Whether the weight's autocast cast can be kept over a window.
    keeps_cast = False

    def __init_subclass__(cls) -> None:
        _forwards.add(runs_as_written(cls.forward, calls_too=not cls.compiled_by_itself))

    def __init__(self, module: torch.nn.Module, slot: Slot, capture: Capture) -> None:
        super().__init__(slot, capture)
        self._module: Callable[[], Any] = weakref.ref(module)
        #: The forward that is replaced. If the class gets another one later, that one runs instead.
        self.stock = type(module).forward
        native: Any = native_module.loaded()
        #: The same as getattr. A patched forward reads each attribute of its module once, because a property
        #: may compute another value each time.
        self.read: Callable[[Any, str], Any] = getattr if native is None else native.attribute
        #: The entries that `install` has added to the module's `__dict__`.
        self._entries: dict[str, Any] = {}

    @staticmethod
    def forward(module: Any, input: Any) -> Any:
        """Run the module's forward while it is replaced. A static method that gets the module."""
        raise NotImplementedError

    def __reduce__(self) -> tuple:
        # Only a copy of the module's `__dict__` gets here; copies of the module have no patched forward.
        return type(None), ()

    @property
    def module(self) -> Any:
        return self._module()

    def install(self) -> None:
        """Replace the module's forward."""
        # A bound method has the same code for all modules of a kind, and Dynamo's guards check only the code,
        # so these modules share a graph. Its copies and pickles are bound to the module's copy.
        forward = types.MethodType(type(self).forward, self.module)
        large = self.slot.param.numel() > compiled.SMALL
        if self.path and not self.is_ordinary:
            param = self.slot.param
            what = "on the meta device" if param.is_meta else f"a {type(param).__name__}"
            self.slot.left_to_compiler = f"the weight is {what}"
        elif self.path and not large:
            self.slot.left_to_compiler = "an operator for so few elements costs more than it saves"
        keeps_cast = self.kept is not None
        traced = None
        if self.path and self.is_ordinary and large:
            traced = compiled.Traced(self, keeps_cast, self.stock)
        self._entries = {"forward": forward, PATCHED: self, TRACED: traced}
        self._entries |= {name: Copying(self, name) for name in COPYING}
        self.module.__dict__.update(self._entries)

    def remove(self) -> None:
        """Restore the forward of the module's class, unless other code has replaced it since."""
        self._withdraw()
        self._entries = {}

    def _withdraw(self) -> dict[str, Any]:
        """Remove the entries of `install` from the module, and return them."""
        module = self.module
        own: dict[str, Any] = {} if module is None else module.__dict__
        return {
            name: own.pop(name) for name, entry in self._entries.items() if name in own and own[name] is entry
        }

    @contextlib.contextmanager
    def aside(self) -> Iterator[Any]:
        """Context in which the module has no entries of `install`; yields the module.

        If another thread runs the forward during this time, autograd handles its gradient as usual.
        """
        module = self.module
        ours = self._withdraw()
        try:
            yield module
        finally:
            if self._entries:  # `remove` was not called inside the context
                module.__dict__.update(ours)

    def leave(self, slots: Collection[Slot]) -> bool:
        """Stop using the parameters of these slots. Return whether the patched forward has none left."""
        return self.slot in slots


def reads_parameter(module: Any, name: str, param: Any) -> bool:
    """Whether `module.name` is this parameter. Runs no code of a property.

    Something else may hide a parameter: an entry of the module's `__dict__`, an attribute of its class, or a
    `__getattr__` that the class defines.
    """
    return (
        module._parameters.get(name) is param
        and name not in module.__dict__
        and not any(name in each.__dict__ for each in type(module).__mro__)
        and getattr(module, name, None) is param
    )


def may_record() -> bool:
    """Whether custom functions may be in the graph: autograd records, and no transform is active."""
    if torch_state.no_python_functions:
        return False
    return _grad_enabled() and innermost_transform() is None and forward_ad._current_level < 0


class Copying:
    """Replaces a method of `COPYING` that copies the module, so that the copy has no patched forward.

    torch.jit.script calls `__prepare_scriptable__` and does not report its end, so the patched forward is
    removed for good.
    """

    def __init__(self, patched: PatchedForward, name: str) -> None:
        self._patched = patched
        self._name = name

    def __call__(self, *arguments: Any) -> Any:
        if self._name == "__prepare_scriptable__":
            self._patched.remove()
        with self._patched.aside() as module:
            if self._name == "__deepcopy__":  # the class may not define it
                return copy.deepcopy(module, *arguments)
            if self._name == "__prepare_scriptable__":
                return getattr(module, self._name, lambda: module)()
            copied = getattr(module, self._name)(*arguments)
            return _apart(copied, module.__dict__) if self._name == "__reduce_ex__" else copied

    def __reduce__(self) -> tuple:
        return getattr, (self._patched.module, self._name, None)


def _apart(state: Any, own: dict[str, Any]) -> Any:
    """Return a reduced value with the module's live `__dict__` replaced by a copy."""
    if isinstance(state, tuple):
        return tuple(_apart(part, own) for part in state)
    return own.copy() if state is own else state


def is_stock(module: torch.nn.Module) -> bool:
    """Whether the module runs the forward of its class."""
    forward = module.__dict__.get("forward")
    if forward is None:
        return True
    # A copy of the `__dict__` keeps the replaced forward without PATCHED, and so runs the class's forward.
    abandoned = is_patched(forward) and module.__dict__.get(PATCHED) is None
    return getattr(forward, "__func__", None) is type(module).forward or abandoned


def is_patched(forward: Any) -> bool:
    """Whether a `PatchedForward` has put this forward in place of a module's own."""
    return getattr(forward, "__func__", None) in _forwards
