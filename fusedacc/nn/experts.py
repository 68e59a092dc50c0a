"""Modules with stacked expert weights (experts, …, …), which stand-ins replace during the forward pass.

Transformers' experts are recognised by their common forward. For other modules, the first call shows whether
they read the weight expert by expert.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Collection
from typing import Any

import torch
from torch.compiler import is_compiling

from ..accumulators import Slot
from ..autograd.capture import Capture
from ..kernels.torch_state import frame_compiler
from .patched_forward import PATCHED, PatchedForward
from .stacked import ReadByCompiler, StackedSum, know_transformers, stand_in

#: Transformers' implementations that read one expert's weight at a time, or use a grouped product.
_KNOWN = (None, "eager", "grouped_mm")


class PatchedExperts(PatchedForward):
    """A module with parameters (experts, out, in) or (experts, in, out). slot: of the first of them."""

    compiled_by_itself = True

    def __init__(self, module: torch.nn.Module, slot: Slot, capture: Capture) -> None:
        super().__init__(module, slot, capture)
        self._targets: dict[str, StackedSum] = {}
        self._groups = is_of_transformers(module)
        if self._groups:
            know_transformers()

    def stand_for(self, name: str, target: StackedSum) -> None:
        """Use a stand-in for the parameter of this name too."""
        self._targets[name] = target
        if self._groups:
            way = _implementation(self.module)
            if way in _KNOWN:
                target.declare("grouped")
            else:
                target.slot.left_to = f"Transformers' {way} for experts copies or repacks weights"

    def leave(self, slots: Collection[Slot]) -> bool:
        for name, target in list(self._targets.items()):
            if target.slot in slots:
                del self._targets[name]
        return not self._targets

    @staticmethod
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        stock = type(module).forward
        # First, because a compiler makes a guard of every value that is read before.
        if is_compiling() or frame_compiler() is not None:
            with ReadByCompiler():
                return stock(module, *args, **kwargs)
        patched = module.__dict__.get(PATCHED)
        if patched is None or not patched.may_record(module):
            return stock(module, *args, **kwargs)
        return patched.run(module, args, kwargs)

    def run(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the forward of the module's class with stand-ins in place of the parameters."""
        if self._groups and _implementation(module) not in _KNOWN:
            return self._stock(module, *args, **kwargs)
        own, parameters = module.__dict__, module._parameters
        shadows = {
            name: stand_in(target, self._groups)
            for name, target in self._targets.items()
            if target.accumulates and parameters.get(name) is target.slot.param and name not in own
        }
        own.update(shadows)
        self._entries = self._entries | shadows  # copies of the module leave these out
        try:
            output = self._stock(module, *args, **kwargs)
        finally:
            self._entries = {name: entry for name, entry in self._entries.items() if name not in shadows}
            for name, shadow in shadows.items():
                if own.get(name) is shadow:
                    del own[name]
        if not self._groups:
            self._forget_unread(shadows)
        return output

    def _forget_unread(self, names: Collection[str]) -> None:
        """Stop using stand-ins for parameters that were not read expert by expert."""
        for name in names:
            target = self._targets.get(name)
            if target is not None and "grouped" not in target.slot.paths:
                del self._targets[name]
        if not self._targets:
            self.remove()


def may_read_experts(module: torch.nn.Module, parameter: torch.Tensor) -> bool:
    """Whether a module's own parameter may be a stack of experts' weights."""
    stacked = parameter.dim() == 3 and len(parameter) > 1
    return stacked and not type(module).__module__.startswith("torch.")


def is_of_transformers(module: torch.nn.Module) -> bool:
    """Whether Transformers' `use_experts_implementation` has decorated the module's class."""
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and code is _code_of(sys.modules.get("transformers.integrations.moe"))


@functools.cache
def _code_of(moe: types.ModuleType | None) -> types.CodeType | None:
    """Return the code of the forward that `use_experts_implementation` gives to every class."""
    decorate = getattr(moe, "use_experts_implementation", None)
    if decorate is None:
        return None

    class Probe(torch.nn.Module):
        def forward(self) -> None:
            """Replaced by the decorator."""

    return decorate(Probe).forward.__code__


def _implementation(module: Any) -> Any:
    return getattr(module.config, "_experts_implementation", None)
