"""The norm of a list of tensors from partial norms, over devices and backends."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import checks, reference, registry, torch_state
from .constants import norm_kind
from .dtypes import Tensors
from .lists import BackendShare, is_traced_natively, run_parts

#: Combines partial norms of one device to a norm of that dtype, and whether an element was not finite.
FinishOnDevice = Callable[[Tensors, torch.dtype], tuple[Tensor, Tensor]]


def norm_partials(tensors: Tensors, norm_type: float, backend: str) -> list[Tensor]:
    """Return the partial norms of all tensors: one vector per device and backend. Reads each tensor once."""

    def run(part: BackendShare) -> Tensor:
        return part.backend.norm_partials(part.of(tensors), norm_type)

    return run_parts(tensors, tensors, backend, lambda: checks.check_tensors(tensors), run)


def finish_norm(
    partials: Tensors, norm_type: float, dtype: torch.dtype, backend: str
) -> tuple[Tensor, Tensor]:
    """Return the norm in `dtype`, and 1.0 if an element was not finite, else 0.0; both 0-dim.

    partials: float64 vectors from `norm_partials` and accumulations. Results are on the first GPU, or on the
    first vector's device.
    """

    def finish_on_device(vectors: Tensors, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        wanted = backend if backend != "auto" or all(map(checks.is_plain, vectors)) else "eager"
        # A self-test of any dtype includes this.
        chosen = registry.select_untested(vectors[0].device, torch.float64, torch.float64, wanted)
        return chosen.finish_norm(vectors, norm_type, dtype)

    return _over_devices(partials, dtype, finish_on_device)


def _over_devices(
    partials: Tensors, dtype: torch.dtype, finish_on_device: FinishOnDevice
) -> tuple[Tensor, Tensor]:
    if not partials:
        return torch.zeros((), dtype=dtype), torch.zeros(())
    home = torch_state.common_device(partials)
    here = []
    for device in dict.fromkeys(vector.device for vector in partials):
        there = [vector for vector in partials if vector.device == device]
        if device == home:
            here += there
        else:
            # A float64 norm is a partial norm: only eight bytes are copied to another device.
            norm, _ = finish_on_device(there, torch.float64)
            here.append(torch_state.to_device(norm.reshape(1), home))
    return finish_on_device(here, dtype)


def norm_dtype(tensors: Tensors) -> torch.dtype:
    """Return float64 if one of the tensors is, else float32."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def _traced(tensors: Tensors, norm_type: float, backend: str) -> tuple[Tensor, Tensor]:
    """Return the graph under `torch.compile`: two operators per device, or plain torch."""

    def finish_on_device(vectors: Tensors, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if is_traced_natively(vectors[0].device, torch.float64, torch.float64, backend):
            return torch.ops.fusedacc.finish_norm(vectors, norm_type, dtype == torch.float64)
        return reference.finish_norm(vectors, norm_type, dtype)

    partials = []
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        here = [tensor.detach() for tensor in tensors if tensor.device == device]
        native = is_traced_natively(device, here[0].dtype, here[0].dtype, backend)
        partials.append((torch.ops.fusedacc if native else reference).norm_partials(here, norm_type))
    return _over_devices(partials, norm_dtype(tensors), finish_on_device)


def norm_and_nonfinite(
    tensors: Tensors, norm_type: float = 2.0, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return `functional.total_norm`, and from the same read whether an element was not finite: 1.0 or 0.0.

    The second is what torch's fused optimizers take as `found_inf`: 0-dim, float32. Both are on the first GPU
    if any tensor is on one, else on the CPU. Nothing waits for a device.
    """
    norm_type = norm_kind(norm_type).norm_type
    if torch.compiler.is_compiling():
        return _traced(tensors, norm_type, backend)
    return finish_norm(norm_partials(tensors, norm_type, backend), norm_type, norm_dtype(tensors), backend)


def norm_with_partials(
    tensors: Tensors, partials: list[Tensor], norm_type: float, dtype: torch.dtype, backend: str
) -> tuple[Tensor, Tensor]:
    """As `norm_and_nonfinite`, for tensors of any kind (dense, sparse, complex, subclasses) and partial
    norms.

    partials: partial norms of other tensors. dtype: float64 if one of all the tensors is, else float32.
    """
    ordinary = []
    norms = []
    for tensor in tensors:
        if checks.is_plain(tensor) and tensor.is_floating_point():
            ordinary.append(tensor)
        else:
            values = tensor.coalesce().values() if tensor.is_sparse else tensor
            values = values if values.is_complex() else values.double()
            norms.append(torch.linalg.vector_norm(values, norm_type).double().reshape(1))
    if ordinary:
        partials = partials + norm_partials(ordinary, norm_type, backend)
    return finish_norm(partials + norms, norm_type, dtype, backend)
