"""The record of one parameter: its accumulator and its memory, its dtypes, and the state of its p.grad."""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import checks, native_module, registry, torch_state
from ..kernels.dtypes import PAIRS, default_accumulate_dtype
from ..kernels.local_parts import local
from ..kernels.torch_private import tensor_references
from . import engine
from .memory import Segment, cut
from .state import GradState

#: (device, gradient dtype, accumulate dtype). One kernel launch handles tensors of one lane.
Lane = tuple[torch.device, torch.dtype, torch.dtype]


def nothing() -> None:
    """Return None, as a dead weak reference does."""


class Path(str, enum.Enum):
    """How a parameter's gradient reaches its accumulator; `explain()` has a table with an entry for each."""

    #: A module adds inside its backward pass: a Linear's product, experts' products, the rows that an
    #: Embedding looked up, or the slices of a language model's head. Or code outside fusedacc does, through
    #: `fusedacc.sink`.
    GEMM = "gemm"
    GROUPED = "grouped"
    EMBEDDING = "embedding"
    HEAD = "head"
    SINK = "sink"
    #: A module of another library adds to `param.main_grad` inside its backward pass.
    MAIN_GRAD = "main_grad"
    #: One launch for many gradients; FSDP2: the same for the shards' gradients.
    MULTI_TENSOR = "multi_tensor"
    FSDP2 = "fsdp2"
    #: Autograd or plain torch adds.
    EAGER = "eager"
    #: No gradient has come.
    NONE = "none"


#: The paths on which modules add.
MODULE_PATHS = (Path.GEMM, Path.GROUPED, Path.EMBEDDING, Path.HEAD, Path.SINK)


def check_backend(lane: Lane, backend: str) -> None:
    """Raise RuntimeError unless the backend supports a lane's dtypes and device and passes its self-test."""
    device, gradient, accumulator = lane
    # A gradient into the accumulator, the accumulator scaled in place, and its cast into p.grad.
    for source, target in ((gradient, accumulator), (accumulator, accumulator), (accumulator, gradient)):
        if (source, target) in PAIRS:
            registry.select(device, target, source, backend)


class Slot(engine.Slot):
    """One parameter of the wrapped optimizer.

    The engine's class has what native code reads: the accumulator, its deferred scale, the state of p.grad.
    """

    def __init__(
        self, param: Tensor, group: int, name: str, requested_dtype: torch.dtype | None, number: int = 0
    ) -> None:
        super().__init__(param)
        self.param = param
        self.group = group
        self.name = name
        #: The accumulate dtype that the user asked for; None for the default.
        self.requested_dtype = requested_dtype
        #: The parameter's number and that of its last addition, see Note [Streams] in noise.py.
        self.number = number
        self.addition = -1
        #: The part of a bucket that is all-reduced, and the bucket's memory; None without a bucket.
        self.buffer: Tensor | None = None
        self.segment: Segment | None = None
        #: Rows of the sparse sum after its last addition. The next window's sum is likely to get as many.
        self.num_rows = 0
        #: Whether `grad_dtype` was set to None, and its value before.
        self.widened = False
        self.cleared_grad_dtype: torch.dtype | None = None
        #: Whether a module of another library has added to `main_grad` itself.
        self.added_by_module = False
        #: Why a module that could add does not.
        self.left_to = ""
        #: Whether an operator of fusedacc in a compiled graph has delivered a gradient.
        self.compiled = False
        #: Why a compiled graph computes PyTorch's own gradient; "" where it has an operator of fusedacc.
        self.left_to_compiler = ""
        #: Whether a module of the model keeps its autocast cast for a whole window.
        self.keeps_cast = False
        #: The parameter as the hook registry last saw it. While this is unchanged, its AccumulateGrad node
        #: is the same and the accumulator fits.
        self.seen: tuple | None = None
        self._paths: tuple[str, ...] = ()
        self.describe()

    @property
    def paths(self) -> tuple[str, ...]:
        """The `MODULE_PATHS` on which modules of the model add."""
        return self._paths

    @paths.setter
    def paths(self, paths: tuple[str, ...]) -> None:
        self._paths = paths
        self.has_path = bool(paths)

    def is_reduced_outside(self) -> bool:
        """Whether code outside the wrapper may reduce the gradient over ranks, and read p.grad to do so.

        DistributedDataParallel, FSDP1 and the reducers of Megatron, Apex and DeepSpeed do so in post-hooks of
        the AccumulateGrad node: it is the engine's reason `hook_after_node`, with a process group. Only
        native code can see these hooks. Without it, any process group counts as one.
        """
        may_be = self.may_be_reduced_outside and torch_state.process_group_up()
        return may_be and native_module.has_post_hook(self.param)

    def drop_buffer(self) -> None:
        """Leave the bucket."""
        if self.segment is not None:
            self.segment.buffers -= 1
        self.buffer = None
        self.segment = None

    def describe(self) -> None:
        """Read the parameter's dtype, device and shape."""
        param = self.param
        dtype = self.requested_dtype
        if dtype is None or (param.dtype, dtype) not in PAIRS:
            dtype = default_accumulate_dtype(param)
        self.lane: Lane = (param.device, param.dtype, dtype)
        self.describe_to_engine(*self.lane)
        self.on_cuda = param.is_cuda
        #: Whether only plain torch can add: for complex dtypes, and after a sparse gradient or a subclass.
        self.needs_eager = (param.dtype, dtype) not in PAIRS
        #: The number of elements of the parameter, or of its shard on this rank.
        self.local_numel = local(param).numel()
        self.shape = param.shape
        #: The parameter's strides and those of its gradient, as last computed.
        self._strides: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def widen(self) -> None:
        """Allow p.grad to have any dtype, unless the accumulator has the parameter's and may be p.grad."""
        param = self.param
        differs = self.accumulate_dtype != param.dtype or not self.may_publish()
        if not (differs and param.is_leaf):
            return
        if not self.widened:
            self.cleared_grad_dtype = param.grad_dtype
            self.widened = True
            param.grad_dtype = None
        elif param.grad_dtype == param.dtype:  # torch.utils.swap_tensors has given it another tensor
            param.grad_dtype = None

    def narrow(self) -> None:
        """Restore the parameter's `grad_dtype`, and cast p.grad to it."""
        if self.widened:
            param = self.param
            self.widened = False
            gradient = param.grad
            param.grad = None
            if param.grad_dtype is None and self.cleared_grad_dtype is not None:  # else the user has set it
                native_module.restore_grad_dtype(param, self.cleared_grad_dtype)
            if gradient is not None:
                param.grad = gradient.to(param.grad_dtype or gradient.dtype)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides that autograd gives a gradient. `p.data = p.data.t()` changes them unseen."""
        of_param = self.param.stride()
        if self._strides is None or self._strides[0] != of_param:
            self._strides = of_param, _gradient_strides(self.param)
        return self._strides[1]

    @property
    def accumulate_dtype(self) -> torch.dtype:
        return self.lane[2]

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype that autograd requires of p.grad; None for any. torch defines it for leaves only."""
        return self.param.grad_dtype if self.param.is_leaf else self.param.dtype

    @property
    def update_dtype(self) -> torch.dtype:
        """The dtype of p.grad at an update: the user's `grad_dtype`, by default the parameter's dtype."""
        wanted = self.grad_dtype
        if wanted is None and self.widened:
            wanted = self.cleared_grad_dtype
        return self.param.dtype if wanted is None or wanted == self.lane[1] else wanted

    @property
    def published_bytes(self) -> int:
        """The bytes of the accumulator in p.grad; 0 if there is none. p.grad is not read."""
        if self.grad_state != GradState.PUBLISHED:
            return 0
        if self.sparse_bytes is not None:
            return self.sparse_bytes
        return self.local_numel * self.accumulate_dtype.itemsize

    def may_publish(self) -> bool:
        """Whether autograd accepts the accumulator as p.grad."""
        return self.grad_dtype in (None, self.lane[2])

    def is_ignored(self) -> bool:
        """Whether p.grad holds a gradient that does not count."""
        return self.grad_state == GradState.IGNORED and self.is_placed(self.param.grad)

    def fits(self, accumulator: Tensor | None) -> bool:
        """Whether the kernel supports this accumulator, which the user may have assigned to p.grad."""
        if accumulator is None or not checks.is_plain(accumulator):
            return False
        device, _, dtype = self.lane
        is_lazy = accumulator.is_neg() or accumulator.is_conj()
        return accumulator.dtype == dtype and accumulator.device == device and not is_lazy

    def obeys_layout(self, gradient: Tensor) -> bool:
        """Whether a gradient has the strides that p.grad needs; dimensions of size 1 do not matter."""
        strides = gradient.stride()
        wanted = self.strides
        return strides == wanted or all(
            size == 1 or have == want
            for size, have, want in zip(gradient.shape, strides, wanted, strict=True)
        )


def new_sums(slots: Sequence[Slot]) -> list[Tensor]:
    """Return uninitialised memory for the sums of slots of one lane.

    A slot of a bucket that is all-reduced gets its part of the bucket, unless the user still holds an old
    p.grad there. The other slots get parts of one new piece.
    """
    sums: dict[Slot, Tensor] = {}
    for slot in slots:
        if slot.buffer is None or slot.segment is None or slot.segment.is_shared():
            continue
        # Two references: the slot's and the argument's.
        if sys.getrefcount(slot.buffer) <= 2 and tensor_references(slot.buffer) == 1:
            sums[slot] = slot.buffer
    lacking = [slot for slot in slots if slot not in sums]
    device, _, dtype = slots[0].lane
    if len(lacking) == 1:
        (slot,) = lacking
        sums[slot] = torch.empty_strided(slot.param.shape, slot.strides, dtype=dtype, device=device)
    elif lacking:
        _, views = cut([(slot.param.shape, slot.strides) for slot in lacking], dtype, device)
        sums.update(zip(lacking, views, strict=True))
    return [sums[slot] for slot in slots]


def _gradient_strides(param: Tensor) -> tuple[int, ...]:
    """Return the strides that autograd gives a gradient (ATen grad_layout_contract.h)."""
    if param.layout is torch.strided and param.is_contiguous():
        return param.stride()
    kept = torch.empty_like(param, device="meta").stride()  # empty_like keeps only dense strides
    return kept if kept == param.stride() else torch.empty(param.shape, device="meta").stride()
