"""The record of one parameter: its accumulator and its memory, its dtypes, and the state of its p.grad."""

from __future__ import annotations

import enum
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..kernels import checks, native_module, registry, torch_state
from ..kernels.dtypes import PAIRS, default_accumulate_dtype
from ..kernels.local_parts import local
from ..kernels.tensor_identity import TensorIdentity

#: Views in a segment start at multiples of this many bytes: a cache line, and the widest vector load.
ALIGNMENT = 128
#: References to the C++ tensor. Python's count as one. torch's type stubs lack it.
tensor_references: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]


class Segment:
    """The memory of a bucket of accumulators that are all-reduced together. buffers: the number of its views
    that belong to the bucket.
    """

    def __init__(self, memory: Tensor, buffers: int) -> None:
        self.memory = memory
        self.buffers = buffers

    def is_shared(self) -> bool:
        """Whether another tensor shares the memory: a user may still hold an old p.grad, or a part of it."""
        return storage_users(self.memory) > self.buffers + 1


def storage_users(tensor: Tensor) -> int:
    """Return how many tensors share the memory of this one, itself included. A program that keeps the object
    `untyped_storage()` counts as one more.
    """
    storage = tensor.untyped_storage()
    kept = sys.getrefcount(storage) > _references_to_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1 + kept  # less the object just made


@functools.cache
def _references_to_storage() -> int:
    """Return what `storage_users` counts where nothing else has the object. torch releases differ."""
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


def owns_memory(tensor: Tensor) -> bool:
    """Whether only the tensor, and the base that it is a view of, use its memory."""
    users = storage_users(tensor)
    if tensor._base is None:
        return users == 1
    # For a fake view of a view torch also keeps the tensor in between, as in a product's transposed gradient.
    return users == 2 or (users == 3 and type(tensor) is FakeTensor)


def _count_references(tensors: list[Tensor], index: int) -> int:
    tensor = tensors[index]
    return sys.getrefcount(tensor)


def _count_base_references(view: Tensor) -> int:
    base = view._base
    return sys.getrefcount(base)


#: References to an entry of a list in a function: the list's, the variable's and the argument's.
_PICKED = _count_references([torch.empty(0)], 0)
#: References to the base of a view. Some torch releases count one reference from C++.
_PICKED_BASE = _count_base_references(torch.empty(2)[:1])


def is_sole(gradients: list[Tensor], index: int) -> bool:
    """Whether only the list refers to a gradient and its memory, so that it may become an accumulator.

    This is stricter than AccumulateGrad, which counts the tensor's references only and can give the same
    memory to two parameters (two views of one gradient). A view keeps its base alive, so the base must have
    no other user. A gradient with a graph or a lazy negation never qualifies.
    """
    gradient = gradients[index]
    if gradient.requires_grad or gradient.is_neg() or gradient._is_zerotensor():
        return False
    if sys.getrefcount(gradient) > _PICKED or tensor_references(gradient) != 1:
        return False
    base = gradient._base
    if base is None:
        return owns_memory(gradient)
    # The view and this variable refer to the base; every fake view refers to it twice.
    fake = type(gradient) is FakeTensor
    known = 2 * storage_users(gradient) - 1 if fake else 2
    sole = sys.getrefcount(base) <= _PICKED_BASE and tensor_references(base) == known
    return sole and owns_memory(gradient)


def cut(
    layouts: Sequence[tuple[torch.Size, Sequence[int]]], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Allocate one piece of uninitialised memory, and return it with views of these shapes and strides."""
    unit = ALIGNMENT // dtype.itemsize
    offsets = [0, *itertools.accumulate(-(-shape.numel() // unit) * unit for shape, _ in layouts)]
    memory = torch.empty(offsets[-1], dtype=dtype, device=device)
    views = [
        memory.as_strided(shape, strides, offset)
        for (shape, strides), offset in zip(layouts, offsets, strict=False)
    ]
    return memory, views


def bytes_of(accumulator: Tensor) -> int:
    """Return the bytes of this rank's part of a dense or sparse tensor."""
    part = local(accumulator)
    return part._values().nbytes + part._indices().nbytes if part.is_sparse else part.nbytes


def like(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return uninitialised tensors of another dtype, with the shapes, layouts and device of `tensors`."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        return [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    return cut([(tensor.shape, tensor.stride()) for tensor in tensors], dtype, tensors[0].device)[1]


#: (device, gradient dtype, accumulate dtype). One kernel launch handles tensors of one lane.
Lane = tuple[torch.device, torch.dtype, torch.dtype]
#: Every lane seen so far, with its key. Slots of a lane share the tuple.
_lanes: dict[Lane, tuple[Lane, int]] = {}


def nothing() -> None:
    """Return None, as a dead weak reference does."""


class GradState(enum.Enum):
    """What `p.grad` holds, and so where the accumulator is. Only `p_grad.py` changes it, and native code in
    its place (`SumRecords` in csrc/autograd/records.cpp).
    """

    #: fusedacc has not put anything into `p.grad`: it is None, or autograd or the user has set it. Counted
    #: loop: it is a gradient that has not been added yet, and the accumulator is private. Manual loop: it is
    #: the accumulator.
    NOT_OURS = enum.auto()
    #: `p.grad` is the accumulator, or after an update the gradient that the update has used. A tensor that
    #: the user assigns becomes the accumulator until the window ends.
    PUBLISHED = enum.auto()
    #: `p.grad` is a copy of the accumulator in the slot's `update_dtype`, for an update. The accumulator is
    #: private, or was dropped if only the copy was scaled.
    DTYPE_COPY = enum.auto()
    #: Manual loop: `p.grad` is None, or the gradient that autograd has stored for the current micro-batch. It
    #: must be scaled before it is added. The accumulator is private.
    AUTOGRAD_PENDING = enum.auto()
    #: `p.grad` was left by a backward pass inside `ignore()` and does not count. The accumulator is private
    #: in a counted loop; a manual loop has none. A tensor that the user assigns is treated as in NOT_OURS.
    IGNORED = enum.auto()


class Path(str, enum.Enum):
    """How a parameter's gradient reaches its accumulator; `explain()` has a table with an entry for each."""

    #: A module adds inside its backward pass: a Linear's product, experts' products, the rows that an
    #: Embedding looked up, or the slices of a language model's head.
    GEMM = "gemm"
    GROUPED = "grouped"
    EMBEDDING = "embedding"
    HEAD = "head"
    #: One launch for many gradients; FSDP2: the same for the shards' gradients.
    MULTI_TENSOR = "multi_tensor"
    FSDP2 = "fsdp2"
    #: Autograd or plain torch adds.
    EAGER = "eager"
    #: No gradient has come.
    NONE = "none"


#: The paths on which modules add, and those on which a module writes the whole accumulator.
MODULE_PATHS = (Path.GEMM, Path.GROUPED, Path.EMBEDDING, Path.HEAD)
PRODUCT_PATHS = ((Path.GEMM,), (Path.GROUPED,))


def check_backend(lane: Lane, backend: str) -> None:
    """Raise RuntimeError unless the backend supports a lane's dtypes and device and passes its self-test."""
    device, gradient, accumulator = lane
    # A gradient into the accumulator, the accumulator scaled in place, and its cast into p.grad.
    for source, target in ((gradient, accumulator), (accumulator, accumulator), (accumulator, gradient)):
        if (source, target) in PAIRS:
            registry.select(device, target, source, backend)


@dataclass(slots=True, eq=False)
class Slot:
    """One parameter of the wrapped optimizer."""

    param: Tensor
    group: int
    name: str
    #: The accumulate dtype that the user asked for; None for the default.
    requested_dtype: torch.dtype | None
    #: The parameter's number and that of its last addition, see Note [Streams] in noise.py.
    number: int = 0
    addition: int = -1
    #: The private accumulator; None before the first gradient, and while p.grad is the accumulator.
    accumulator: Tensor | None = None
    #: The part of a bucket that is all-reduced, and the bucket's memory; None without a bucket.
    buffer: Tensor | None = None
    segment: Segment | None = None
    #: Whether the accumulator must be in a reduce bucket, whatever its dtype.
    in_reduce_bucket: bool = False
    #: The accumulator that a module may add to without further checks.
    writable: TensorIdentity | None = None
    #: Whether code outside the wrapper may reduce the gradients over ranks: False with `data_parallel=`.
    may_be_reduced_outside: bool = True
    #: The state of p.grad; the tensor last put there, and its version at that time.
    grad_state: GradState = GradState.NOT_OURS
    placed: TensorIdentity | None = None
    placed_version: int = 0
    #: The bytes of a sparse accumulator in p.grad; None if it is dense. Only valid in the
    #: state PUBLISHED.
    sparse_bytes: int | None = None
    #: Rows of the sparse sum after its last addition. The next window's sum is likely to get as many.
    num_rows: int = 0
    #: Whether `grad_dtype` was set to None, and its value before.
    widened: bool = False
    cleared_grad_dtype: torch.dtype | None = None
    #: The `MODULE_PATHS` on which modules of the model add, and why a module that could add does not.
    paths: tuple[str, ...] = ()
    left_to: str = ""
    #: Whether an operator of fusedacc in a compiled graph has delivered a gradient.
    compiled: bool = False
    #: Why a compiled graph computes PyTorch's own gradient; "" where it has an operator of fusedacc.
    left_to_compiler: str = ""
    #: Whether a module of the model keeps its autocast cast for a whole window.
    keeps_cast: bool = False
    #: The parameter as the hook registry last saw it. While this is unchanged, its AccumulateGrad node is the
    #: same and the accumulator fits.
    seen: tuple | None = None
    #: Whether the gradients are large (`LARGE_BYTES` in autograd/python_hooks.py). Each one is then added
    #: immediately, unless it may become the accumulator.
    is_large: bool = False
    #: The native hook on the parameter's node, where there is one.
    native_hook: Any = None
    #: Whether FSDP2, not autograd, puts the gradients into p.grad.
    sharded: bool = False
    #: The stream on which a module added last in this backward pass; 0 for the default stream.
    writer_stream: int | None = None
    #: Whether only plain torch can add: for complex dtypes, and after a sparse gradient or a tensor subclass.
    needs_eager: bool = field(init=False)
    #: The lane of the parameter as it is now. The key is a small number, cheaper to hash than the lane.
    lane: Lane = field(init=False)
    lane_key: int = field(init=False)
    on_cuda: bool = field(init=False)
    nbytes: int = field(init=False)
    #: The number of elements of the parameter, or of its shard on this rank.
    local_numel: int = field(init=False)
    shape: torch.Size = field(init=False)
    strides: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.describe()

    def is_reduced_outside(self) -> bool:
        """Whether code outside the wrapper reduces the gradient over ranks, and reads p.grad to do so.

        DistributedDataParallel, FSDP1 and the reducers of Megatron, Apex and DeepSpeed do so in post-hooks of
        the AccumulateGrad node. Only native code can see these. Without it, any process group counts as one.
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
        """Read the parameter's dtype, device and layout."""
        param = self.param
        dtype = self.requested_dtype
        if dtype is None or (param.dtype, dtype) not in PAIRS:
            dtype = default_accumulate_dtype(param)
        lane = param.device, param.dtype, dtype
        self.lane, self.lane_key = _lanes.setdefault(lane, (lane, len(_lanes) + 1))
        self.on_cuda = param.is_cuda
        self.set_needs_eager((param.dtype, dtype) not in PAIRS)
        self.nbytes = param.numel() * param.element_size()
        self.local_numel = local(param).numel()
        self.shape = param.shape
        self.strides = _gradient_strides(param)

    def set_needs_eager(self, needs_eager: bool) -> None:
        """Set `needs_eager` here and in the native hook."""
        self.needs_eager = needs_eager
        if self.native_hook is not None:
            self.native_hook.needs_eager = needs_eager

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
            if param.grad_dtype is None:  # else the user has set it since
                param.grad_dtype = self.cleared_grad_dtype
            if gradient is not None:
                param.grad = gradient.to(param.grad_dtype or gradient.dtype)

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
        if self.grad_state is not GradState.PUBLISHED:
            return 0
        if self.sparse_bytes is not None:
            return self.sparse_bytes
        return self.local_numel * self.accumulate_dtype.itemsize

    def may_publish(self) -> bool:
        """Whether autograd accepts the accumulator as p.grad."""
        return self.grad_dtype in (None, self.lane[2])

    def is_placed(self, gradient: Tensor | None) -> bool:
        """Whether this is the tensor that fusedacc last put into p.grad."""
        placed = self.placed
        return placed is not None and gradient is not None and placed.refers_to(gradient)

    def is_foreign(self, gradient: Tensor) -> bool:
        """Whether autograd or the user put this gradient into p.grad, and it counts."""
        state = self.grad_state
        if state is GradState.NOT_OURS or state is GradState.AUTOGRAD_PENDING:
            return True
        return state is not GradState.PUBLISHED and not self.is_placed(gradient)

    def is_ignored(self) -> bool:
        """Whether p.grad holds a gradient that does not count."""
        return self.grad_state is GradState.IGNORED and self.is_placed(self.param.grad)

    def fits(self, accumulator: Tensor | None) -> bool:
        """Whether the kernel supports this accumulator, which the user may have assigned to p.grad."""
        if accumulator is None or not checks.is_plain(accumulator):
            return False
        device, _, dtype = self.lane
        return accumulator.dtype == dtype and accumulator.device == device

    def obeys_layout(self, gradient: Tensor) -> bool:
        """Whether a gradient has the strides that p.grad needs; dimensions of size 1 do not matter."""
        strides = gradient.stride()
        return strides == self.strides or all(
            size == 1 or have == want
            for size, have, want in zip(gradient.shape, strides, self.strides, strict=True)
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
