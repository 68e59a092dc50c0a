"""Sketches: fixed random linear maps of gradients to a few numbers.

A gradient is taken as a nearly square matrix G. Its sketch is A' G B, where A and B have 8 columns of random
signs: 64 numbers, however large the parameter is. The map is linear, so the sketch of a sum is the sum of the
sketches. This is a random projection in the sense of Johnson and Lindenstrauss, with the signs of Achlioptas
(2003), as a product of two small maps, so that it reads each element once and needs no large matrix.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .memory import allocate

#: Columns of signs on each side of the matrix.
COLUMNS = 8
#: Numbers in a sketch. A vector gets all of them from one side.
NUMBERS = COLUMNS * COLUMNS
#: A longer vector is taken as a matrix too, because its signs would take 512 bytes an element.
LONGEST_VECTOR = 2**12
#: Elements that are copied to float64 at a time: 1 MB on a CPU. On other devices a kernel launch costs more.
CPU_CHUNK, DEVICE_CHUNK = 2**17, 2**20


class SketchMap:
    """Maps gradients to sketches. All processes use the same signs, so that shards of all ranks add up."""

    def __init__(self) -> None:
        self._signs: dict[tuple[int, int, torch.device], Tensor] = {}
        #: By device: memory for a chunk in float64, and for its product with one side. New memory in each
        #: call would fragment the heap.
        self._chunks: dict[torch.device, Tensor] = {}
        self._products: dict[torch.device, Tensor] = {}

    def sketch(self, gradient: Tensor, shape: torch.Size, first_row: int = 0) -> Tensor:
        """Return the sketch of a gradient, or of a shard of one.

        Args:
            gradient: the gradient, or consecutive rows (along dimension 0) of it; strided or sparse. An empty
                one counts as 0.
            shape: the shape of the whole gradient.
            first_row: where the rows begin. The sketches of all shards add up to that of the whole.

        Returns:
            A float64 vector of at most 64 numbers, on the gradient's device.
        """
        gradient = gradient.detach()
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        dims = tuple(shape) or (1,)
        if gradient.is_complex():
            gradient, dims = torch.view_as_real(gradient.resolve_conj()), (*dims, 2)
        split = _square_split(dims)
        rows, columns = math.prod(dims[:split]), math.prod(dims[split:])
        first = first_row * math.prod(dims[1:split])
        if columns == 1 and rows > LONGEST_VECTOR:
            columns = math.isqrt(rows)
            rows = -(-rows // columns)
            first, gradient = _pad_to_rows(gradient.reshape(-1), first, columns)
        left = self._random_signs(rows, COLUMNS if columns > 1 else NUMBERS, gradient.device)[first:]
        size = left.shape[1] * columns
        product = _reserve(self._products, size, gradient.device).view(left.shape[1], columns).zero_()
        if gradient.numel():
            self._add_product(product, left, gradient.reshape(-1, columns))
        return (product @ self._random_signs(columns, COLUMNS, gradient.device)).flatten()

    def _add_product(self, result: Tensor, left: Tensor, matrix: Tensor) -> None:
        """Add left' matrix to `result`, by chunks of rows."""
        columns = matrix.shape[1]
        limit = CPU_CHUNK if matrix.device.type == "cpu" else DEVICE_CHUNK
        rows = max(1, limit // columns)
        buffer = _reserve(self._chunks, min(rows, len(matrix)) * columns, matrix.device)
        for start in range(0, len(matrix), rows):
            chunk = matrix[start : start + rows]
            copy = buffer[: chunk.numel()].view(chunk.shape)
            copy.copy_(chunk)
            result.addmm_(left[start : start + len(chunk)].T, copy)

    def _random_signs(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """Return +-1/sqrt(columns), or the identity if that has no more columns. Cached."""
        key = rows, columns, device
        if key not in self._signs:
            if rows <= columns:
                signs = torch.eye(rows, dtype=torch.float64, device="cpu")
            else:
                # Its own generator leaves the script's random numbers alone.
                generator = torch.Generator("cpu").manual_seed(rows)
                bits = torch.randint(
                    0, 2, (rows, columns), generator=generator, device="cpu", dtype=torch.int8
                )
                signs = bits.double().mul_(2).sub_(1).div_(math.sqrt(columns))
            self._signs[key] = allocate(tuple(signs.shape), device).copy_(signs)
        return self._signs[key]


def _reserve(buffers: dict[torch.device, Tensor], numel: int, device: torch.device) -> Tensor:
    """Return float64 memory of this size from a buffer, which is made larger if it has to."""
    buffer = buffers.get(device)
    if buffer is None or buffer.shape[0] < numel:
        buffer = buffers[device] = allocate((numel,), device)
    return buffer[:numel]


def _pad_to_rows(vector: Tensor, first: int, columns: int) -> tuple[int, Tensor]:
    """Pad a part of a vector with zeros to whole rows of a matrix.

    Args:
        vector: the part.
        first: where it begins in the whole vector.
        columns: length of a row.

    Returns:
        The number of its first row, and the rows.
    """
    row, before = divmod(first, columns)
    after = -(before + vector.numel()) % columns
    return row, nn.functional.pad(vector, (before, after)) if vector.numel() else vector


def _square_split(dims: tuple[int, ...]) -> int:
    """Return how many leading dimensions are rows, so that the matrix is as square as possible."""
    return min(
        range(1, len(dims) + 1), key=lambda split: max(math.prod(dims[:split]), math.prod(dims[split:]))
    )
