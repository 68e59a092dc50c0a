"""Counts the bytes that a piece of a training program moves, while it runs."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from .. import observers
from .operands import Operand, accumulation, is_metadata, name_of, operands, tensors_in
from .report import Cell, Counts

#: What an operand is. Parameters' own traffic is the first three together.
KINDS = ("weights", "gradients", "optimizer", "other")
#: The phases that are told apart without being named.
PHASES = ("forward", "backward", "accumulate", "update")

_CAST = torch.ops.aten._to_copy.default
_ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"


class TrafficMeter(TorchDispatchMode):
    """Context manager that counts bytes read and written by every operator inside it, ours included.

    Bytes are the compulsory ones: each operand of an operator once, as an ideal kernel would move them. No
    cache between operators helps, temporaries inside one do not count, views and metadata are free, and an
    expanded tensor counts the elements it really has. An operator without a rule is not guessed at: it is in
    `uncounted`, by name. Regions under `torch.compile` run as they are written while the meter is on.

    Each byte has a **phase**: "backward" inside autograd's engine, but "accumulate" where a leaf's gradient
    is cast, stored or added (AccumulateGrad, its hooks and the cast before it, the engine's final callbacks,
    fusedacc's operators); "update" inside an optimizer's `step()` and where gradients are touched outside the
    engine (clipping, unscaling, zeroing); "forward" everything else; or the name given to `phase`.

    And a **kind**: "weights" (leaves that require a gradient), "gradients" (what reaches AccumulateGrad,
    sums, and what is made from them at the update), "optimizer" (its state, and temporaries of `step()`),
    "other" (activations, data). A tensor's kind may show only later: bytes are booked when its memory is
    given to another tensor or the figures are asked for.

    Args:
        parameters: a module, an optimizer or an iterable of tensors: the leaves to know from the beginning.
            Without it a leaf is known from its first use on.

    It may be entered again; counts add up until `reset()`.

    Raises:
        TypeError: `parameters` is none of those.
    """

    def __init__(self, parameters: torch.nn.Module | Optimizer | Iterable[Tensor] | None = None) -> None:
        super().__init__()
        self._lock = threading.RLock()
        self._leaves: dict[int, weakref.ref[Tensor]] = {}
        self._kinds: dict[int, str] = {}
        self._open: dict[int, dict[tuple[str, str, str], list[int]]] = {}
        self._counts = Counts()
        self._named: list[str] = []
        self._observed: list[str] = []
        self._steps = 0
        self._after_backward = False
        self._handles: list[Any] = []
        for leaf in _leaves_of(parameters):
            self._know(leaf)

    # What a user asks for

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Everything inside counts for the phase `name`, whatever it is; the innermost name holds.

        Raises TypeError if `name` is no string, and ValueError if it is empty.
        """
        if not isinstance(name, str):
            raise TypeError(f"name must be a string, got {name!r}")
        if not name:
            raise ValueError("name must not be empty")
        self._named.append(name)
        try:
            yield
        finally:
            self._named.pop()

    @property
    def total_bytes(self) -> int:
        """Bytes read and written so far."""
        return self.counts().total

    @property
    def calls(self) -> int:
        """Operator calls so far that moved data."""
        return sum(self._counts.calls.values())

    @property
    def uncounted(self) -> dict[str, int]:
        """Operators that have no rule, with the number of their calls. Their bytes are in no figure."""
        return dict(self._counts.uncounted)

    def counts(self) -> Counts:
        """A copy of the counts as they stand, every byte with the kind that is known by now."""
        with self._lock:
            copy = self._counts.copy()
            for key, cells in self._open.items():
                copy.book(cells, self._kinds.get(key, "other"))
            return copy

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain numbers.

        Returns:
            `total_bytes`, `read_bytes`, `written_bytes`, `calls`;
            `by_phase`, `by_kind`, `by_device`: bytes by name;
            `by_phase_and_kind`: bytes by kind, in a dict for each phase;
            `by_op`: `calls`, `read_bytes`, `written_bytes` and `total_bytes` of each operator;
            `by_phase_and_op`: the same and `by_kind`, in a dict for each phase;
            `uncounted`: calls by name.
        """
        return self.counts().as_dict()

    def table(self, rows: int = 12) -> str:
        """The figures as text: a block for each phase with its `rows` largest operators.

        Raises ValueError if `rows` is below 1.
        """
        return self.counts().table(rows)

    def to_csv(self, path: str | Path) -> None:
        """Writes one line per phase, operator, kind and device: bytes read and written.

        `calls` is of the operator in the phase, over all kinds and devices. Operators that were not counted
        are in a phase "uncounted", without bytes.
        """
        self.counts().to_csv(Path(path))

    def reset(self) -> None:
        """Back to zero. What is known about tensors is kept."""
        with self._lock:
            self._counts = Counts()
            self._open.clear()

    # What is watched

    def __enter__(self) -> TrafficMeter:
        self._steps = 0
        self._know_gradients()
        self._handles = [
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        ]
        observers.watching.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        observers.watching.remove(self)
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # its own dispatch unwraps it, and what that calls comes here
        if is_metadata(func):
            result = func(*args, **kwargs)
            with self._lock:
                self._see(func, args, kwargs, result)
            return result
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
        if composite:  # under inference_mode; else autograd has taken it apart before
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        with self._lock:
            self._see(func, args, kwargs, result)
            moved = operands(func, args, kwargs, result)
            if moved is None:
                self._counts.uncounted[str(func)] += 1
            else:
                casts = func is _CAST and _is_a_leafs_gradient(result)
                self._book(name_of(func), func.namespace, moved, casts)
        return result

    def launched(
        self,
        kernel: str,
        accumulators: Sequence[Tensor],
        gradients: Sequence[Tensor],
        scale: float | Tensor,
        overwrite: Sequence[bool],
    ) -> None:
        """A kernel of ours was launched outside the dispatcher."""
        with self._lock:
            self._book(kernel, "fusedacc", accumulation(accumulators, gradients, scale, overwrite))

    def enter_phase(self, name: str) -> None:
        """fusedacc says what it does; a name given by the user goes before."""
        self._observed.append(name)

    def leave_phase(self) -> None:
        """The end of `enter_phase`."""
        self._observed.pop()

    # Phases

    def _phase(self, namespace: str, touches_gradients: bool, casts_gradient: bool) -> str:
        named = self._named or self._observed
        if named:
            return named[-1]
        if torch._C._current_graph_task_id() != -1:
            node = torch._C._current_autograd_node()
            accumulates = casts_gradient or node is None or node.name() == _ACCUMULATE_GRAD
            return "accumulate" if accumulates else "backward"
        if self._steps and not torch.is_grad_enabled():
            return "update"
        if namespace == "fusedacc":
            return "accumulate"
        return "update" if touches_gradients else "forward"

    def _step_begins(self, optimizer: Optimizer, *_: Any) -> None:
        with self._lock:
            for leaf in _leaves_of(optimizer):
                self._know(leaf)
            self._know_gradients()
            self._know_state(optimizer)
            self._steps += 1

    def _step_ends(self, optimizer: Optimizer, *_: Any) -> None:
        with self._lock:
            self._know_state(optimizer)
            self._steps = max(0, self._steps - 1)

    # Kinds

    def _know(self, leaf: Tensor) -> None:
        if id(leaf) not in self._leaves or self._leaves[id(leaf)]() is not leaf:
            self._leaves[id(leaf)] = weakref.ref(leaf)
        if leaf.layout is torch.strided:
            self._kinds[_key(leaf)] = "weights"

    def _know_gradients(self) -> None:
        for reference in self._leaves.values():
            leaf = reference()
            gradient = None if leaf is None else leaf.grad
            if gradient is not None and gradient.layout is torch.strided:
                self._kinds.setdefault(_key(gradient), "gradients")

    def _know_state(self, optimizer: Optimizer) -> None:
        for state in list(optimizer.state.values()):
            for tensor in tensors_in(state):
                if tensor.layout is torch.strided:
                    self._kinds[_key(tensor)] = "optimizer"

    def _see(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Learns what tensors are from one call: leaves, fresh memory, gradients that are stored."""
        inside = torch._C._current_graph_task_id() != -1
        if self._after_backward and not inside:
            self._know_gradients()
        self._after_backward = inside
        given = set()
        for tensor in tensors_in(args, kwargs):
            if tensor.layout is not torch.strided:
                continue
            given.add(_key(tensor))
            is_leaf = tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
            if is_leaf or isinstance(tensor, torch.nn.Parameter):
                self._know(tensor)
        for tensor in tensors_in(result):
            if tensor.layout is torch.strided and _key(tensor) not in given:
                self._forget(_key(tensor))
        if inside and is_metadata(func):
            node = torch._C._current_autograd_node()
            if node is not None and node.name() == _ACCUMULATE_GRAD:
                for key in given:  # AccumulateGrad detaches what it stores
                    self._kinds.setdefault(key, "gradients")

    def _forget(self, key: int) -> None:
        """The memory is another tensor's now: books what its last owner moved."""
        kind = self._kinds.pop(key, "other")
        cells = self._open.pop(key, None)
        if cells:
            self._counts.book(cells, kind)

    def _book(self, op: str, namespace: str, moved: Sequence[Operand], casts_gradient: bool = False) -> None:
        keys = [None if operand.tensor is None else _key(operand.tensor) for operand in moved]
        touches = any(key is None or self._kinds.get(key) == "gradients" for key in keys)
        phase = self._phase(namespace, touches, casts_gradient)
        self._counts.calls[phase, op] += 1
        for key, operand in zip(keys, moved, strict=True):
            if key is None:
                cell = Cell(operand.read, operand.written)
                self._counts.add(phase, op, "gradients", operand.device, cell)
                continue
            if phase == "accumulate" or (touches and phase != "forward" and phase != "backward"):
                self._kinds.setdefault(key, "gradients")
            elif phase == "update":
                self._kinds.setdefault(key, "optimizer")
            assert operand.tensor is not None
            where = phase, op, str(operand.tensor.device)
            sums = self._open.setdefault(key, {}).setdefault(where, [0, 0])
            sums[0] += operand.read
            sums[1] += operand.written


def _is_a_leafs_gradient(result: Tensor) -> bool:
    """Whether a cast inside the engine makes a gradient that goes to AccumulateGrad next.

    Autograd casts so for `grad_dtype` and for parameters that autocast has cast.
    """
    node: Any = torch._C._current_autograd_node()
    if torch._C._current_graph_task_id() == -1 or node is None:
        return False
    following = [function for function, _ in node.next_functions if function is not None]
    leaves = [function.variable for function in following if function.name() == _ACCUMULATE_GRAD]
    return any(leaf.shape == result.shape for leaf in leaves)


def _key(tensor: Tensor) -> int:
    """The tensor's memory, as long as it lives."""
    return tensor.untyped_storage()._cdata


def _leaves_of(parameters: Any) -> list[Tensor]:
    if parameters is None:
        return []
    if isinstance(parameters, torch.nn.Module):
        return list(parameters.parameters())
    if isinstance(parameters, Optimizer):
        return [parameter for group in parameters.param_groups for parameter in group["params"]]
    allowed = "a torch.nn.Module, a torch.optim.Optimizer or an iterable of tensors"
    if isinstance(parameters, Tensor) or not isinstance(parameters, Iterable):
        raise TypeError(f"parameters must be {allowed}, got {type(parameters).__name__}")
    leaves = list(parameters)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"parameters must be {allowed}; it holds {type(leaf).__name__}")
    return leaves
