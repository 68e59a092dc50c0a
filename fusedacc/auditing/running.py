"""Runs a script as Python would: with its own sys.argv, `__main__` and `__file__`."""

from __future__ import annotations

import builtins
import inspect
import os
import runpy
import sys
import types
from collections.abc import Sequence

#: Frames of these files at the beginning are no part of a script's traceback.
_RUNNERS = (os.path.dirname(os.path.dirname(__file__)), runpy.__file__, "<frozen runpy>")


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a file as `__main__`.

    The module stays after the end, because functions at exit and pickles need it.
    """
    sys.argv = [path, *arguments]
    full_path = os.path.abspath(path)
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=full_path, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = module
    with open(full_path, "rb") as file:
        # Else the script would inherit this file's `from __future__ import annotations`.
        code = compile(file.read(), full_path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run a module as `python -m` does."""
    sys.argv = [name, *arguments]
    sys.path[0] = os.getcwd()
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def print_failure(error: BaseException) -> None:
    """Print the traceback of a script's failure, as Python would."""
    traceback = error.__traceback__
    while traceback is not None and _is_runner(traceback):
        traceback = traceback.tb_next
    sys.excepthook(type(error), error.with_traceback(traceback), traceback)


def _is_runner(traceback: types.TracebackType) -> bool:
    return inspect.getfile(traceback.tb_frame).startswith(_RUNNERS)
