"""The optimizers that an audit has seen: their parameters, and the gradients that they used last."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .records import BackwardPass, History, Update
from .sketch_sets import SketchSet

#: Passes without an optimizer keep so many sketches, of 512 bytes each. Older ones are forgotten.
WAITING_SKETCHES = 2**18

#: After so many updates of others, an optimizer counts as unused: without any update, and with one.
UNUSED_AFTER, FINISHED_AFTER = 256, 4096


@dataclass(eq=False)
class OptimizerRecord:
    """What is known of one optimizer.

    Attributes:
        reference: the optimizer.
        number: stands for it; ids are used again.
        made: where it was made, such as "made at train.py:12"; empty: unknown.
        owned: its parameters, by the number of the leaf whose gradients they get.
        owned_mask: the bits of these numbers.
        last_sketches: the gradients it used last, by the leaf's number.
        last_update: its last update.
        is_restored: whether its state was loaded or copied since its last update.
        identities, names, shapes: of its parameters.
        root: the outermost module with its parameters.
        kept: leaves whose p.grad nothing has cleared or changed since the last update.
        cleared: leaves whose p.grad was cleared since then, before a backward pass.
        is_cleared: whether zero_grad() has cleared gradients of the open window.
        misses_passes: whether sketches of the open window were freed.
        used_at: number of all updates when it made its last one, or was created.
    """

    reference: weakref.ref[Any]
    number: int
    made: str = ""
    owned: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)
    owned_mask: int = 0
    last_sketches: SketchSet | None = None
    last_update: Update | None = None
    is_restored: bool = False
    identities: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    root: weakref.ref[nn.Module] | None = None
    kept: set[int] = field(default_factory=set)
    cleared: set[int] = field(default_factory=set)
    is_cleared: bool = False
    misses_passes: bool = False
    used_at: int = 0


class Optimizers:
    """All optimizers, and which sketches they still need.

    Args:
        history: passes and updates.
        model: names the parameters. None: look for the modules that have them.
    """

    def __init__(self, history: History, model: nn.Module | None = None) -> None:
        self._history, self._model = history, model
        self._by_id: dict[int, OptimizerRecord] = {}
        #: By number. An optimizer that is freed is removed.
        self._records: dict[int, OptimizerRecord] = {}
        self._count = 0
        #: Passes that still have their sketches.
        self._holding: list[BackwardPass] = []
        #: Their sketches.
        self._num_held = 0

    def record_of(self, optimizer: Any) -> OptimizerRecord:
        """Return the record of an optimizer, which is made at first."""
        known = self._by_id.get(id(optimizer))
        if known is not None and known.reference() is optimizer:
            return known
        self._count += 1
        identity, number = id(optimizer), self._count

        def forget(_: Any) -> None:
            gone = self._records.pop(number, None)
            if gone is not None and self._by_id.get(identity) is gone:
                del self._by_id[identity]

        known = OptimizerRecord(weakref.ref(optimizer, forget), number, used_at=self._history.num_updates)
        self._by_id[identity] = self._records[number] = known
        return known

    def __iter__(self) -> Iterator[OptimizerRecord]:
        return iter(list(self._records.values()))

    def owned_numbers(self) -> set[int]:
        """Return the numbers of all leaves that an optimizer has."""
        return {number for record in self for number in record.owned}

    def versions(self) -> dict[int, int]:
        """Return, by optimizer, a number that changes when one of its parameters is written."""
        params = {record.number: [ref() for ref in record.owned.values()] for record in self}
        return {
            number: sum(param._version for param in owned if param is not None)
            for number, owned in params.items()
        }

    def evaluating(self) -> frozenset[int]:
        """Return the optimizers whose model is in evaluation mode."""
        roots = [(record.number, record.root()) for record in self if record.root is not None]
        return frozenset(number for number, root in roots if root is not None and not root.training)

    def window_starts(self) -> list[int]:
        """Return where open windows begin: passes from there on may still be used."""
        starts = self._history.window_starts
        return [starts[record.number] for record in self._used()]

    def _used(self) -> list[OptimizerRecord]:
        """Return the optimizers that make updates, or may still begin to."""
        counts, total = self._history.update_counts, self._history.num_updates
        return [
            record
            for record in self
            if total - record.used_at < (FINISHED_AFTER if counts[record.number] else UNUSED_AFTER)
        ]

    def note_cleared(self, owner: Any) -> None:
        """Note that `zero_grad()` of an optimizer or module has cleared gradients of open windows."""
        params = {*map(id, owner.parameters())} if isinstance(owner, nn.Module) else set()
        for record in self:
            if owner is record.reference() or not params.isdisjoint(self._params_of(record)):
                window = self._history.window(record.number)
                record.is_cleared |= any(each.leaves & record.owned_mask for each in window)

    @staticmethod
    def _params_of(record: OptimizerRecord) -> set[int]:
        """Return the ids of an optimizer's parameters."""
        return {id(param) for reference in record.owned.values() if (param := reference()) is not None}

    def hold(self, backward_pass: BackwardPass) -> None:
        """Keep the sketches of a pass until no optimizer can use it any more."""
        self._holding.append(backward_pass)
        self._num_held += len(backward_pass.sketches)
        if self._num_held > 2 * WAITING_SKETCHES:  # no optimizer makes updates
            self.free_sketches()

    def free_sketches(self) -> None:
        """Free the sketches of passes that no optimizer can still use."""
        holding, self._holding = self._holding, []
        starts, used, self._num_held = self._history.window_starts, self._used(), 0
        for each in reversed(holding):
            waiting = [
                record
                for record in self
                if each.number >= starts[record.number] and each.leaves & record.owned_mask
            ]
            size = len(each.sketches)
            is_needed = any(record in used for record in waiting)
            if is_needed and self._num_held + size < WAITING_SKETCHES:
                self._holding.append(each)
                self._num_held += size
            else:
                each.sketches.clear()
                for record in waiting:
                    record.misses_passes = True
        self._holding.reverse()

    def name_parameters(self, record: OptimizerRecord, params: Sequence[Tensor]) -> None:
        """Look up names and shapes, if the parameters are not those of the last update."""
        identities = [*map(id, params)]
        if record.identities != identities:
            record.identities = identities
            record.names, root = find_names(params, self._model)
            record.root = None if root is None else weakref.ref(root)
        record.shapes = [tuple(param.shape) for param in params]


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters of a torch optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def find_names(
    params: Sequence[Tensor], model: nn.Module | None = None
) -> tuple[list[str], nn.Module | None]:
    """Return the longest name that a module has for each parameter, and the outermost module.

    Without a model, every module of the process is asked, because an optimizer does not know its model.
    """
    names = {id(param): "" for param in params}
    outermost, largest = None, (0, 0)
    everything = gc.get_objects() if model is None else [model]
    for module in [each for each in everything if issubclass(type(each), nn.Module)]:
        with contextlib.suppress(Exception):  # modules that others are about to make
            found = {id(param): name for name, param in module.named_parameters() if id(param) in names}
            names |= {identity: name for identity, name in found.items() if len(name) > len(names[identity])}
            size = len(found), sum(map(len, found.values()))
            if size > largest:
                outermost, largest = module, size
    return [names[id(param)] or f"parameter {i}" for i, param in enumerate(params)], outermost
