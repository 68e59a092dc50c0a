"""Several ranks: each writes its updates to a file, and rank 0 reads all files at the end.

Nothing is sent through the process group, so the script's collectives are left alone. A file has sketches,
not gradients: about 4 KB for each parameter, pass and update.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from .fitting import fit_weights
from .records import BackwardPass, Equations, History, ListedOptimizer, Update

#: Seconds for which rank 0 waits for the files of other ranks.
PATIENCE = 60
#: Passes in no update that a rank keeps.
MAX_UNUSED = 4096
#: Variables that tell runs apart.
RUN_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True)
class SentUpdate:
    """An update in a rank's file.

    Attributes:
        update: its optimizer is the place in the report.
        optimizer: what the report says of it.
    """

    update: Update
    optimizer: ListedOptimizer


@dataclass(frozen=True)
class SentEnd:
    """The end of a rank's file.

    Attributes:
        passes: in no update.
        notes: of the rank.
    """

    passes: list[BackwardPass]
    notes: list[str]


class RankFiles:
    """Exchanges updates between ranks through a folder.

    Args:
        folder: all ranks must see it. None: one in the folder for temporary files.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._unused: list[BackwardPass] = []

    def write(self, update: Update, history: History, window_starts: Sequence[int]) -> None:
        """Write an update to this rank's file, and forget it with the passes before all open windows."""
        listed = history.optimizers[update.optimizer]
        number, update.optimizer = update.optimizer, listed.place
        leaves = [each.leaves for each in update.passes]
        for each in update.passes:
            each.rank, each.leaves = history.rank, 0
        equations = update.equations
        if equations is not None:
            update.equations = Equations(
                equations.passes.float(), equations.used.float(), equations.stale.float(), equations.owners
            )
        pickle.dump(SentUpdate(update, listed), self._open(history.rank))
        for each, of_pass in zip(update.passes, leaves, strict=True):
            each.leaves, each.is_counted = of_pass, True
        update.optimizer, update.equations = number, None
        history.updates.clear()
        old = history.drop_passes_before(min(window_starts, default=0))
        unused = [each for each in old if not each.is_counted]
        self._unused += unused[: MAX_UNUSED - len(self._unused)]

    def finish(self, history: History) -> None:
        """Finish this rank's file."""
        passes = self._unused + [each for each in history.passes if not each.is_counted]
        for each in passes:
            each.rank, each.leaves = history.rank, 0
            each.scale = float(each.scale)
        with self._open(history.rank) as file:
            pickle.dump(SentEnd(passes, list(history.notes)), file)
        part = self._path(history.rank, ".part")
        part.replace(self._path(history.rank))

    def _open(self, rank: int) -> IO[bytes]:
        if self._file is None:
            self._file = self._path(rank, ".part").open("wb")
        return self._file

    def _path(self, rank: int, suffix: str = "") -> Path:
        name = "-".join(os.environ.get(variable, "") for variable in RUN_VARIABLES)
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
            # The launcher's process number, so that no file of an earlier run is taken for a new one.
            name += f"-{os.getppid()}"
        folder = Path(self._folder or Path(tempfile.gettempdir()) / f"fusedacc-audit-{os.getuid()}-{name}")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():  # the files are pickles, which can run any code
            raise PermissionError(f"{folder} belongs to another user: choose another folder with --folder")
        return folder / f"{rank}.updates{suffix}"

    def read(
        self, history: History, take: Callable[[list[Update]], None]
    ) -> tuple[list[BackwardPass], dict[int, ListedOptimizer]]:
        """Read all files, update by update, and remove them.

        Args:
            history: gets the ranks' notes.
            take: called with the same update of all ranks.

        Returns:
            Passes in no update, and the optimizers by their place in the report.
        """
        paths = self._wait(history)
        passes: list[BackwardPass] = []
        optimizers: dict[int, ListedOptimizer] = {}
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(path.open("rb")) for path in paths]
            read: list[Any] = []
            for read in _rows(files):
                if not all(isinstance(each, SentUpdate) for each in read):
                    break
                if len({(*each.optimizer[:2], each.update.number) for each in read}) > 1:
                    break  # of different optimizers
                optimizers[read[0].update.optimizer] = read[0].optimizer
                take([each.update for each in read])
            if any(isinstance(each, SentUpdate) for each in read):
                history.add_note(
                    "the ranks made different numbers of updates: the last ones were not checked"
                )
            for record, file in zip(read, files, strict=True):
                end = record
                while isinstance(end, SentUpdate):
                    end = pickle.load(file)
                passes += end.passes
                for note in end.notes:
                    history.add_note(note)
        for path in paths:
            path.unlink(missing_ok=True)
        if paths and self._folder is None:
            with contextlib.suppress(OSError):  # another rank's file is still there
                paths[0].parent.rmdir()
        return passes, optimizers

    def _wait(self, history: History) -> list[Path]:
        """Wait for the files of all ranks, and return those that exist."""
        paths = [self._path(rank) for rank in range(history.num_ranks)]
        deadline = time.monotonic() + PATIENCE
        while not all(path.exists() for path in paths) and time.monotonic() < deadline:
            time.sleep(0.05)
        found = [path for path in paths if path.exists()]
        missing = len(paths) - len(found)
        if missing:
            history.add_note(f"{missing} ranks sent nothing: their micro-batches are unknown")
        return found


def _rows(files: Sequence[IO[bytes]]) -> Iterator[list[Any]]:
    while files:
        yield [pickle.load(file) for file in files]


class Combiner:
    """Makes one update of the same update of all ranks.

    Args:
        history: it says how many ranks count. If ranks hold different parameters, only rank 0's are checked.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._last: dict[int, Update] = {}
        #: Passes of all ranks, by rank and number: each is in several updates.
        self._passes: dict[tuple[int, int], BackwardPass] = {}

    def combine(self, updates: list[Update]) -> Update:
        """Add the gradients of shards, and put the micro-batches of all ranks side by side.

        Returns:
            The update with its weights.
        """
        for each in updates:
            assert each.equations is not None
            old = each.equations
            each.equations = Equations(old.passes.double(), old.used.double(), old.stale.double(), old.owners)
            each.passes = [self._passes.setdefault((one.rank, one.number), one) for one in each.passes]
        first = updates[0]
        former = self._last.get(first.optimizer)
        self._last[first.optimizer] = first
        if not all(_have_same_parameters(first, each) for each in updates):
            fit_weights(first, former)
            if first.rest > 1e-3:
                first.rest = 1.0
            self._history.add_note("the ranks hold different parameters: only those of rank 0 were checked")
            self._history.num_ranks = 1
        else:
            _join(updates)
            fit_weights(first, former)
        return first

    def list_new(self, update: Update) -> list[BackwardPass]:
        """Return the update's passes that were in no earlier one."""
        new = [each for each in update.passes if not each.is_listed]
        for each in new:
            each.is_listed = True
        return new

    def forget_all_but(self, passes: list[BackwardPass]) -> None:
        """Forget passes that are judged."""
        kept = {id(each) for each in passes}
        self._passes = {key: each for key, each in self._passes.items() if id(each) in kept}


def _have_same_parameters(first: Update, other: Update) -> bool:
    """Return whether two ranks update the same parameters. One may know longer names of them."""
    return first.shapes == other.shapes and all(
        name.endswith(other_name) or other_name.endswith(name)
        for name, other_name in zip(first.names, other.names, strict=True)
    )


def _join(updates: list[Update]) -> None:
    """Put the equations of all ranks into the first update."""
    first = updates[0]
    found = [each.equations for each in updates if each.equations is not None]
    targets, stale = [each.used for each in found], found[0].stale
    if first.is_sharded:
        targets = [sum(targets[1:], targets[0])]
        stale = sum((each.stale for each in found[1:]), stale)
    norm = targets[0].norm().clamp(min=1e-300)
    first.apart = max(float((target - targets[0]).norm() / norm) for target in targets)
    columns = torch.cat([each.passes for each in found], 1)
    first.equations = Equations(columns, targets[0], stale, found[0].owners)
    first.passes = [one for each in updates for one in each.passes]
    first.problems = [problem for each in updates for problem in each.problems]
