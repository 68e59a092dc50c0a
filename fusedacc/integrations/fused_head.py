"""`fuse_head`: lets a causal language model of Transformers compute its training loss without logits.

During the model's forward, its head returns a placeholder for the logits that holds the head's input. The
model's own loss function shifts labels and selects tokens as usual. The placeholder applies these operations
to the head's input instead. At `cross_entropy` it calls `linear_cross_entropy`. Any operation between head
and loss that cannot be applied to the input raises an error.
"""

from __future__ import annotations

import builtins
import inspect
import math
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..nn.functional import linear_cross_entropy
from ..nn.patched_forward import is_patched

#: Number of tokens whose loss is compared with PyTorch's, once.
_COMPARED = 8
#: The model's attribute that holds its `FusedHead`.
_FUSED = "_fusedacc_fused_head"
#: The forward of the heads that can be fused.
_STOCK = nn.Linear.forward


class HeadLogits:
    """Placeholder for `head(hidden) * scale`, (..., classes), with methods of a tensor that losses call.

    weight, bias: those of the head when it was called.
    """

    def __init__(
        self, fused: FusedHead, hidden: Tensor, weight: Tensor, bias: Any, scale: builtins.float, dtype: Any
    ) -> None:
        self._fused = fused
        self._hidden = hidden
        self._weight = weight
        self._bias = bias
        self._scale = scale
        self.dtype = dtype
        self.device = hidden.device
        self.shape = torch.Size((*hidden.shape[:-1], weight.shape[0]))

    def _with(self, hidden: Any = None, scale: builtins.float = 1.0, dtype: Any = None) -> HeadLogits:
        return HeadLogits(
            self._fused,
            self._hidden if hidden is None else hidden,
            self._weight,
            self._bias,
            self._scale * scale,
            dtype or self.dtype,
        )

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def float(self) -> HeadLogits:
        """Cast to float32. The loss is computed in float32 anyway."""
        return self._with(dtype=torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> HeadLogits:
        """Cast to float32, or return self for the same device. Anything else raises RuntimeError."""
        target = args[0] if len(args) == 1 and not kwargs else None
        if target is torch.float32 or target == self.dtype:
            return self._with(dtype=target)
        if isinstance(target, (str, torch.device)) and torch.device(target) == self.device:
            return self
        raise self._fused.refusal(f"moves or casts the logits by to{(*args, *kwargs.values())}")

    def contiguous(self) -> HeadLogits:
        return self

    def view(self, *shape: Any) -> HeadLogits:
        """Change the shape like a tensor's `view`. The classes must remain the last dimension."""
        *sizes, classes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        keeps_tokens = -1 in sizes or math.prod(sizes) == math.prod(self.shape[:-1])
        if classes not in (-1, self.shape[-1]) or not keeps_tokens:
            raise self._fused.refusal(f"views logits of shape {tuple(self.shape)} as {(*sizes, classes)}")
        return self._with(self._hidden.reshape(*sizes, self._hidden.shape[-1]))

    reshape = view

    def __getitem__(self, index: Any) -> HeadLogits:
        parts = list(index) if isinstance(index, tuple) else [index]
        for place in [place for place, part in enumerate(parts) if part is Ellipsis]:
            parts[place : place + 1] = [slice(None)] * (self.dim() - len(parts) + 1)
        if None in parts or len(parts) > self.dim():
            raise self._fused.refusal("indexes the logits by None, or too often")
        if len(parts) == self.dim() and parts.pop() != slice(None):
            raise self._fused.refusal("selects some classes of the logits")
        return self._with(self._hidden[tuple(parts)] if parts else None)

    def __mul__(self, other: Any) -> HeadLogits:
        if not isinstance(other, (int, float)):
            raise self._fused.refusal("scales the logits by a tensor")
        return self._with(scale=other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> HeadLogits:
        return self * (1 / other)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._fused.refusal(f"uses logits.{name}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        logits = next(value for value in (*args, *kwargs.values()) if isinstance(value, HeadLogits))
        if func is not F.cross_entropy:
            raise logits._fused.refusal(f"calls {getattr(func, '__name__', func)} with the logits")
        call = _CROSS_ENTROPY.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        if logits.dim() != 2 or given["size_average"] is not None or given["reduce"] is not None:
            raise logits._fused.refusal("calls cross_entropy other than with (tokens, classes)")
        options = {name: given[name] for name in ("weight", "ignore_index", "label_smoothing")}
        logits._fused.compare(logits, given["target"], options)
        logits._fused.used = True
        return logits._loss(slice(None), given["target"], reduction=given["reduction"], **options)

    def _loss(self, tokens: Any, target: Tensor, **options: Any) -> Tensor:
        """Return the loss of some tokens. The scale is moved from the logits to the head's operands."""
        hidden = self._hidden[tokens]
        bias = self._bias
        if self._scale != 1:
            hidden = hidden * self._scale
            if bias is not None:
                bias = bias * self._scale
        return linear_cross_entropy(hidden, self._weight, target, linear_bias=bias, **options)

    def unscaled(self, tokens: Any) -> Tensor:
        """Return PyTorch's logits of some tokens, without the scale."""
        return F.linear(self._hidden[tokens], self._weight, self._bias)


_CROSS_ENTROPY = inspect.signature(F.cross_entropy)


class FusedHead:
    """The result of `fuse_head`; `remove()` undoes it.

    Copies and pickles of the model contain an inactive one.
    """

    def __init__(self, model: PreTrainedModel, eval: bool) -> None:
        self._model: Any = weakref.ref(model)
        self.head: Any = _checked_head(model)
        self._eval = eval
        self._name = type(model).__name__
        self._compared = False
        #: The forward in the head's `__dict__` before it was replaced: a wrapper's, or None for the class's.
        self._before: Any = None
        #: Whether the running forward uses a placeholder, and whether the loss was computed from it.
        self._active: Any = False
        self.used = False
        #: The index of the labels among positional arguments.
        self._place = list(inspect.signature(type(model).forward).parameters).index("labels") - 1
        self._hooks = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(self._leave, prepend=True, with_kwargs=True, always_call=True),
        ]
        model.__dict__[_FUSED] = self

    def __reduce__(self) -> tuple:
        return _of_a_copy, ()

    def remove(self) -> None:
        """Let the model compute logits again."""
        for hook in self._hooks:
            hook.remove()
        model = self._model()
        if model is not None:
            model.__dict__.pop(_FUSED, None)

    def refusal(self, what: str) -> RuntimeError:
        """Return the error for an operation that needs the logits."""
        return RuntimeError(
            f"fuse_head: {self._name} {what} between its head and its loss, which needs all logits: call "
            "remove() on what fuse_head() returned"
        )

    def _enter(self, model: Any, args: Any, kwargs: Any) -> None:
        if model is not self._model() or not (model.training or self._eval):
            return
        if (args[self._place] if len(args) > self._place else kwargs.get("labels")) is None:
            return
        if type(self.head).forward is not _STOCK:  # its class was changed
            return
        self._before = self.head.__dict__.get("forward")
        self.used = False
        self.head.forward = self._logits
        self._active = True

    def _logits(self, hidden: Tensor) -> HeadLogits:
        """The forward of the head while the model's forward runs."""
        weight = self.head.weight
        bias = self.head.bias
        return HeadLogits(self, hidden, weight, bias, 1.0, hidden.dtype)

    def _leave(self, model: Any, args: Any, kwargs: Any, output: Any) -> Any:
        if not self._active or model is not self._model():
            return None
        self._active = False
        del self.head.forward
        if self._before is not None:
            self.head.forward = self._before
        if output is None:  # the forward has raised
            return None
        if not self.used:
            raise self.refusal("computes its loss from something else than its head's logits")
        if isinstance(output, tuple):
            return tuple(None if isinstance(value, HeadLogits) else value for value in output)
        without_logits = {name: value for name, value in output.items() if not isinstance(value, HeadLogits)}
        return type(output)(**without_logits)

    def compare(self, logits: HeadLogits, target: Tensor, options: Any) -> None:
        """Compare the loss of a few tokens with PyTorch's, at the first call outside torch.compile.

        Raises:
            RuntimeError: they differ.
        """
        if self._compared or torch.compiler.is_compiling():
            return
        with torch.no_grad():
            some = (target != options["ignore_index"]).nonzero()[:_COMPARED, 0]
            if not len(some):
                return
            # A replaced forward may compute something else. The head's own reads its weight
            # again, and a parametrization may compute another value each time.
            replaced = self._before is not None and not is_patched(self._before)
            full = self._before(logits._hidden[some]) if replaced else logits.unscaled(some)
            tolerance = 0.05 if full.itemsize == 2 else 1e-4
            theirs = F.cross_entropy(full.float() * logits._scale, target[some], reduction="sum", **options)
            ours = logits._loss(some, target[some], reduction="sum", **options)
            if not torch.allclose(
                ours.double(), theirs.double(), rtol=tolerance, atol=tolerance, equal_nan=True
            ):
                raise RuntimeError(
                    f"fuse_head: the losses of {len(some)} tokens of {self._name} differ: {float(ours)} "
                    f"without logits, {float(theirs)} by PyTorch. Please report this, and call remove()"
                )
        self._compared = True


def _of_a_copy() -> FusedHead:
    """Return an inactive object for the hooks of a copied model."""
    fused = FusedHead.__new__(FusedHead)
    fused._model = type(None)
    fused._hooks = []
    fused._active = False
    return fused


def fuse_head(model: PreTrainedModel, *, eval: bool = False) -> FusedHead:
    """Let a causal language model compute its loss without logits, by `linear_cross_entropy`.

    In training mode, if the model is called with labels, `output.logits` is None. Nothing changes without
    labels, in `generate()` and in eval mode. No `AccumulatingOptimizer` is needed; one with `model=` adds the
    head's weight gradient to its sum.

    The first loss is checked: the loss of a few tokens is compared with PyTorch's, which may wait for a GPU.
    A forward that torch.compile traces is not checked.

    Args:
        model: has `get_output_embeddings()`, and its forward takes labels.
        eval: whether to do the same in eval mode. Metrics then get no logits.

    Returns:
        An object whose `remove()` undoes it.

    Raises:
        TypeError: the model is no `PreTrainedModel`.
        ValueError: its head cannot be fused, for the given reason, or is fused already.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"fuse_head takes a transformers.PreTrainedModel, got {type(model).__name__}")
    known = model.__dict__.get(_FUSED)
    if known is not None and known._model() is model:
        raise ValueError(f"the head of this {type(model).__name__} is fused already")
    return FusedHead(model, eval)


def _checked_head(model: Any) -> nn.Linear:
    """Return the model's head. Raise ValueError if its loss cannot be computed without logits."""
    head = model.get_output_embeddings()
    name = type(model).__name__
    problem = None
    if "labels" not in inspect.signature(type(model).forward).parameters:
        problem = "its forward takes no labels"
    elif head is None or type(head).forward is not _STOCK:
        problem = f"its head is {'missing' if head is None else type(head).__name__}, and no plain nn.Linear"
    elif nn.utils.parametrize.is_parametrized(head):
        problem = "its head is parametrized"
    elif any(
        getattr(head, f"_{when}_hooks") for when in ("forward", "forward_pre", "backward", "backward_pre")
    ):
        problem = "hooks on its head look at the logits"
    elif getattr(model.config.get_text_config(), "final_logit_softcapping", None):
        problem = "final_logit_softcapping caps the logits by tanh, which needs all of them"
    if problem is not None:
        raise ValueError(f"fuse_head cannot fuse the head of {name}: {problem}")
    return head
