"""The compiled module of the native engine (`_autograd.*.so`): loaded, or the reason why not.

It is built for exactly one torch and one Python, because autograd has no stable ABI. The package may contain
it, or `engine_build` builds it. Without it, autograd stores all gradients, and `model=` leaves Linear,
Embedding and experts to PyTorch.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import platform
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import engine_build, engine_command, installation, library
from .checks import switch

#: "0": wrappers have no native engine; "1": raise if it is missing; "" or not set: use it, and build it if it
#: is missing.
VARIABLE = "FUSEDACC_ENGINE"
#: What is lost without the engine.
LOST = (
    "autograd stores each gradient in p.grad before fusedacc adds it, so nothing is saved, and sink() "
    "returns None"
)


def file_name() -> str:
    """Return the name of the file that is built for this torch and Python."""
    return engine_command.file_name(torch.__version__)


def path() -> Path | None:
    """Return the file for this torch and Python: of the package, or built at first use. None if missing."""
    soabi = str(sysconfig.get_config_var("SOABI"))
    commit = str(torch.version.git_version)
    for name in (file_name(), engine_command.released_file_name(torch.__version__, commit, soabi)):
        if (installation.FOLDER / name).exists():
            return installation.FOLDER / name
    built = engine_build.cached_file()
    return built if built is not None and built.exists() else None


@functools.cache
def _load() -> tuple[Any, str | None]:
    problem = library.load_error()
    if problem is not None:
        return None, problem
    file = path()
    if file is None:
        try:
            problem = _build()
        except ValueError as error:  # `why_not` raises it when a wrapper is made
            problem = str(error)
        if problem is not None:
            versions = f"torch {torch.__version__} and Python {platform.python_version()}"
            return None, f"none is installed for {versions}, and {problem}"
        file = engine_build.cached_file()
    loader = importlib.machinery.ExtensionFileLoader("fusedacc._autograd", str(file))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        again = f"delete {file}" if file == engine_build.cached_file() else installation.how_to_build()
        return None, f"{file} does not load: {error}. To build it again, {again}"
    return module, None


def _build() -> str | None:
    """Build the engine. Return why it was not built, or None."""
    if os.environ.get(VARIABLE) == "0":
        return f"{VARIABLE} was 0 when it was needed first"
    return engine_build.build()


def loaded() -> Any | None:
    """Return the module if it exists, whatever FUSEDACC_ENGINE says. The first call may build it."""
    return _load()[0]


def loaded_before() -> Any | None:
    """Return the module if it is loaded already. Without it there are no wrappers with engines yet."""
    return _load()[0] if _load.cache_info().currsize else None


def module() -> Any | None:
    """Return the module; None if wrappers have no native engine."""
    return None if why_not() else _load()[0]


def why_not() -> str | None:
    """Return why wrappers have no native engine; None if they have.

    Raises:
        RuntimeError: there is none, and FUSEDACC_ENGINE=1.
        ValueError: FUSEDACC_ENGINE or FUSEDACC_BUILD has an unknown value.
    """
    choice = switch(
        VARIABLE,
        on="the native engine, or an error",
        off="no native engine",
        unset="the native engine if it exists or can be built",
    )
    engine_build.wanted()
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
