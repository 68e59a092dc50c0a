"""The compiled module of autograd's hooks and functions (`_autograd.*.so`): loaded, or the reason why not.

It is built for exactly one torch and one Python, because autograd has no stable ABI. Without it, hooks run in
Python, and `model=` leaves Linear, Embedding and experts to PyTorch.

The module also has the list operators without torch's dispatcher (`csrc/autograd/lists.cpp`), which costs
more than the work on small tensors. They take ordinary CPU tensors in matching memory layouts, and return
False, with nothing done, in all other cases: the module is missing, a dispatch mode, transform or tracer is
active, FUSEDACC_NATIVE_HOOKS is 0, or a check fails. The caller then uses the operator, which gives the same
bits and descriptive errors.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import library
from .checks import switch

#: "0": do not use the module; "1": raise if it is missing; "" or not set: use it if it exists.
VARIABLE = "FUSEDACC_NATIVE_HOOKS"


def file_name() -> str:
    """Return the name of the file for this torch and Python."""
    return f"_autograd.torch-{torch.__version__}.{sysconfig.get_config_var('SOABI')}.so"


def path() -> Path:
    """Return the file for this torch and Python, whether it exists or not."""
    return library.FOLDER / file_name()


@functools.cache
def _load() -> tuple[Any, str | None]:
    problem = library.load_error()
    if problem is not None:
        return None, problem
    file = path()
    if not file.exists():
        return None, (
            f"{file.name} does not exist: fusedacc was installed with another torch or Python, or without "
            f"a C++ compiler or Python.h. To build it, {library.BUILD}"
        )
    loader = importlib.machinery.ExtensionFileLoader("fusedacc._autograd", str(file))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        return None, f"{file} does not load: {error}. To build it again, {library.BUILD}"
    return module, None


def loaded() -> Any | None:
    """Return the module if it was built, whatever FUSEDACC_NATIVE_HOOKS says."""
    return _load()[0]


def module() -> Any | None:
    """Return the module; None if hooks run in Python."""
    return None if why_not() else _load()[0]


def why_not() -> str | None:
    """Return why hooks run in Python; None if they are native. Raises RuntimeError if
    FUSEDACC_NATIVE_HOOKS=1.
    """
    choice = switch(
        VARIABLE,
        on="native hooks, or an error",
        off="hooks in Python",
        unset="native hooks if they are built",
    )
    if choice is False:
        return f"{VARIABLE}=0"
    problem = _load()[1]
    if choice and problem is not None:
        raise RuntimeError(f"{VARIABLE}=1, but there are no native hooks: {problem}")
    return problem


@functools.cache
def add_flat() -> int:
    """Return the address of the native library's addition of one flat tensor."""
    return library.address_of("fusedacc_add_flat")


def has_post_hook(leaf: Tensor) -> bool:
    """Return whether a hook runs after the AccumulateGrad node of a leaf; True if C++ is unavailable."""
    module = loaded()
    return module is None or module.has_post_hook(leaf)


def _left_to_the_operator(*arguments: Any) -> bool:
    return False


_module: Any = loaded()
if _module is not None:
    _module.set_kernels(
        *map(library.address_of, ("fusedacc_run", "fusedacc_run_norm", "fusedacc_join_norms"))
    )
#: (accumulators, gradients, scale, overwrite, beta, noise or None, automatic, bumps) -> whether it was done.
#: automatic: refuse if FUSEDACC_BACKEND names a backend. bumps: bump versions too. noise: a `rounding.Noise`.
accumulate: Callable[..., bool] = getattr(_module, "accumulate", _left_to_the_operator)
#: (accumulators, tensors whose versions to bump) -> a function of (gradients, scale, overwrite, beta, noise
#: or None), which works as `accumulate`. It does not keep the accumulators' memory alive.
prepare: Callable[..., Any] = getattr(_module, "prepare", _left_to_the_operator)
#: (tensors, norm_type) -> the partial norms.
norm_partials: Callable[..., Any] = getattr(_module, "norm_partials", _left_to_the_operator)
#: (tensors, norm_type) -> the norm, and 1.0 or 0.0: whether an element was not finite. Automatic.
total_norm: Callable[..., Any] = getattr(_module, "total_norm", _left_to_the_operator)
