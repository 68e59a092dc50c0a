"""The list operators past torch's dispatcher, which costs more than the work on lists of small tensors.

Compiled with the native hooks (`csrc/autograd/lists.cpp`), for ordinary CPU tensors whose elements lie alike.
Each function returns False, with nothing done, for everything else: where it was not built, a dispatch mode,
a transform or a tracer is on, FUSEDACC_NATIVE_HOOKS is 0, or a check fails. The caller then takes the
operator, whose results have the same bits and whose errors say what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import library, native_module


def _left_to_the_operator(*arguments: Any) -> bool:
    return False


#: (accumulators, gradients, scale, overwrite, beta, norm_type or None, automatic, bumps, noise or None) ->
#: True, or the partial norms. `automatic`: refuse where FUSEDACC_BACKEND names a backend; `bumps`: versions
#: too; `noise`: a `rounding.Noise`.
accumulate: Callable[..., Any] = _left_to_the_operator
#: (accumulators, owners of versions to bump) -> (gradients, scale, overwrite, beta, norm_type or None, noise
#: or None), which does as `accumulate`. The accumulators' memory is not kept alive.
prepare: Callable[..., Any] = _left_to_the_operator
#: (tensors, norm_type) -> the partial norms.
norm_partials: Callable[..., Any] = _left_to_the_operator
#: (tensors, norm_type) -> the norm, and 1.0 or 0.0: whether an element was not finite. Automatic.
total_norm: Callable[..., Any] = _left_to_the_operator


def _load() -> None:
    global accumulate, prepare, norm_partials, total_norm
    module = native_module.loaded()
    if module is None or not hasattr(module, "set_kernels"):  # not built, or by an older release
        return
    module.set_kernels(*map(library.address_of, ("fusedacc_run", "fusedacc_run_norm", "fusedacc_join_norms")))
    accumulate, prepare = module.accumulate, module.prepare
    norm_partials, total_norm = module.norm_partials, module.total_norm


_load()
