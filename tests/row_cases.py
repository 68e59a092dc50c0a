"""Inputs, the float64 oracle and its tolerance for tests of sums into the rows of a table."""

import torch
from cases import random_tensor
from torch import Tensor

from fusedacc.kernels import dtypes
from fusedacc.kernels.constants import ROW_RUN

#: (indices, rows, columns, a description of the indices).
SHAPES = [
    ((), 3, 4, "random"),
    ((0,), 3, 4, "random"),
    ((2, 0), 3, 4, "random"),
    ((5,), 7, 1, "random"),
    ((2, 3, 4), 50, 33, "random"),
    ((9,), 2, 2000, "random"),
    ((40,), 1, 5, "random"),
    ((20,), 30, 64, "one"),
    ((63,), 4, 8, "one"),
    ((64,), 4, 8, "one"),
    ((65,), 4, 8, "one"),
    ((150,), 6, 17, "mixed"),
]
SHAPE_IDS = ["x".join(map(str, shape)) + f"-{rows}x{columns}-{kind}" for shape, rows, columns, kind in SHAPES]
#: Layouts of a table: contiguous rows, rows apart, rows apart by multiples of 16 bytes, and an offset of one
#: element.
TABLES = ("contiguous", "apart", "aligned apart", "misaligned")
#: Layouts of gradients. In an expanded one all rows share memory.
GRADIENTS = ("contiguous", "apart", "misaligned", "transposed", "expanded")


def random_indices(shape, rows, kind, generator, dtype=torch.int64) -> Tensor:
    """Return random rows, a single row, or two frequent rows among random ones."""
    indices = torch.randint(0, rows, tuple(shape), generator=generator)
    if kind == "one":
        indices = torch.full(tuple(shape), rows - 1)
    elif kind == "mixed":
        die = torch.rand(tuple(shape), generator=generator)
        indices = torch.where(die < 0.45, rows - 1, torch.where(die < 0.9, 0, indices))
    return indices.to(dtype)


def lay_out(matrix: Tensor, layout: str) -> Tensor:
    """Return a tensor equal to `matrix` in the named layout. For "expanded", all rows equal the first one."""
    rows, columns = matrix.shape
    if layout == "contiguous":
        return matrix.clone()
    if layout == "transposed":
        return matrix.t().contiguous().t()
    if layout == "expanded":
        return (matrix[:1] if rows else matrix.new_zeros(1, columns)).clone().expand(rows, columns)
    shift, stride = {
        "apart": (0, columns + 3),
        "aligned apart": (8, (columns + 7) // 8 * 8 + 8),
        "misaligned": (1, columns),
    }[layout]
    room = matrix.new_zeros(shift + rows * stride + 8)
    view = room[shift : shift + rows * stride].view(rows, stride)[:, :columns]
    return view.copy_(matrix)


def random_case(case, pair, generator, table_layout="contiguous", gradient_layout="contiguous", device="cpu"):
    """Return a table, indices and gradients."""
    shape, rows, columns, kind = case
    indices = random_indices(shape, rows, kind, generator)
    table = lay_out(random_tensor((rows, columns), pair[1], generator, device=device), table_layout)
    fresh = random_tensor((indices.numel(), columns), pair[0], generator, device=device)
    return table, indices.to(device), lay_out(fresh, gradient_layout).view(*shape, columns)


def expected(table, indices, gradients, scale, padding_idx=None, by_frequency=False) -> tuple[Tensor, Tensor]:
    """Return the sums in float64 before rounding, and how far from them a correct result may be.

    Each addition of a row's gradients allows half a unit of the partial sum, which is at most the sum of
    their magnitudes. A mean, the multiply-add and the result each allow one more rounding.
    """
    table, indices, gradients = table.cpu(), indices.cpu(), gradients.cpu()
    wide_dtype = dtypes.computation_dtype(table.dtype)
    wide = torch.finfo(wide_dtype)
    own = torch.finfo(table.dtype)
    columns = table.shape[1]
    flat, fresh = indices.reshape(-1).long(), gradients.detach().double().reshape(-1, columns)
    keep = flat != (padding_idx % table.shape[0] if padding_idx is not None else -1)
    flat, fresh = flat[keep], fresh[keep]
    zeros = torch.zeros(table.shape, dtype=torch.float64)
    sums = zeros.index_add(0, flat, fresh)
    magnitudes = zeros.index_add(0, flat, fresh.abs())
    counts = torch.bincount(flat, minlength=table.shape[0]).double()[:, None]
    additions = counts.clamp(max=ROW_RUN) + (counts / ROW_RUN).ceil()
    errors = magnitudes * additions * (wide.eps / 2)
    if by_frequency:
        sums, errors = sums / counts.clamp(min=1), errors / counts.clamp(min=1)
        errors = errors + sums.abs() * (wide.eps / 2)
    factor = torch.as_tensor(scale, dtype=torch.float64).cpu().to(wide_dtype).double()
    result = table.double() + factor * sums
    product = (factor * sums).abs()
    # Triton's interpreter and PyTorch's operators also round the product.
    rounding = (result.abs() + product) * (wide.eps / 2) + result.abs() * (own.eps / 2)
    least = own.smallest_normal * own.eps
    allowed = (errors * factor.abs() + rounding) * (1 + 4 * own.eps) + least
    # The oracle's own rounding errors: it adds one gradient at a time.
    own_errors = magnitudes * factor.abs() * counts + result.abs() + product
    allowed = allowed + own_errors * torch.finfo(torch.float64).eps
    return result, torch.where(counts > 0, allowed, 0.0)


def assert_rows(result, table, indices, gradients, scale, padding_idx=None, by_frequency=False) -> None:
    """Compare `result` with the oracle for `table` before the call. Other rows must keep their bits."""
    wanted, allowed = expected(table, indices, gradients, scale, padding_idx, by_frequency)
    error = (result.cpu().double() - wanted).abs()
    worst = (error - allowed).max().item() if error.numel() else 0.0
    assert worst <= 0.0, f"{gradients.dtype} into {table.dtype}: {worst} too far"
