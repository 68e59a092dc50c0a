"""Count the bytes that a piece of a training program moves while it runs."""

from __future__ import annotations

import contextlib
import copy
import csv
import functools
import inspect
import sys
import threading
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from ..kernels import launch_events
from ..kernels.local_parts import is_distributed, local
from ..kernels.torch_private import (
    OpOverload,
    TorchDispatchMode,
    current_graph_task,
    current_node,
    dispatch_modes,
    has_kernel,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from .rules import LAUNCHES, Operand, is_metadata, is_view, name_of, operands_of, tensors_in

NOTE = "compulsory bytes: each operand of an operator once"
COLUMNS = ("phase", "op", "kind", "device", "calls", "read_bytes", "written_bytes")


class Cell(NamedTuple):
    """Bytes read and written."""

    read: int = 0
    written: int = 0

    @property
    def total(self) -> int:
        return self.read + self.written

    def plus(self, other: Cell) -> Cell:
        return Cell(self.read + other.read, self.written + other.written)


class Place(NamedTuple):
    """What bytes are counted by."""

    phase: str
    op: str
    kind: str
    device: str


@dataclass
class Counts:
    """Bytes by place, calls by (phase, operator), and operators and threads that were not counted."""

    cells: dict[Place, Cell] = field(default_factory=dict)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    uncounted: Counter[str] = field(default_factory=Counter)
    threads: list[str] = field(default_factory=list)


def _sum(cells: Mapping[Place, Cell]) -> Cell:
    return functools.reduce(Cell.plus, cells.values(), Cell())


def _split(cells: Mapping[Place, Cell], name: str) -> dict[str, dict[Place, Cell]]:
    """Split cells by phase, operator, kind or device, the largest part first."""
    parts: dict[str, dict[Place, Cell]] = {}
    for place, cell in cells.items():
        parts.setdefault(getattr(place, name), {})[place] = cell
    return dict(sorted(parts.items(), key=lambda part: -_sum(part[1]).total))


def _totals(cells: Mapping[Place, Cell], name: str) -> dict[str, int]:
    return {value: _sum(part).total for value, part in _split(cells, name).items()}


def _figures(cells: Mapping[Place, Cell], calls: int) -> dict[str, int]:
    read, written = _sum(cells)
    return {"calls": calls, "read_bytes": read, "written_bytes": written, "total_bytes": read + written}


def _share(part: int, total: int) -> str:
    return f"{part / total:.1%}" if total else "-"


def _line(name: str, calls: int, cells: Mapping[Place, Cell], total: int) -> str:
    cell = _sum(cells)
    megabytes = (f"{size / 1e6:>12.3f}" for size in (*cell, cell.total))
    return f"{name:<52}{calls:>8}{''.join(megabytes)}{_share(cell.total, total):>8}"


@dataclass
class Memory:
    """A storage: its kind, once known, and its bytes by phase, operator and device."""

    reference: weakref.ref[torch.UntypedStorage] | None = None
    kind: str | None = None
    cells: dict[tuple[str, str, str], Cell] = field(default_factory=dict)

    def book(self, counts: Counts) -> None:
        for (phase, op, device), cell in self.cells.items():
            place = Place(phase, op, self.kind or "other", device)
            counts.cells[place] = counts.cells.get(place, Cell()).plus(cell)


class Ledger:
    """Bytes of storages. Their kind is read only when a storage is freed or the figures are requested."""

    def __init__(self) -> None:
        self.counts = Counts()
        self._leaves = WeakTensorKeyDictionary()
        #: Storages by address, and the addresses of freed ones. Address 0: sums that no tensor refers to.
        self._memories = {0: Memory(kind="gradients")}
        self._freed: deque[int] = deque()

    def memory(self, tensor: Tensor | None) -> Memory:
        """Return the tensor's storage; for None, the one of all sums without a tensor."""
        self._close_freed()
        if tensor is None:
            return self._memories[0]
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memories:
            freed = self._freed
            self._memories[key] = Memory(weakref.ref(storage, lambda _: freed.append(key)))
        return self._memories[key]

    def snapshot(self) -> Counts:
        """Return a copy of the counts. Each byte has the kind known so far."""
        self._close_freed()
        counts = copy.deepcopy(self.counts)
        for memory in self._memories.values():
            memory.book(counts)
        return counts

    def reset(self) -> None:
        """Set the counts to zero. What is known about tensors is kept."""
        self.counts = Counts()
        for memory in self._memories.values():
            memory.cells.clear()

    def _close_freed(self) -> None:
        while self._freed:
            self._memories.pop(self._freed.popleft()).book(self.counts)

    # What tensors are

    def know(self, leaf: Tensor) -> None:
        """Record a leaf that requires a gradient: its memory holds weights."""
        self._leaves[leaf] = None
        self.mark(leaf, "weights")

    def mark(self, tensor: Tensor | None, kind: str) -> None:
        """Set the kind of a tensor's memory. It becomes "gradients" only if it has no kind yet."""
        for part in _plain_parts(tensor):
            memory = self.memory(part)
            if memory.kind is None or kind != "gradients":
                memory.kind = kind

    def know_gradients(self) -> None:
        for leaf in list(self._leaves):
            self.mark(leaf.grad if leaf.is_leaf else None, "gradients")

    def know_state(self, optimizer: Optimizer) -> None:
        for tensor in tensors_in(*optimizer.state.values()):
            self.mark(tensor, "optimizer")


def leaves_of(parameters: Any) -> list[Tensor]:
    """Return the tensors of a module, an optimizer or an iterable; raise TypeError for anything else."""
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


def _plain_parts(tensor: Any) -> Iterator[Tensor]:
    """Yield the tensors with their own memory: the tensor itself, or those that it wraps."""
    if tensor is None:
        return
    if is_distributed(tensor):  # its mesh is among the flattened parts
        yield from _plain_parts(local(tensor))
    elif is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _plain_parts(getattr(tensor, name))
    elif tensor.layout is torch.strided and not tensor.is_nested:
        yield tensor


ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"


def goes_to_a_leaf(result: Tensor) -> bool:
    """Return whether this result of the engine is a gradient that goes to AccumulateGrad next.

    Autograd makes such casts for `grad_dtype` and for parameters cast by autocast.
    """
    node: Any = current_node()
    if current_graph_task() == -1 or node is None:
        return False
    following = [function for function, _ in node.next_functions if function is not None]
    leaves = [function.variable for function in following if function.name() == ACCUMULATE_GRAD]
    alike = [leaf for leaf in leaves if leaf.shape == result.shape]
    return any((getattr(leaf, "grad_dtype", None) or leaf.dtype) == result.dtype for leaf in alike)


class RunningStep(NamedTuple):
    """A running `step()` of an optimizer."""

    thread: int
    graph_task: int
    #: A frame that is on the stack until the step ends.
    frame: Any


_CAST = torch.ops.aten._to_copy.default
_COMPILED = "CompiledFunctionBackward"


class TrafficMeter(TorchDispatchMode):
    """Context manager that counts the bytes read and written by every operator inside it.

    It counts compulsory bytes: each operand of an operator once, as an ideal kernel would move them. Caches
    between operators and temporaries inside one do not count, views and metadata are free, and an expanded
    tensor counts the elements that it really has. An operator without a rule is listed in `uncounted`, by
    name. `torch.compile` regions run uncompiled while the meter is on. The backward of a forward that ran
    compiled before is in `uncounted`; with `fullgraph=True` torch raises.

    The meter counts the thread that entered it and the backwards that this thread calls, wherever they run.
    Other threads are in `uncounted_threads`: enter another meter in each.

    Each byte has a **phase**. "backward": inside autograd's engine. "accumulate": where a leaf's gradient is
    cast, stored or added (AccumulateGrad, its hooks and the cast before it, the engine's final callbacks,
    fusedacc's operators). "update": inside an optimizer's `step()`, and where gradients are used outside the
    engine (clipping, unscaling, zeroing). "reduce": where the ranks' parts of FSDP2's gradients are added, if
    fusedacc does it. "forward": everything else. Or the name given to `phase`.

    Each byte has a **kind**. "weights": leaves that require a gradient. "gradients": what reaches
    AccumulateGrad, sums, and what the update makes from them. "optimizer": its state, and temporaries of
    `step()`. "other": activations and data. A tensor's kind may become known only later, so bytes are
    assigned when its memory is freed or the figures are requested.

    Counts add up when a meter is entered again, until `reset()`.

    Args:
        parameters: a module, an optimizer or an iterable of tensors: the leaves to know from the beginning.
            Without it, a leaf is known from its first use.

    Raises:
        TypeError: `parameters` is none of those.
    """

    def __init__(self, parameters: torch.nn.Module | Optimizer | Iterable[Tensor] | None = None) -> None:
        super().__init__()
        self._lock = threading.RLock()
        self._ledger = Ledger()
        self._threads = Threads()
        #: Phases that the user has named, the innermost last. They apply to all threads.
        self._named: list[str] = []
        #: Phases that fusedacc reports, by thread.
        self._observed = threading.local()
        self._steps: list[RunningStep] = []
        self._compiled = ""
        self._after_backward = False
        self._handles: list[Any] = []
        for leaf in leaves_of([] if parameters is None else parameters):
            self._ledger.know(leaf)

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Context: count everything inside for the phase `name`. The innermost name wins.

        Raises:
            TypeError: `name` is not a string.
            ValueError: `name` is empty.
        """
        if not isinstance(name, str):
            raise TypeError(f"name must be a string, got {name!r}")
        if not name:
            raise ValueError("name must not be empty")
        return _pushed(self._named, name)

    @property
    def total_bytes(self) -> int:
        """Bytes read and written so far."""
        return _sum(self.counts().cells).total

    @property
    def calls(self) -> int:
        """Operator calls so far that moved data."""
        return sum(self._ledger.counts.calls.values())

    @property
    def uncounted(self) -> dict[str, int]:
        """Operators without a rule, and their numbers of calls. Their bytes are in no figure."""
        return dict(self._ledger.counts.uncounted)

    @property
    def uncounted_threads(self) -> list[str]:
        """Names of Python threads that were alive while the meter was on, and in which it saw no operator."""
        return self._threads.unseen()

    def counts(self) -> Counts:
        """Return a copy of the counts. Each byte has the kind known so far."""
        with self._lock:
            counts = self._ledger.snapshot()
            counts.threads = self.uncounted_threads
            return counts

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain numbers.

        Returns:
            `total_bytes`, `read_bytes`, `written_bytes`, `calls`;
            `by_phase`, `by_kind`, `by_device`: bytes by name;
            `by_phase_and_kind`: bytes by kind, in a dict for each phase;
            `by_op`: `calls`, `read_bytes`, `written_bytes` and `total_bytes` of each operator;
            `by_phase_and_op`: the same and `by_kind`, in a dict for each phase;
            `uncounted`: calls by name; `uncounted_threads`: names.
        """
        counts = self.counts()
        calls: Counter[str] = Counter()
        for (_, op), count in counts.calls.items():
            calls[op] += count
        phases = _split(counts.cells, "phase")
        return {
            **_figures(counts.cells, sum(counts.calls.values())),
            **{f"by_{name}": _totals(counts.cells, name) for name in ("phase", "kind", "device")},
            "by_phase_and_kind": {phase: _totals(cells, "kind") for phase, cells in phases.items()},
            "by_op": {op: _figures(cells, calls[op]) for op, cells in _split(counts.cells, "op").items()},
            "by_phase_and_op": {
                phase: {
                    op: {**_figures(part, counts.calls[phase, op]), "by_kind": _totals(part, "kind")}
                    for op, part in _split(cells, "op").items()
                }
                for phase, cells in phases.items()
            },
            "uncounted": dict(counts.uncounted),
            "uncounted_threads": list(counts.threads),
        }

    def table(self, rows: int = 12) -> str:
        """Return the figures as text: a block for each phase, with its `rows` largest operators.

        Raises:
            ValueError: `rows` is below 1.
        """
        if rows < 1:
            raise ValueError(f"rows must be at least 1; got {rows}")
        counts = self.counts()
        lines = [f"{'':<52}{'calls':>8}{'read MB':>12}{'written MB':>12}{'MB':>12}{'share':>8}"]
        total = _sum(counts.cells).total
        for phase, cells in _split(counts.cells, "phase").items():
            calls = sum(count for (name, _), count in counts.calls.items() if name == phase)
            lines.append(_line(phase, calls, cells, total))
            ops = _split(cells, "op")
            shown = list(ops)[:rows]
            others = list(ops)[rows:]
            lines += [_line("  " + op, counts.calls[phase, op], ops[op], total) for op in shown]
            if others:
                calls = sum(counts.calls[phase, op] for op in others)
                rest = {place: cell for place, cell in cells.items() if place.op in others}
                lines.append(_line(f"  {len(others)} other operators", calls, rest, total))
        lines.append(_line("total", sum(counts.calls.values()), counts.cells, total))
        kinds = [f"{kind} {_share(size, total)}" for kind, size in _totals(counts.cells, "kind").items()]
        lines.append("; ".join([NOTE, ", ".join(kinds)]) if kinds else NOTE)
        if counts.uncounted:
            names = ", ".join(f"{op} ({count} calls)" for op, count in counts.uncounted.most_common())
            lines.append(f"NOT COUNTED, no rule: {names}")
        if counts.threads:
            names = ", ".join(counts.threads)
            lines.append(f"NOT COUNTED: anything that {len(counts.threads)} other threads ran: {names}")
        return "\n".join(lines)

    def to_csv(self, path: str | Path) -> None:
        """Write one line per phase, operator, kind and device: bytes read and written.

        `calls` counts the operator in the phase, over all kinds and devices. Operators that were not counted
        have the phase "uncounted" and no bytes; so do threads, which have no calls either.
        """
        counts = self.counts()
        with Path(path).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            for place, cell in sorted(counts.cells.items()):
                writer.writerow([*place, counts.calls[place.phase, place.op], *cell])
            for op, count in sorted(counts.uncounted.items()):
                writer.writerow(["uncounted", op, "", "", count, "", ""])
            for thread in counts.threads:
                writer.writerow(["uncounted", f"thread {thread}", "", "", "", "", ""])

    def reset(self) -> None:
        """Set all counts to zero. What is known about tensors is kept."""
        with self._lock:
            self._ledger.reset()
            self._threads.clear()

    supports_higher_order_operators = True

    def __enter__(self) -> TrafficMeter:
        if self in launch_events.watching:
            raise RuntimeError("this TrafficMeter is on already: enter another one, or name a phase")
        self._ledger.know_gradients()
        self._threads.begin()
        self._handles = [
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        ]
        launch_events.watch(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        launch_events.unwatch(self)
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
            return NotImplemented  # its own dispatch unwraps it, and the inner calls come here
        if not isinstance(func, OpOverload):  # a higher-order operator
            self._ledger.counts.uncounted[str(func)] += 1
            return func(*args, **kwargs)
        reads_no_data = is_metadata(func)
        if not reads_no_data and has_kernel(func.name(), "CompositeImplicitAutograd"):
            super().__enter__()  # in inference_mode; otherwise autograd has decomposed it
            try:
                return func.decompose(*args, **kwargs)
            finally:
                super().__exit__(None, None, None)
        result = func(*args, **kwargs)
        with self._lock:
            self._see(func, args, kwargs)
            if reads_no_data or is_view(func):
                return result
            moved = operands_of(func, args, kwargs, result)
            if moved is None:
                self._ledger.counts.uncounted[str(func)] += 1
            else:
                to_leaf = func is _CAST and goes_to_a_leaf(result)
                casts_gradient = to_leaf and self._ledger.memory(args[0]).kind != "weights"
                self._book(name_of(func), func.namespace, moved, casts_gradient=casts_gradient)
        return result

    def launched(self, kernel: str, *operands: Any) -> None:
        """Count a kernel of ours that was launched outside the dispatcher."""
        if not self._is_on():
            return  # another thread, whose operators are not counted either
        moved = LAUNCHES[kernel](*operands)
        with self._lock:
            if moved is None:
                self._ledger.counts.uncounted[kernel] += 1
            else:
                self._book(kernel, "fusedacc", moved)

    def _is_on(self) -> bool:
        """Return whether this thread's operators are counted."""
        return self in dispatch_modes()

    def during(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Context: fusedacc reports a phase. A name given by the user has priority."""
        return _pushed(self._observed.__dict__.setdefault("names", []), name)

    def _step_begins(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._is_on():
            return
        with self._lock:
            for leaf in leaves_of(optimizer):
                self._ledger.know(leaf)
            self._ledger.know_gradients()
            self._ledger.know_state(optimizer)
            # The caller runs the optimizer's hooks and its step. No local variable may refer to this
            # function's own frame: the cycle would keep the optimizer alive.
            caller = getattr(inspect.currentframe(), "f_back", None)
            self._steps.append(RunningStep(threading.get_ident(), current_graph_task(), caller))

    def _step_ends(self, optimizer: Optimizer, *_: Any) -> None:
        with self._lock:
            self._ledger.know_state(optimizer)
            if self._steps and self._steps[-1].thread == threading.get_ident():
                self._steps.pop()

    def _see(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Learn from one call which tensors are leaves, and which are stored gradients."""
        task = current_graph_task()
        if self._after_backward and task == -1:
            self._ledger.know_gradients()
        self._after_backward = task != -1
        node = current_node() if task != -1 else None
        if node is not None and _COMPILED in node.name() and self._compiled != f"{task} {node.name()}":
            self._compiled = f"{task} {node.name()}"
            self._ledger.counts.uncounted[node.name()] += 1
        stores = node is not None and node.name() == ACCUMULATE_GRAD and is_metadata(func)
        for tensor in tensors_in(args, kwargs):
            is_leaf = tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
            if is_leaf or isinstance(tensor, torch.nn.Parameter):
                self._ledger.know(tensor)
            if stores:  # AccumulateGrad detaches what it stores
                self._ledger.mark(tensor, "gradients")

    def _automatic_phase(self, namespace: str, *, touches_gradients: bool, casts_gradient: bool) -> str:
        """Return the phase, without regard to names that the user has given."""
        if names := getattr(self._observed, "names", None):
            return names[-1]
        task = current_graph_task()
        if self._in_step(task):
            return "update"
        if task != -1:
            node = current_node()
            accumulates = casts_gradient or node is None or node.name() == ACCUMULATE_GRAD
            return "accumulate" if accumulates else "backward"
        if namespace == "fusedacc":
            return "accumulate"
        return "update" if touches_gradients else "forward"

    def _in_step(self, task: int) -> bool:
        """Return whether an optimizer's step runs here, and not a closure or backward that it called."""
        while self._steps:
            step = self._steps[-1]
            if step.thread != threading.get_ident():
                return False
            if any(frame is step.frame for frame, _ in traceback.walk_stack(None)):
                return step.graph_task == task and not torch.is_grad_enabled()
            self._steps.pop()  # an exception has ended it
        return False

    def _book(
        self, op: str, namespace: str, moved: Sequence[Operand], *, casts_gradient: bool = False
    ) -> None:
        memories = [self._ledger.memory(operand.tensor) for operand in moved]
        touches_gradients = any(memory.kind == "gradients" for memory in memories)
        automatic = self._automatic_phase(
            namespace, touches_gradients=touches_gradients, casts_gradient=casts_gradient
        )
        phase = self._named[-1] if self._named else automatic
        kind = "optimizer" if automatic == "update" else None
        if automatic == "accumulate" or (touches_gradients and automatic not in ("forward", "backward")):
            kind = "gradients"
        self._ledger.counts.calls[phase, op] += 1
        for memory, operand in zip(memories, moved, strict=True):
            memory.kind = memory.kind or kind
            where = phase, op, operand.device if operand.tensor is None else str(operand.tensor.device)
            memory.cells[where] = memory.cells.get(where, Cell()).plus(Cell(operand.read, operand.written))


@contextlib.contextmanager
def _pushed(names: list[str], name: str) -> Iterator[None]:
    names.append(name)
    try:
        yield
    finally:
        names.pop()


#: Names of threads that run no operator, such as the monitor of tqdm's progress bars.
IDLE = frozenset({"tqdm_monitor"})


class Threads:
    """Python threads alive between `begin` and `end`, without those in which operators were seen.

    The engine's threads run under the modes of the thread that called `backward()`, and are not Python
    threads.
    """

    def __init__(self) -> None:
        #: Names by thread id; ids are reused.
        self._alive: dict[int, set[str]] = {}
        self._seen: set[int] = set()
        self._former: Any = None
        self._ended = False

    def begin(self) -> None:
        """Record the threads that are alive, and those that start from now on."""
        self._note_all()
        self._ended = False
        self._former = threading.getprofile()
        threading.setprofile(self._begins)

    def end(self) -> None:
        """Stop recording."""
        self._ended = True
        if self._is_profiling():  # otherwise another profiler has replaced it
            threading.setprofile(_still_wanted(self._former))

    def saw(self) -> None:
        """Record that an operator of the current thread was seen."""
        self._seen.add(threading.get_ident())

    def unseen(self) -> list[str]:
        """Return the names of threads in which no operator was seen."""
        others = (names for number, names in self._alive.items() if number not in self._seen)
        return sorted(name for names in others for name in names)

    def clear(self) -> None:
        """Start again."""
        self._alive.clear()
        self._seen.clear()
        if self._is_profiling():
            self._note_all()

    def _is_profiling(self) -> bool:
        return threading.getprofile() == self._begins

    def _note_all(self) -> None:
        self.saw()
        for thread in threading.enumerate():
            if type(thread).__name__ != "_DummyThread":  # not a Python thread, and listed forever
                self._note(thread)

    def _note(self, thread: threading.Thread) -> None:
        assert thread.ident is not None
        if thread.name not in IDLE:
            self._alive.setdefault(thread.ident, set()).add(thread.name)

    def _begins(self, frame: Any, event: str, argument: Any) -> None:
        """The profile function of a new thread: it removes itself at once."""
        sys.setprofile(self._former)
        self._note(threading.current_thread())
        if self._former is not None:
            self._former(frame, event, argument)


def _still_wanted(function: Any) -> Any:
    """Return the former profile function, skipping those of meters that have ended since."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, Threads) and owner._ended:
        return _still_wanted(owner._former)
    return function
