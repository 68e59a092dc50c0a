"""`fusedacc.audit`: watches a block of code, judges its updates, and reports."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Collection
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TextIO

from torch import nn

from .findings import Findings, Problem
from .fitting import fit_weights
from .judging import BLOCK, Judge, add_final_notes
from .ranks import Combiner, RankFiles
from .records import KINDS, BackwardPass, History, ListedOptimizer, Update
from .report import Report, find_rounding
from .watching import Watcher
from .wording import NEGLIGIBLE, plural

#: The audit that runs. There can be only one, because it replaces functions of torch.
_running: Audit | None = None


class StoppedError(SystemExit):
    """Ends the script after the updates that are to be watched."""


class Audit(AbstractContextManager["Audit"]):
    """Watches the updates inside a `with` block. `fusedacc.audit` makes it, and describes the arguments.

    Attributes:
        status: 0: no problem; 1: problems; 2: nothing could be checked. None while it watches.
        text: the report.
        problems: what is wrong.
        notes: what is no verdict.
        seconds: time that the audit took.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        updates: int = 100,
        steps: int | None = None,
        scale: float | None = None,
        ignore: Collection[str] = (),
        stop: bool = False,
        title: str = "this program",
        output: TextIO | None = None,
        json_file: str | None = None,
        folder: str | None = None,
    ) -> None:
        _check(model, updates, steps, scale, ignore)
        # The script may change to another folder.
        json_file, folder = (path and os.path.abspath(path) for path in (json_file, folder))
        folder_of_json = os.path.dirname(json_file or os.getcwd())
        if not os.path.isdir(folder_of_json):
            raise ValueError(f"there is no folder {folder_of_json} to write the JSON to: create it first")
        self.status: int | None = None
        self.text = ""
        self.problems: list[Problem] = []
        self._limit, self._stop = updates, stop
        self._title, self._output, self._json_file = title, output, json_file
        self._judge = Judge(steps, scale, frozenset(ignore))
        self._history, self._findings = History(), Findings()
        self._watcher = Watcher(self._history, self._take, self._end_step, model)
        self._rank_files = RankFiles(folder)
        self._began = 0.0
        self._report: Report | None = None

    @property
    def seconds(self) -> float:
        """Seconds that the audit took."""
        return self._watcher.watch.seconds

    @property
    def notes(self) -> list[str]:
        """What the report says that is no verdict."""
        return list(self._history.notes)

    def __enter__(self) -> Audit:
        global _running
        if self.status is not None:
            raise RuntimeError("this audit has ended: call fusedacc.audit() for a new one")
        if _running is not None:
            raise RuntimeError("an audit is already running: end it before you begin another one")
        _running = self
        self._began = time.perf_counter()
        self._watcher.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
        self._watcher.remove_step_hooks()

    def check(self) -> None:
        """Raise if there is a problem. Call it after the `with` block, for example in a test.

        Raises:
            AssertionError: there is a problem, or nothing could be checked. Its text is the report.
            RuntimeError: the audit still runs.
        """
        if self.status is None:
            raise RuntimeError("the audit still runs: call check() after the with block")
        if self.status:
            raise AssertionError(self.text)

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values. On other ranks than 0 it is empty.

        Raises:
            RuntimeError: the audit still runs.
        """
        if self.status is None:
            raise RuntimeError("the audit still runs: call as_json() after the with block")
        return {} if self._report is None else self._report.as_json()

    # While it watches

    def _take(self, update: Update, former: Update | None, infinite: list[BackwardPass]) -> None:
        """Take an update that has taken place."""
        history = self._history
        if history.num_ranks == 1:
            fit_weights(update, former)
            if infinite:  # what was dropped together with them
                top = max(map(abs, update.weights), default=0.0)
                for each, weight in zip(update.passes, update.weights, strict=True):
                    if abs(weight) < NEGLIGIBLE * top:
                        each.excused = each.excused or "nonfinite"
        for each in infinite:
            each.excused = "nonfinite"
        history.updates.append(update)
        starts = self._watcher.watch.optimizers.window_starts()
        if history.num_ranks > 1:
            self._rank_files.write(update, history, starts)
        elif len(history.updates) >= BLOCK:
            self._judge.judge(history, self._findings, history.updates[: BLOCK // 2], starts)

    def _end_step(self, optimizer: int) -> None:
        if self._limit and self._history.update_counts[optimizer] >= self._limit:
            self.close()
            if self._stop:
                raise StoppedError(self.status)

    # The end

    def close(self) -> None:
        """Stop watching, judge, and print the report. The `with` block does this at its end."""
        global _running
        if self.status is not None:
            return
        self.status = 2
        total = time.perf_counter() - self._began
        self._watcher.stop()
        _running = None if _running is self else _running
        history = self._history
        history.passes = [each for each in history.passes if history.owned_by_any & each.leaves]
        try:
            if history.num_ranks > 1:
                self._rank_files.finish(history)
                if history.rank == 0:
                    self._read_ranks()
            if history.rank == 0:
                self._make_report(total)
            else:
                self.status = 0  # rank 0 reports for all
        except Exception as error:  # a failure of the audit, not of the script
            self.status = 2
            self.text += f"\nThe audit failed: {type(error).__name__}: {error}"
        if self.text:
            print(self.text.strip(), file=self._output or sys.stderr, flush=True)

    def _read_ranks(self) -> None:
        """Read the updates of all ranks, and judge them in blocks."""
        history = self._history
        own_numbers = {listed.place: number for number, listed in history.optimizers.items()}
        history.updates, history.passes, history.judged_passes = [], [], 0
        combiner = Combiner(history)

        def take(updates: list[Update]) -> None:
            update = combiner.combine(updates)
            unknown = ListedOptimizer(update.optimizer, "")
            history.optimizers.setdefault(update.optimizer, own.get(update.optimizer, unknown))
            history.updates.append(update)
            history.passes += combiner.list_new(update)
            if len(history.updates) >= BLOCK:
                self._judge.judge(history, self._findings, history.updates[: BLOCK // 2], [])
                combiner.forget_all_but(history.passes)

        own = {listed.place: listed for listed in history.optimizers.values()}
        counts = history.update_counts
        history.update_counts = Counter({place: counts[number] for place, number in own_numbers.items()})
        history.optimizers = {}
        passes, history.optimizers = self._rank_files.read(history, take)
        history.passes += passes

    def _make_report(self, total: float) -> None:
        history, findings = self._history, self._findings
        self.status = 0  # until the end, a failure of the judge is 2
        pending = self._judge.judge(history, findings, list(history.updates), [])
        is_limited = self._limit and max(history.update_counts.values(), default=0) >= self._limit
        add_final_notes(history, findings, 0 if is_limited else len(pending))
        if is_limited:
            history.add_note(f"only the first {plural(self._limit, 'update')} of each optimizer were watched")
        if not history.num_updates and not history.failed:
            history.add_note(self._why_no_update())
        self.problems = list(findings.problems.values())
        is_incomplete = history.failed or not findings.checked
        self.status = 1 if self.problems else 2 if is_incomplete else 0
        rounding = find_rounding(findings, history)
        self._report = Report(
            self._title,
            self.status,
            history,
            findings,
            self.problems,
            rounding,
            self._judge.scale,
            self.seconds,
            total,
        )
        self.text = self._report.as_text()
        if self._json_file:
            with open(self._json_file, "w") as file:
                json.dump(self._report.as_json(), file, indent=1)

    def _why_no_update(self) -> str:
        if self._watcher.updates.steps_without_gradients:
            return (
                "no update was seen: step() was called, but no parameter of the optimizer had a gradient. "
                "Give the optimizer the parameters of the model that you train, and call backward() before "
                "step()"
            )
        return (
            "no update was seen: the script called no optimizer's step() in this process. Let it train for "
            "at least one update. Processes that it starts itself, as with mp.spawn, are not seen: use "
            "torchrun"
        )


def _check(
    model: nn.Module | None, updates: int, steps: int | None, scale: float | None, ignore: Collection[str]
) -> None:
    """Raise ValueError if an argument cannot be used."""
    if updates < 0:
        raise ValueError(f"updates must be 0 (all) or more, not {updates}")
    if steps is not None and steps < 1:
        raise ValueError(f"steps must be 1 or more, not {steps}")
    if scale is not None and not scale > 0:
        raise ValueError(f"scale must be positive, not {scale}")
    unknown = sorted(set(ignore) - {*KINDS})
    if unknown:
        raise ValueError(f"there is no kind of problem {unknown[0]!r}: choose from {', '.join(KINDS)}")
    if model is not None and any(param.is_meta for param in model.parameters()):
        raise ValueError(
            "the model is on the meta device, where gradients have no numbers: train it on a real device"
        )


def audit(
    model: nn.Module | None = None,
    *,
    updates: int = 100,
    steps: int | None = None,
    scale: float | None = None,
    ignore: Collection[str] = (),
    output: TextIO | None = None,
    json_file: str | None = None,
) -> Audit:
    """Check that the training loop in a `with` block accumulates gradients correctly.

    For every update of every optimizer, the audit finds which micro-batches reached the optimizer, and with
    which weight. At the end of the block it prints a report. The loop runs as without the audit, with the
    same bits.

        with fusedacc.audit() as report:
            train()
        report.check()  # raises AssertionError, with the report as its text, if something is wrong

    Args:
        model: names the parameters in the report by this module's names. By default, the audit looks for the
            outermost module that has them.
        updates: how many updates of each optimizer to watch; 0: all. The audit ends after them.
        steps: number of micro-batches of a full window on a rank, if it is to be checked.
        scale: what the weights of a window should add up to. None: 1, or a factor that the loss has of its
            own, as in `0.5 * mse`.
        ignore: kinds of problems that are not reported: "lost", "double", "scale", "uneven", "stale",
            "ranks", "parameters", "count".
        output: where to print the report. None: `sys.stderr`.
        json_file: also write the report to this file, as JSON.

    Returns:
        A context manager with `status`, `text`, `problems`, `notes`, `seconds`, `check()` and `as_json()`.

    Raises:
        ValueError: an argument cannot be used.
        RuntimeError: at the beginning of the block: another audit is running.
    """
    return Audit(
        model, updates=updates, steps=steps, scale=scale, ignore=ignore, output=output, json_file=json_file
    )
