"""The compiled module of autograd's hooks and functions: found and loaded, or why not.

It is made for exactly one torch and one Python, since autograd has no stable ABI. Where it is missing, Python
does the same.

The module also has the list operators past torch's dispatcher (`csrc/autograd/lists.cpp`), which costs more
than the work on lists of small tensors. They take ordinary CPU tensors whose elements lie alike. Each
returns False, with nothing done, for everything else: where the module was not built, a dispatch mode, a
transform or a tracer is on, FUSEDACC_NATIVE_HOOKS is 0, or a check fails. The caller then takes the
operator, whose results have the same bits and whose errors say what is wrong.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sysconfig
from collections.abc import Callable
from typing import Any

import torch

from . import library
from .environment import switch

#: "0": do without the module; "1": raise where they are not there; not set or "": use
#: them where they are.
VARIABLE = "FUSEDACC_NATIVE_HOOKS"


def file_name() -> str:
    """The name of the file that serves this torch and this Python."""
    return f"_autograd.torch-{torch.__version__}.{sysconfig.get_config_var('SOABI')}.so"


@functools.cache
def _load() -> tuple[Any, str | None]:
    problem = library.load_error()
    if problem is not None:
        return None, problem
    path = library.FOLDER / file_name()
    if not path.exists():
        return None, (
            f"{path.name} is not there: the installation was made under another torch or Python, or without "
            f"a C++ compiler or Python.h. To build it run: {library.REINSTALL}"
        )
    loader = importlib.machinery.ExtensionFileLoader("fusedacc._autograd", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        return None, f"{path} does not load: {error}. To build it again run: {library.REINSTALL}"
    return module, None


def loaded() -> Any | None:
    """The module where it was built, whatever FUSEDACC_NATIVE_HOOKS says."""
    return _load()[0]


def module() -> Any | None:
    """The module, or None where hooks are Python's."""
    return None if why_not() else _load()[0]


def why_not() -> str | None:
    """Why hooks are Python's, or None if they are not.

    Raises:
        ValueError: FUSEDACC_NATIVE_HOOKS is set to neither 0 nor 1.
        RuntimeError: it is 1, and there are no native hooks.
    """
    choice = switch(
        VARIABLE,
        on="native hooks, or an error",
        off="hooks in Python",
        unset="native hooks where there are any",
    )
    if choice is False:
        return f"{VARIABLE}=0"
    problem = _load()[1]
    if choice and problem is not None:
        raise RuntimeError(f"{VARIABLE}=1, but there are no native hooks: {problem}")
    return problem


@functools.cache
def add_flat() -> int:
    """Address of the native library's addition of one flat tensor."""
    return library.address_of("fusedacc_add_flat")


def any_post_hook(nodes: list[Any]) -> bool:
    """Whether a hook runs behind any of these nodes of autograd; True where C++ cannot be asked."""
    module = loaded()
    return module is None or module.any_post_hook(nodes)


def _left_to_the_operator(*arguments: Any) -> bool:
    return False


_module: Any = loaded()
if hasattr(_module, "set_kernels"):  # else it was not built, or by an older release
    _module.set_kernels(
        *map(library.address_of, ("fusedacc_run", "fusedacc_run_norm", "fusedacc_join_norms"))
    )
#: (accumulators, gradients, scale, overwrite, beta, norm_type or None, automatic, bumps, noise or None) ->
#: True, or the partial norms. `automatic`: refuse where FUSEDACC_BACKEND names a backend; `bumps`: versions
#: too; `noise`: a `rounding.Noise`.
accumulate: Callable[..., Any] = getattr(_module, "accumulate", _left_to_the_operator)
#: (accumulators, owners of versions to bump) -> (gradients, scale, overwrite, beta, norm_type or None, noise
#: or None), which does as `accumulate`. The accumulators' memory is not kept alive.
prepare: Callable[..., Any] = getattr(_module, "prepare", _left_to_the_operator)
#: (tensors, norm_type) -> the partial norms.
norm_partials: Callable[..., Any] = getattr(_module, "norm_partials", _left_to_the_operator)
#: (tensors, norm_type) -> the norm, and 1.0 or 0.0: whether an element was not finite. Automatic.
total_norm: Callable[..., Any] = getattr(_module, "total_norm", _left_to_the_operator)
