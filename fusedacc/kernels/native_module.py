"""The compiled module of the native engine (`_autograd.*.so`): loaded, or the reason why not.

It is built for exactly one torch and one Python, because autograd has no stable ABI. Without it, autograd
stores all gradients, and `model=` leaves Linear, Embedding and experts to PyTorch.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import library
from .checks import switch

#: "0": wrappers have no native engine; "1": raise if it is missing; "" or not set: use it if it exists.
VARIABLE = "FUSEDACC_ENGINE"


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
    """Return the module if it was built, whatever FUSEDACC_ENGINE says."""
    return _load()[0]


def module() -> Any | None:
    """Return the module; None if wrappers have no native engine."""
    return None if why_not() else _load()[0]


def why_not() -> str | None:
    """Return why wrappers have no native engine; None if they have. Raises RuntimeError if there is none and
    FUSEDACC_ENGINE=1.
    """
    choice = switch(
        VARIABLE,
        on="the native engine, or an error",
        off="no native engine",
        unset="the native engine if it is built",
    )
    if choice is False:
        return f"{VARIABLE}=0"
    problem = _load()[1]
    if choice and problem is not None:
        raise RuntimeError(f"{VARIABLE}=1, but there is no native engine: {problem}")
    return problem


@functools.cache
def add_flat() -> int:
    """Return the address of the native library's addition of one flat tensor."""
    return library.address_of("fusedacc_add_flat")


def has_post_hook(leaf: Tensor) -> bool:
    """Return whether a hook runs after the AccumulateGrad node of a leaf; True if C++ is unavailable."""
    module = loaded()
    return module is None or module.has_post_hook(leaf)


def restore_grad_dtype(leaf: Tensor, dtype: torch.dtype) -> None:
    """Set the `grad_dtype` of a leaf from None back to its former value.

    It follows the leaf's dtype after later casts if it did so before. Without the module it stays `dtype`.
    """
    module = loaded()
    if module is None:
        leaf.grad_dtype = dtype
    else:
        module.restore_grad_dtype(leaf, dtype)
