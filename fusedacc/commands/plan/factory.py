"""What the user's factory returns, and one-line errors about it."""

from __future__ import annotations

import contextlib
import importlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ...optimizer import AccumulatingOptimizer
from ...planner.training import BatchDims, LossFunction

RETURNS = "(model, optimizer, sample_batch), optionally with loss_fn and batch_dims at the end"


class InputError(Exception):
    """The user's input cannot be used; the message is one line."""


class NothingFitsError(InputError):
    """The budget does not hold a single sample."""


class Training(NamedTuple):
    """What is to be planned: arguments of `fusedacc.planner.plan`."""

    model: nn.Module
    optimizer: Optimizer
    sample_batch: Any
    loss_fn: LossFunction | None = None
    batch_dims: BatchDims = 0

    @property
    def wrapped(self) -> bool:
        return isinstance(self.optimizer, AccumulatingOptimizer)

    def stock(self) -> Training:
        """Return the stock loop. A wrapper is closed and can no longer train."""
        if not isinstance(self.optimizer, AccumulatingOptimizer):
            return self
        inner = self.optimizer.optimizer
        self.optimizer.close()
        return self._replace(optimizer=inner)

    def ours(self) -> Training:
        """Return the same with the optimizer wrapped, with the wrapper's defaults."""
        if self.wrapped:
            return self
        return self._replace(optimizer=AccumulatingOptimizer(self.optimizer, gradient_accumulation_steps=2))


def load(name: str) -> Training:
    """Call the factory `package.module:factory`.

    Raises:
        InputError: there is no such factory, it fails, or it returns something else.
    """
    module_name, _, factory_name = name.partition(":")
    if not module_name or not factory_name:
        raise InputError(f"--model is {name!r}; allowed: package.module:factory")
    with _told(f"--model {name}: importing {module_name}"):
        module = importlib.import_module(module_name)
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        raise InputError(f"--model {name}: {module_name} has no function {factory_name!r}")
    with _told(f"--model {name}: {factory_name}()"):
        made = factory()
    if not isinstance(made, tuple) or not 3 <= len(made) <= 5:
        found = f"{len(made)} values" if isinstance(made, tuple) else type(made).__name__
        raise InputError(f"--model {name}: {factory_name}() must return {RETURNS}; it returned {found}")
    training = Training(*made)
    for what, value, kind in (
        ("model", training.model, nn.Module),
        ("optimizer", training.optimizer, Optimizer),
    ):
        if not isinstance(value, kind):
            found = type(value).__name__
            raise InputError(
                f"--model {name}: the {what} that {factory_name}() returned is {found}; allowed: "
                f"a torch {kind.__name__}"
            )
    if next(training.model.parameters(), None) is None:
        raise InputError(f"--model {name}: the model that {factory_name}() returned has no parameters")
    return training


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise InputError(f"{what} failed: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Return an error with its notes, and the place in the user's code where it was raised."""
    text = " ".join(str(error).split()) or "no message"
    notes = [" ".join(note.split()) for note in getattr(error, "__notes__", ())]
    frames = _frames(error)
    place = [f"at {Path(frames[-1].filename).name}:{frames[-1].lineno}"] if frames else []
    return ", ".join([f"{type(error).__name__}: {text}", *notes, *place])


def is_the_users(error: BaseException) -> bool:
    """Return whether an error concerns the user's input: raised by our checks, or in the user's code."""
    return isinstance(error, TypeError | ValueError | RuntimeError) or bool(_frames(error))


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of the user's code, the innermost last."""
    libraries = (Path(__file__).parents[2], Path(torch.__file__).parent, Path(traceback.__file__).parent)

    def elsewhere(filename: str) -> bool:
        path = Path(filename)
        return path.is_absolute() and not any(path.is_relative_to(folder) for folder in libraries)

    return [frame for frame in traceback.extract_tb(error.__traceback__) if elsewhere(frame.filename)]
