"""Calls a function as soon as another module is imported, without importing that module."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def when_imported(module: str, function: Callable[[], object]) -> None:
    """Call the function now if the module is imported, else once its import has ended.

    The same function of a module is called once, however often it is given before the import.
    """
    if module in sys.modules:
        function()
        return
    waiting = _Waiting(module, function)
    if waiting not in sys.meta_path:
        sys.meta_path.insert(0, waiting)


@dataclass(frozen=True)
class _Waiting(MetaPathFinder):
    """Finds the module as Python does, and calls the function after the module has run."""

    module: str
    function: Callable[[], object]

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == self.module else None
        if spec is not None and spec.loader is not None:
            run = functools.partial(self._run, spec.loader.exec_module)
            spec.loader.exec_module = run  # type: ignore[method-assign]  # only this spec has the loader
        return spec

    def _run(self, exec_module: Callable[[ModuleType], None], module: ModuleType) -> None:
        exec_module(module)
        with contextlib.suppress(ValueError):  # already removed
            sys.meta_path.remove(self)
        self.function()
