"""One parameter's place in the accumulation: its sum, its dtypes, and what became of p.grad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .checks import PAIRS
from .memory import Segment

#: (device, gradient dtype, accumulate dtype): what one launch may hold.
Lane = tuple[torch.device, torch.dtype, torch.dtype]
#: Every lane there was, itself and its key: slots of a lane share the tuple.
_lanes: dict[Lane, tuple[Lane, int]] = {}


def default_accumulate_dtype(param: Tensor) -> torch.dtype:
    """float32 for bfloat16 and float16 parameters, else the parameter's own dtype."""
    return torch.float32 if param.dtype in (torch.bfloat16, torch.float16) else param.dtype


class Slot:
    """One parameter of the wrapped optimizer; a record that the arena and the capture keep."""

    __slots__ = (
        "aside",
        "buffer",
        "cast",
        "delivered",
        "former_grad_dtype",
        "group",
        "ignored",
        "lane",
        "lane_key",
        "left_to",
        "name",
        "native",
        "nbytes",
        "odd",
        "on_cuda",
        "param",
        "paths",
        "requested_dtype",
        "segment",
        "shape",
        "shown",
        "shown_version",
        "signature",
        "stream",
        "strides",
        "sum",
        "widened",
    )

    def __init__(self, param: Tensor, group: int, name: str, accumulate_dtype: torch.dtype | None) -> None:
        self.param = param
        self.group = group
        self.name = name
        #: The sum while it is private; None before its first gradient and while p.grad is the truth.
        self.sum: Tensor | None = None
        #: Memory kept from window to window, where gradient and sum differ in dtype.
        self.buffer: Tensor | None = None
        self.segment: Segment | None = None
        #: Whether p.grad is the sum, and the truth, in a counted loop; what was put there then.
        self.delivered = False
        self.shown: Callable[[], Tensor | None] = _nothing
        self.shown_version = 0
        #: Whether, in a manual loop, autograd is to store in p.grad while the sum waits here.
        self.aside = False
        #: The sum in the parameter's dtype, while it stands in p.grad for an update.
        self.cast: Tensor | None = None
        #: What a backward inside `ignore()` left in p.grad.
        self.ignored: Tensor | None = None
        #: Whether no kernel takes the gradients: complex dtypes, and once a sparse one or a subclass came.
        self.odd: bool
        #: What `grad_dtype` was before it was set to None, if it was.
        self.widened = False
        self.former_grad_dtype: torch.dtype | None = None
        #: The accumulate dtype that was asked for; None for the default.
        self.requested_dtype = accumulate_dtype
        #: How modules of the model add to the sum by themselves, and why they do not where they might.
        self.paths: tuple[str, ...] = ()
        self.left_to = ""
        #: The native hook on the parameter's node, where there is one.
        self.native: Any = None
        #: The stream on which a module has added last, until the backward's end; 0 for the default one.
        self.stream: int | None = None
        self.describe()

    def forget(self) -> None:
        """No sum, and nothing of ours in p.grad."""
        self.sum = self.cast = self.ignored = None
        self.shown = _nothing
        self.delivered = self.aside = False

    def drop_buffer(self) -> None:
        """Let the buffer go; its segment knows."""
        if self.segment is not None:
            self.segment.buffers -= 1
        self.buffer = self.segment = None

    def describe(self) -> None:
        """Take the parameter's present dtype, device and layout."""
        param, dtype = self.param, self.requested_dtype
        if dtype is None or (param.dtype, dtype) not in PAIRS:
            dtype = default_accumulate_dtype(param)
        lane = param.device, param.dtype, dtype
        #: The key is a small number that stands for the lane where a hash of it would cost too much.
        self.lane, self.lane_key = _lanes.setdefault(lane, (lane, len(_lanes) + 1))
        self.on_cuda = param.is_cuda
        self.set_odd((param.dtype, dtype) not in PAIRS)
        self.nbytes = param.numel() * param.element_size()
        self.shape, self.strides = param.shape, _gradient_strides(param)
        self.signature = self.current_signature()

    def set_odd(self, odd: bool) -> None:
        """Note whether no kernel takes the gradients; the native hook knows then too."""
        self.odd = odd
        if self.native is not None:
            self.native.odd = odd

    def current_signature(self) -> tuple:
        """What must not have changed since `describe`, for the node to be the same and the sum to fit.

        A change of device or layout comes with other memory.
        """
        param = self.param
        return param.data_ptr(), param.dtype, param.requires_grad, param.shape

    def widen(self) -> None:
        """Let p.grad be of any dtype, where the sum has another than the parameter."""
        if self.accumulate_dtype != self.param.dtype and not self.widened:
            self.former_grad_dtype, self.widened = self.param.grad_dtype, True
            self.param.grad_dtype = None

    def narrow(self) -> None:
        """Give the parameter its `grad_dtype` back, and p.grad in it."""
        if self.widened:
            param, self.widened = self.param, False
            gradient, param.grad = param.grad, None
            param.grad_dtype = self.former_grad_dtype
            if gradient is not None:
                param.grad = gradient.to(self.former_grad_dtype or gradient.dtype)

    @property
    def accumulate_dtype(self) -> torch.dtype:
        return self.lane[2]

    def shows_sum(self) -> bool:
        """Whether autograd allows the sum to stand in p.grad."""
        return self.accumulate_dtype == self.param.dtype or self.param.grad_dtype is None

    def is_foreign(self, gradient: Tensor) -> bool:
        """Whether what stands in p.grad was put there by somebody else, and counts."""
        return not (self.delivered or gradient is self.cast or gradient is self.ignored)

    def obeys_layout(self, gradient: Tensor) -> bool:
        """Whether a gradient's strides let it become p.grad as it is; dimensions of size 1 do not count."""
        strides = gradient.stride()
        return strides == self.strides or all(
            size == 1 or have == want
            for size, have, want in zip(gradient.shape, strides, self.strides, strict=True)
        )


def _gradient_strides(param: Tensor) -> tuple[int, ...]:
    """AccumulateGrad's layout contract: a dense parameter's own strides, else row-major.

    See ATen grad_layout_contract.h.
    """
    if param.layout is torch.strided and param.is_contiguous():
        return param.stride()
    kept = torch.empty_like(param, device="meta").stride()  # which keeps strides only where they are dense
    return kept if kept == param.stride() else torch.empty(param.shape, device="meta").stride()


def _nothing() -> None:
    """A weak reference to nothing."""
