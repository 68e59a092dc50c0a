"""Counts the bytes that a piece of a training program moves, while it runs."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)

from ..kernels import launch_events
from .operands import (
    Operand,
    is_metadata,
    is_view,
    launch_operands,
    name_of,
    operands,
    tensors_in,
)
from .report import Cell, Counts
from .threads import Threads

#: What an operand is. Parameters' own traffic is the first three together.
KINDS = ("weights", "gradients", "optimizer", "other")
#: The phases that are told apart without being named.
PHASES = ("forward", "backward", "accumulate", "update")

_CAST = torch.ops.aten._to_copy.default
_ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"
_COMPILED = "CompiledFunctionBackward"


class TrafficMeter(TorchDispatchMode):
    """Context manager that counts bytes read and written by every operator inside it, ours included.

    Bytes are the compulsory ones: each operand of an operator once, as an ideal kernel would move them. No
    cache between operators helps, temporaries inside one do not count, views and metadata are free, and an
    expanded tensor counts the elements it really has. An operator without a rule is not guessed at: it is in
    `uncounted`, by name. Regions under `torch.compile` run as they are written while the meter is on; the
    backward of a forward that ran compiled before is in `uncounted`, and `fullgraph=True` torch refuses then.

    Counted is the thread that has entered the meter, with the backwards that it calls, wherever they run.
    Other threads are in `uncounted_threads`: enter a meter of its own in each.

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
        #: The memories that tensors have, by address, and the addresses whose memory has gone.
        self._memories: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._gone: deque[int] = deque()
        self._kinds: dict[int, str] = {}
        self._open: dict[int, dict[tuple[str, str, str], list[int]]] = {}
        self._counts = Counts()
        self._threads = Threads()
        self._named: list[str] = []
        #: What fusedacc says that it does, by thread.
        self._observed: dict[int, list[str]] = {}
        #: Steps of optimizers that run: thread, graph task and Python frame.
        self._steps: list[tuple[int, int, Any]] = []
        self._compiled = ""
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

    @property
    def uncounted_threads(self) -> list[str]:
        """Names of the Python threads that were alive while the meter was on, and whose operators it did not
        see, if they ran any."""
        return self._threads.unseen()

    def counts(self) -> Counts:
        """A copy of the counts as they stand, every byte with the kind that is known by now."""
        with self._lock:
            self._forget_the_gone()
            copy = self._counts.copy()
            copy.threads = self.uncounted_threads
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
            `uncounted`: calls by name; `uncounted_threads`: names.
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
        are in a phase "uncounted", without bytes, and so are threads, by name and without calls.
        """
        self.counts().to_csv(Path(path))

    def reset(self) -> None:
        """Back to zero. What is known about tensors is kept."""
        with self._lock:
            self._counts = Counts()
            self._open.clear()
            self._threads.clear()

    # What is watched

    supports_higher_order_operators = True

    def __enter__(self) -> TrafficMeter:
        if self in launch_events.watching:
            raise RuntimeError("this TrafficMeter is on already: enter another one, or name a phase")
        self._know_gradients()
        self._threads.begin()
        self._handles = [
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        ]
        launch_events.watching.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        launch_events.watching.remove(self)
        self._threads.end()
        self._steps.clear()
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._threads.saw()
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # its own dispatch unwraps it, and what that calls comes here
        if not isinstance(func, OpOverload):  # a higher-order operator
            self._counts.uncounted[str(func)] += 1
            return func(*args, **kwargs)
        free = is_metadata(func)
        if not free and _is_composite(func):  # under inference_mode; else autograd has taken it apart before
            super().__enter__()
            try:
                return func.decompose(*args, **kwargs)
            finally:
                super().__exit__(None, None, None)
        result = func(*args, **kwargs)
        with self._lock:
            self._see(func, args, kwargs)
            if free or is_view(func):
                return result
            moved = operands(func, args, kwargs, result)
            if moved is None:
                self._counts.uncounted[str(func)] += 1
            else:
                casts = func is _CAST and self._is_a_leafs_gradient(args[0], result)
                self._book(name_of(func), func.namespace, moved, casts)
        return result

    def launched(self, kernel: str, *operands: Any) -> None:
        """A kernel of ours was launched outside the dispatcher."""
        if not self._is_on():
            return  # of another thread, whose operators are not counted either
        moved = launch_operands(kernel, *operands)
        with self._lock:
            if moved is None:
                self._counts.uncounted[kernel] += 1
            else:
                self._book(kernel, "fusedacc", moved)

    def _is_on(self) -> bool:
        """Whether this thread's operators are counted."""
        return self in _get_current_dispatch_mode_stack()

    def enter_phase(self, name: str) -> None:
        """fusedacc says what it does; a name given by the user goes before."""
        self._observed.setdefault(threading.get_ident(), []).append(name)

    def leave_phase(self) -> None:
        """The end of `enter_phase`."""
        thread = threading.get_ident()
        self._observed[thread].pop()
        if not self._observed[thread]:
            del self._observed[thread]

    # Phases

    def _automatic(self, namespace: str, touches_gradients: bool, casts_gradient: bool) -> str:
        """The phase, whatever name the user has given it."""
        if threading.get_ident() in self._observed:
            return self._observed[threading.get_ident()][-1]
        task = torch._C._current_graph_task_id()
        if self._in_step(task):
            return "update"
        if task != -1:
            node = torch._C._current_autograd_node()
            accumulates = casts_gradient or node is None or node.name() == _ACCUMULATE_GRAD
            return "accumulate" if accumulates else "backward"
        if namespace == "fusedacc":
            return "accumulate"
        return "update" if touches_gradients else "forward"

    def _in_step(self, task: int) -> bool:
        """Whether an optimizer's step is at work here, and not a closure or a backward that it has called."""
        while self._steps:
            thread, began_in, frame = self._steps[-1]
            if thread != threading.get_ident():
                return False
            if _on_stack(frame):
                return began_in == task and not torch.is_grad_enabled()
            self._steps.pop()  # an exception has ended it
        return False

    def _step_begins(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._is_on():
            return
        with self._lock:
            for leaf in _leaves_of(optimizer):
                self._know(leaf)
            self._know_gradients()
            self._know_state(optimizer)
            task = torch._C._current_graph_task_id()
            self._steps.append((threading.get_ident(), task, sys._getframe(1)))

    def _step_ends(self, optimizer: Optimizer, *_: Any) -> None:
        with self._lock:
            self._know_state(optimizer)
            if self._steps and self._steps[-1][0] == threading.get_ident():
                self._steps.pop()

    # Kinds

    def _key(self, tensor: Tensor) -> int:
        """The tensor's memory, by an address that may have been another's before."""
        self._forget_the_gone()
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memories:
            self._memories[key] = weakref.ref(storage, functools.partial(_append, self._gone, key))
        return key

    def _forget_the_gone(self) -> None:
        """Books what memory that is gone has moved, with the kind that it had."""
        while self._gone:
            key = self._gone.popleft()
            self._memories.pop(key, None)
            self._counts.book(self._open.pop(key, {}), self._kinds.pop(key, "other"))
            if len(self._leaves) > 2 * len(self._memories):
                self._leaves = {name: leaf for name, leaf in self._leaves.items() if leaf() is not None}

    def _know(self, leaf: Tensor) -> None:
        if id(leaf) not in self._leaves or self._leaves[id(leaf)]() is not leaf:
            self._leaves[id(leaf)] = weakref.ref(leaf)
        for part in _plain_parts(leaf):
            self._kinds[self._key(part)] = "weights"

    def _know_gradients(self) -> None:
        for reference in list(self._leaves.values()):
            leaf = reference()
            gradient = leaf.grad if leaf is not None and leaf.is_leaf else None
            for part in _plain_parts(gradient):
                self._kinds.setdefault(self._key(part), "gradients")

    def _know_state(self, optimizer: Optimizer) -> None:
        for state in list(optimizer.state.values()):
            for tensor in tensors_in(state):
                for part in _plain_parts(tensor):
                    self._kinds[self._key(part)] = "optimizer"

    def _see(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Learns what tensors are from one call: leaves, and gradients that are stored."""
        task = torch._C._current_graph_task_id()
        if self._after_backward and task == -1:
            self._know_gradients()
        self._after_backward = task != -1
        node = torch._C._current_autograd_node() if task != -1 else None
        if node is not None and _COMPILED in node.name() and self._compiled != f"{task} {node.name()}":
            self._compiled = f"{task} {node.name()}"
            self._counts.uncounted[node.name()] += 1
        stores = node is not None and node.name() == _ACCUMULATE_GRAD and is_metadata(func)
        for tensor in tensors_in(args, kwargs):
            is_leaf = tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
            if is_leaf or isinstance(tensor, torch.nn.Parameter):
                self._know(tensor)
            if stores:  # AccumulateGrad detaches what it stores
                for part in _plain_parts(tensor):
                    self._kinds.setdefault(self._key(part), "gradients")

    def _is_a_leafs_gradient(self, source: Tensor, result: Tensor) -> bool:
        """Whether a cast inside the engine makes a gradient that goes to AccumulateGrad next.

        Autograd casts so for `grad_dtype` and for parameters that autocast has cast.
        """
        node: Any = torch._C._current_autograd_node()
        if torch._C._current_graph_task_id() == -1 or node is None:
            return False
        if self._kinds.get(self._key(source)) == "weights":
            return False
        following = [function for function, _ in node.next_functions if function is not None]
        leaves = [function.variable for function in following if function.name() == _ACCUMULATE_GRAD]
        return any(leaf.shape == result.shape and _grad_dtype(leaf) == result.dtype for leaf in leaves)

    def _book(self, op: str, namespace: str, moved: Sequence[Operand], casts_gradient: bool = False) -> None:
        keys = [None if operand.tensor is None else self._key(operand.tensor) for operand in moved]
        touches = any(key is None or self._kinds.get(key) == "gradients" for key in keys)
        automatic = self._automatic(namespace, touches, casts_gradient)
        phase = self._named[-1] if self._named else automatic
        self._counts.calls[phase, op] += 1
        for key, operand in zip(keys, moved, strict=True):
            if key is None:
                cell = Cell(operand.read, operand.written)
                self._counts.add(phase, op, "gradients", operand.device, cell)
                continue
            if automatic == "accumulate" or (touches and automatic not in ("forward", "backward")):
                self._kinds.setdefault(key, "gradients")
            elif automatic == "update":
                self._kinds.setdefault(key, "optimizer")
            assert operand.tensor is not None
            where = phase, op, str(operand.tensor.device)
            sums = self._open.setdefault(key, {}).setdefault(where, [0, 0])
            sums[0] += operand.read
            sums[1] += operand.written


def _is_composite(func: OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _append(gone: deque[int], key: int, _: object) -> None:
    gone.append(key)


def _on_stack(frame: Any) -> bool:
    above: Any = sys._getframe(1)
    while above is not None and above is not frame:
        above = above.f_back
    return above is frame


def _grad_dtype(leaf: Tensor) -> torch.dtype:
    return getattr(leaf, "grad_dtype", None) or leaf.dtype


def _plain_parts(tensor: Any) -> Iterator[Tensor]:
    """The tensors with memory of their own that a tensor is made of: itself, or those that it wraps."""
    if tensor is None:
        return
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _plain_parts(getattr(tensor, name))
    elif tensor.layout is torch.strided and not tensor.is_nested:
        yield tensor


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
