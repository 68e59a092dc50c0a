"""The operators on lists of tensors, split by device and backend, and on rows of a table.

Sums into rows, as an embedding's backward adds them, allocate nothing of the table's size. A stable sort
without atomics makes them deterministic on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import checks, registry, selftest
from .constants import MAX_DIMS
from .dtypes import Flags, Number, Tensors
from .rounding import Noise, checked_offset, streams
from .torch_private import assume_constant_result

Result = TypeVar("Result")


@dataclass(frozen=True)
class BackendShare:
    """The tensors, by index in the caller's lists (None: all), that one backend handles on one device."""

    backend: registry.Backend
    indices: tuple[int, ...] | None = None

    def noise_of(self, noise: Noise | None) -> Noise | None:
        return None if noise is None else Noise(noise.seed, self.of(noise.streams))

    def of(self, values: Any) -> Any:
        """Return its share of a list; return a flag for all unchanged."""
        if self.indices is None or isinstance(values, bool):
            return values
        return [values[index] for index in self.indices]


def split(accumulators: Tensors, gradients: Tensors, backend: str) -> list[BackendShare]:
    """Split lists that `checks.check_lists` has passed by device and backend; errors as `registry.select`.

    Under "auto", the eager backend takes tensors that are not ordinary (wrapper subclasses, meta tensors), or
    have more dimensions than the compiled operators support.
    """
    registry.requested(backend)
    chosen: dict[tuple[torch.device, torch.dtype, torch.dtype, str], registry.Backend] = {}
    shares: dict[tuple[torch.device, registry.Backend], list[int]] = {}
    for index, (accumulator, gradient) in enumerate(zip(accumulators, gradients, strict=True)):
        usual = checks.is_plain(accumulator) and checks.is_plain(gradient) and gradient.dim() <= MAX_DIMS
        wanted = backend if usual or backend != "auto" else "eager"
        kind = accumulator.device, accumulator.dtype, gradient.dtype, wanted
        if kind not in chosen:
            chosen[kind] = registry.select(*kind).backend
        shares.setdefault((accumulator.device, chosen[kind]), []).append(index)
    return [BackendShare(taker, tuple(indices)) for (_, taker), indices in shares.items()]


def run_parts(
    accumulators: Tensors,
    gradients: Tensors,
    backend: str,
    check: Callable[[], None],
    run: Callable[[BackendShare], Result],
) -> list[Result]:
    """Return the results of `run`, for each backend's share of lists that are not checked yet.

    A backend that checks itself is first given everything. `check` is called after it has refused, or before
    others run. If it finds nothing, and all would go to the same backend, its own error is raised: the
    backend may have written, so it must not be tried twice.
    """
    refused = None
    chosen = None
    try:
        first = accumulators[0]
        chosen = registry.select(first.device, first.dtype, gradients[0].dtype, backend).backend
        if chosen.name in registry.NATIVE:
            return [run(BackendShare(chosen))]
    except Exception as error:
        refused = error
    check()
    parts = split(accumulators, gradients, backend)
    if refused is not None and [part.backend for part in parts] == [chosen]:
        raise refused
    return list(map(run, parts))


@assume_constant_result
def is_traced_natively(
    device: torch.device, accumulator_dtype: torch.dtype, gradient_dtype: torch.dtype, backend: str
) -> bool:
    """Return whether a graph of `torch.compile` gets the native library's operators or the reference. Raises
    RuntimeError if Triton was requested.
    """
    # No self-test can run in a trace.
    name = registry.select_untested(device, accumulator_dtype, gradient_dtype, backend).name
    if name == "triton" and backend == "triton":
        raise RuntimeError(
            "backend='triton' cannot be traced by torch.compile; allowed: 'auto', 'cuda', 'cpu', 'eager'"
        )
    return name in registry.NATIVE


def bump_versions(tensors: Tensors) -> None:
    """Tell autograd that the tensors were written. Inference tensors have no version and are skipped."""
    try:
        increment_version(tensors)
    except RuntimeError:
        increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def owners(accumulators: Tensors) -> list[Tensor]:
    """Return one tensor per version counter of the accumulators: views share their base's."""
    bases = (tensor if tensor._base is None else tensor._base for tensor in accumulators)
    return list({id(tensor): tensor for tensor in bases}.values())


class PreparedAccumulation:
    """An accumulation into accumulators that are kept: checked, split and bound to backends once.

    Created by `functional.prepare`. It keeps the accumulators' memory alive and writes to it. After an
    accumulator's storage was swapped or resized (`.data = ...`, `resize_`), prepare again.
    """

    def __init__(
        self, accumulators: Tensors, backend: str = "auto", seed: int | None = None, offset: int = 0
    ) -> None:
        self._memory = checks.check_accumulators(accumulators)
        # Detached, so that a later `.data = ...` cannot free the memory that the backends use.
        self._accumulators = [tensor.detach() for tensor in accumulators]
        self._versions = owners(accumulators)
        self._parts = split(self._accumulators, self._accumulators, backend)
        self._runs = [part.backend.prepare(part.of(self._accumulators)) for part in self._parts]
        self._direct = len(self._parts) == 1 and self._parts[0].backend.name in registry.NATIVE
        self._seed = seed
        #: Number of the next addition if sums are rounded stochastically; else None.
        self.offset = None if seed is None else offset

    @property
    def backends(self) -> tuple[str, ...]:
        """Names of the backends that run, one per part."""
        return tuple(part.backend.name for part in self._parts)

    def __call__(
        self, gradients: Tensors, scale: Number = 1.0, *, overwrite: Flags = False, offset: int | None = None
    ) -> None:
        """Accumulate once. Arguments and errors as for `functional.scale_accumulate_`.

        offset: the number of this addition, at least `self.offset`, which is the default.
        """
        if self.offset is None:
            if offset is not None:
                raise ValueError(f"offset is {offset!r}, but this plan rounds to nearest; allowed: None")
            self._run(gradients, scale, overwrite, None)
            return
        number = checked_offset(self.offset if offset is None else offset)
        if number < self.offset:
            raise ValueError(
                f"offset is {number}; allowed: {self.offset} and above, since additions before have used the "
                "random bits of lower ones"
            )
        assert self._seed is not None
        self._run(gradients, scale, overwrite, Noise(self._seed, streams(len(self._accumulators), number)))
        self.offset = number + 1

    def _run(self, gradients: Tensors, scale: Number, overwrite: Flags, noise: Noise | None) -> None:
        if self._direct:
            refused = None
            try:
                self._runs[0](gradients, scale, overwrite, noise=noise)
            except Exception as error:
                refused = error
            if refused is not None:
                self._check(gradients, scale, overwrite)
                raise refused
        else:
            self._check(gradients, scale, overwrite)
            for part, run in zip(self._parts, self._runs, strict=True):
                run(part.of(gradients), scale, part.of(overwrite), noise=part.noise_of(noise))
        bump_versions(self._versions)

    def _check(self, gradients: Tensors, scale: Number, overwrite: Flags) -> None:
        checks.check_gradients(self._accumulators, gradients, scale, overwrite, self._memory)


#: The backends that have a kernel for rows.
_NAMES_FOR_ROWS = ("triton", "cpu", "eager")


def select_for_rows(
    device: torch.device, accumulator_dtype: torch.dtype, gradient_dtype: torch.dtype, backend: str = "auto"
) -> registry.Selection:
    """Return the backend that adds such gradients to rows, and why; errors as `registry.select`."""
    work = registry.Work("rows of a table", _NAMES_FOR_ROWS, device, accumulator_dtype, gradient_dtype)
    name, reason = registry.select_checked(_check_rows, backend, work)
    return registry.Selection(registry.get(name), reason)


def _check_rows(
    name: str, device: torch.device, gradient: torch.dtype, accumulator: torch.dtype
) -> str | None:
    return selftest.checks().rows(registry.get(name), device, gradient, accumulator)


def select_for_table(table: Tensor, gradient_dtype: torch.dtype, backend: str = "auto") -> registry.Selection:
    """As `select_for_rows`, for a table that may be in any layout."""
    dense = table.shape[1] <= 1 or table.stride(1) == 1
    if not (checks.is_plain(table) and dense) and registry.requested(backend)[0] == "auto":
        why = "plain torch: the elements of a row do not lie side by side, or it is no ordinary tensor"
        return registry.Selection(registry.get("eager"), why)
    return select_for_rows(table.device, table.dtype, gradient_dtype, backend)


def accumulate_rows_(
    table: Tensor,
    indices: Tensor,
    gradients: Tensor,
    scale: Number = 1.0,
    *,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    backend: str = "auto",
) -> None:
    """table[r] <- table[r] + scale * (the sum of the gradients of row r), for each row that is named.

    A row's gradients are added in runs of 64, and then the runs' sums, in the order of the indices, in
    float32 (float64 for a float64 table). One fused multiply-add takes the sum into the row, which is rounded
    once. Autograd does not record it; the table's version is bumped.

    Arguments are those of an embedding's backward. They are not checked here: the native operator refuses
    unsafe ones before anything is modified, and torch's operators refuse what they cannot do. If the elements
    of a row are not contiguous, "auto" is plain torch, and no other backend can run; such gradients are
    copied. On a GPU a number that is no row is skipped (eager: torch asserts on the device).
    """
    add = select_for_table(table, gradients.dtype, backend).backend.accumulate_rows_
    assert add is not None
    padding = -1 if padding_idx is None else padding_idx % table.shape[0]
    columns = table.shape[1]
    flat = indices.reshape(-1)
    fresh = gradients.detach().reshape(flat.shape[0], columns)
    if columns > 1 and fresh.stride(1) != 1:
        fresh = fresh.contiguous()
    add(table, flat, fresh, scale, padding, scale_grad_by_freq)
    bump_versions([table])
