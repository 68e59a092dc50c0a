"""Inputs, oracle and tolerances that the tests of all backends share."""

from collections.abc import Iterable, Sequence

import pytest
import torch
from torch import Tensor

from fusedacc.kernels import checks, dtypes, library

#: Marks tests that need the compiled library.
native = pytest.mark.skipif(library.load_error() is not None, reason=str(library.load_error()))

#: (gradient dtype, accumulator dtype), in a fixed order.
PAIRS = sorted(dtypes.PAIRS, key=str)
PAIR_IDS = [f"{str(gradient)[6:]}-{str(accumulator)[6:]}" for gradient, accumulator in PAIRS]

#: Layouts without overlapping elements, which accumulators may have.
LAYOUTS = ("contiguous", "transposed", "gaps", "channels_last", "misaligned")
#: Also a layout with overlapping elements, which only gradients may have.
GRADIENT_LAYOUTS = (*LAYOUTS, "expanded")


def lay_out(values: Tensor, layout: str) -> Tensor:
    """Return a tensor equal to `values` in the named layout.

    For "expanded", all rows equal the first one.
    """
    if layout == "transposed":
        order = list(reversed(range(values.dim())))
        return values.permute(order).contiguous().permute(order)
    if layout == "gaps":
        room = torch.zeros((*values.shape[:-1], 2 * values.shape[-1] + 1) if values.dim() else (3,))
        room = room.to(values)
        view = room[..., 1::2] if values.dim() else room[1]
        return view.copy_(values)
    if layout == "channels_last":
        if values.dim() < 3:
            return values.clone(memory_format=torch.contiguous_format)
        return values.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "misaligned":
        room = torch.zeros(values.numel() + 1, dtype=values.dtype, device=values.device)
        return room[1:].view(values.shape).copy_(values)
    if layout == "expanded":
        return values[:1].clone().expand(values.shape) if values.dim() else values.clone()
    return values.clone(memory_format=torch.contiguous_format)


def random_tensor(
    shape: Sequence[int],
    dtype: torch.dtype,
    generator: torch.Generator,
    layout: str = "contiguous",
    device: str = "cpu",
) -> Tensor:
    """Return normally distributed values, generated on the CPU so that they are the same on every device."""
    values = torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)
    return lay_out(values.to(device), layout)


def random_lists(
    pairs: Sequence[tuple[torch.dtype, torch.dtype]],
    shapes: Sequence[Sequence[int]],
    generator: torch.Generator,
    *,
    layout: str = "contiguous",
    gradient_layout: str = "contiguous",
    device: str = "cpu",
) -> tuple[list[Tensor], list[Tensor]]:
    """Return accumulators and gradients: each shape with each dtype pair."""
    accumulators, gradients = [], []
    for gradient_dtype, accumulator_dtype in pairs:
        for shape in shapes:
            accumulators.append(random_tensor(shape, accumulator_dtype, generator, layout, device))
            gradients.append(random_tensor(shape, gradient_dtype, generator, gradient_layout, device))
    return accumulators, gradients


def bits(tensor: Tensor) -> Tensor:
    """Return the elements' bits as integers, to compare NaNs and signed zeros too."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def assert_same_bits(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    """Compare tensors, which may be on different devices."""
    for our, their in zip(ours, theirs, strict=True):
        assert torch.equal(bits(our.cpu()), bits(their.cpu()))


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return contiguous copies of the values."""
    return [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]


def exact(accumulator: Tensor, gradient: Tensor, scale: float | Tensor, overwrite: bool) -> Tensor:
    """Return the float64 oracle: the sum before it is rounded to float32 or to the accumulator's dtype.

    As the contract requires, the scale is first rounded to the dtype of the computation. For float32
    computations the oracle's error is at most 2^-53 of the larger term, because float64 represents the
    product of two float32 numbers exactly.
    """
    wide = dtypes.computation_dtype(accumulator.dtype)
    rounded = torch.as_tensor(scale, dtype=torch.float64).to(wide).to(gradient.device, torch.float64)
    product = gradient.double() * rounded
    return product if overwrite else accumulator.double() + product


def tolerance(
    accumulator: Tensor, gradient: Tensor, scale: float | Tensor, overwrite: bool, *, fused: bool = True
) -> Tensor:
    """Return how far each element of a correct result may be from `exact`.

    The tolerance is the sum of these errors:

      - half a unit in the last place of the accumulator's dtype, for the final rounding;
      - half a unit of float32, for the sum before it;
      - half a unit of the product, if the multiply-add is not fused;
      - one subnormal step;
      - half a unit of float64 for each of the oracle's two operations.
    """
    dtype = accumulator.dtype
    wide = dtypes.computation_dtype(dtype)
    value = exact(accumulator, gradient, scale, overwrite).abs()
    product = exact(accumulator, gradient, scale, True).abs()
    largest = value + product
    allowed = value * (torch.finfo(dtype).eps / 2)
    if dtype != wide:
        allowed = allowed + value * torch.finfo(wide).eps
    if not fused:
        allowed = allowed + product * (torch.finfo(wide).eps / 2) * (1 + torch.finfo(dtype).eps)
    subnormal = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return allowed + largest * torch.finfo(torch.float64).eps + subnormal


def assert_matches_oracle(
    results: Sequence[Tensor],
    accumulators: Sequence[Tensor],
    gradients: Sequence[Tensor],
    scale: float | Tensor,
    overwrite: bool | Sequence[bool],
    *,
    fused: bool = True,
) -> None:
    """Compare `results` with the oracle for the values of `accumulators` before the call."""
    flags = checks.overwrite_flags(overwrite, len(results))
    for index, (result, accumulator, gradient, flag) in enumerate(
        zip(results, accumulators, gradients, flags, strict=True)
    ):
        assert result.dtype == accumulator.dtype
        error = (result.double() - exact(accumulator, gradient, scale, flag)).abs()
        allowed = tolerance(accumulator, gradient, scale, flag, fused=fused)
        worst = (error - allowed).max().item() if error.numel() else 0.0
        assert worst <= 0.0, f"tensor {index} ({gradient.dtype} into {accumulator.dtype}): {worst} too far"
