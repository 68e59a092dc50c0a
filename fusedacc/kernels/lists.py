"""Who accumulates which tensors: lists split by device and backend, once for accumulators that stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import checks, registry, undispatched
from .constants import MAX_DIMS


@dataclass(frozen=True)
class Part:
    """The tensors, by index in the caller's lists, that one backend takes on one device."""

    backend: registry.Backend
    indices: tuple[int, ...]

    def of(self, values: Sequence) -> list:
        return [values[index] for index in self.indices]

    def flags(self, overwrite: bool | Sequence[bool]) -> bool | list[bool]:
        return overwrite if isinstance(overwrite, bool) else self.of(overwrite)


def split(accumulators: Sequence[Tensor], gradients: Sequence[Tensor], backend: str) -> list[Part]:
    """Parts of lists that `checks.check_lists` has passed, each of one device and backend.

    Under "auto", tensors that are no ordinary tensors (wrapper subclasses, meta tensors) or have more
    dimensions than the compiled operators loop over go to the eager backend.

    Raises:
        ValueError, RuntimeError: as `registry.select`.
    """
    registry.requested(backend)
    names: dict[tuple[torch.device, torch.dtype, torch.dtype, bool], str] = {}
    found: dict[tuple[torch.device, str], list[int]] = {}
    for index, (accumulator, gradient) in enumerate(zip(accumulators, gradients, strict=True)):
        plain = checks.is_plain(accumulator) and checks.is_plain(gradient)
        kind = (
            accumulator.device,
            accumulator.dtype,
            gradient.dtype,
            plain and gradient.dim() <= MAX_DIMS,
        )
        if kind not in names:
            wanted = backend if kind[-1] or backend != "auto" else "eager"
            names[kind] = registry.select(*kind[:-1], wanted).backend.name
        found.setdefault((accumulator.device, names[kind]), []).append(index)
    return [Part(registry.get(name), tuple(indices)) for (_, name), indices in found.items()]


def split_refused(
    accumulators: Sequence[Tensor],
    gradients: Sequence[Tensor],
    backend: str,
    chosen: registry.Backend | None,
    refused: Exception | None,
) -> list[Part]:
    """`split`, after `chosen` was tried on all of it and has raised `refused`, for nothing that checks know.

    It may have written before it did, so that it is never tried twice: raises `refused` where all would go to
    it again.
    """
    parts = split(accumulators, gradients, backend)
    if refused is not None and [part.backend for part in parts] == [chosen]:
        raise refused
    return parts


def traced_backend(
    device: torch.device, accumulator_dtype: torch.dtype, gradient_dtype: torch.dtype, backend: str
) -> str:
    """The name of the backend that goes into a graph of `torch.compile`.

    Raises:
        RuntimeError: Triton was asked for.
        ValueError, RuntimeError: as `registry.select`.
    """
    name = registry.select(device, accumulator_dtype, gradient_dtype, backend).backend.name
    if name == "triton" and backend == "triton":
        raise RuntimeError(
            "backend='triton' cannot be traced by torch.compile; allowed: 'auto', 'cuda', 'cpu', 'eager'"
        )
    return name


# What torch.compiler.assume_constant_result does, which would import the whole compiler (1.3 s) here and now.
traced_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]


def bump_versions(tensors: Sequence[Tensor]) -> None:
    """Tell autograd that the tensors were written. Inference tensors keep no version and are passed over."""
    try:
        increment_version(tensors)
    except RuntimeError:
        increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def owners(accumulators: Sequence[Tensor]) -> list[Tensor]:
    """One tensor for each version counter among `accumulators`: views of one base share the base's."""
    bases = (tensor if tensor._base is None else tensor._base for tensor in accumulators)
    return list({id(tensor): tensor for tensor in bases}.values())


class Plan:
    """An accumulation into accumulators that stay: checked, split and bound to their backends once.

    Made by `functional.prepare`. A plan keeps the accumulators' memory alive and keeps writing to it: after
    an accumulator's storage was swapped or resized (`.data = ...`, `resize_`), prepare again.
    """

    def __init__(self, accumulators: Sequence[Tensor], backend: str = "auto") -> None:
        self._memory = checks.check_accumulators(accumulators)
        # Detached, so that a later `.data = ...` cannot free the memory that the backends' pointers name.
        self._accumulators = [tensor.detach() for tensor in accumulators]
        self._versions = owners(accumulators)
        self._parts = split(self._accumulators, self._accumulators, backend)
        self._runs = [part.backend.prepare(part.of(self._accumulators)) for part in self._parts]
        self._direct = len(self._parts) == 1 and self._parts[0].backend.name in registry.SELF_CHECKING
        on_cpu = self.backends == ("cpu",)
        self._undispatched = on_cpu and undispatched.prepare(self._accumulators, self._versions)

    @property
    def backends(self) -> tuple[str, ...]:
        """The names of the backends that run, one per part."""
        return tuple(part.backend.name for part in self._parts)

    def check(
        self, gradients: Sequence[Tensor], scale: float | Tensor, overwrite: bool | Sequence[bool]
    ) -> None:
        """Raise what a call with these arguments would (see `checks.check_gradients`)."""
        checks.check_gradients(self._accumulators, gradients, scale, overwrite, self._memory)

    def __call__(
        self,
        gradients: Sequence[Tensor],
        scale: float | Tensor = 1.0,
        *,
        overwrite: bool | Sequence[bool] = False,
    ) -> None:
        """Accumulate once; arguments and errors as `functional.scale_accumulate_`."""
        quick = self._undispatched
        if not (quick and quick(gradients, scale, overwrite, 1.0, None)):
            self._pass(gradients, scale, overwrite, None)

    def with_norm(
        self,
        gradients: Sequence[Tensor],
        scale: float | Tensor = 1.0,
        *,
        overwrite: bool | Sequence[bool] = False,
        norm_type: float = 2.0,
    ) -> list[Tensor]:
        """The same, and the new sums' partial norms for `norms.finish`: as reading the sums again would give
        them, but without another pass where the backend can.

        Raises:
            TypeError, ValueError, RuntimeError: as a call; ValueError for another `norm_type` than 2 and inf.
        """
        norm_type = checks.check_norm_type(norm_type)
        if self._undispatched:
            partials = self._undispatched(gradients, scale, overwrite, 1.0, norm_type)
            if partials is not False:
                return [partials]
        return self._pass(gradients, scale, overwrite, norm_type)

    def _pass(
        self,
        gradients: Sequence[Tensor],
        scale: float | Tensor,
        overwrite: bool | Sequence[bool],
        norm_type: float | None,
    ) -> list[Tensor]:
        partials = []
        if self._direct:
            refused = None
            try:
                if norm_type is None:
                    self._runs[0](gradients, scale, overwrite)
                else:
                    partials = [self._runs[0].with_norm(gradients, scale, overwrite, norm_type)]
            except Exception as error:
                refused = error
            if refused is not None:
                self.check(gradients, scale, overwrite)
                raise refused
        else:
            self.check(gradients, scale, overwrite)
            for part, run in zip(self._parts, self._runs, strict=True):
                arguments = part.of(gradients), scale, part.flags(overwrite)
                if norm_type is None:
                    run(*arguments)
                else:
                    partials.append(run.with_norm(*arguments, norm_type))
        bump_versions(self._versions)
        return partials
