"""A batch of any nest of tensors: which dimension counts its samples, and the same with more or fewer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_with_path

#: Where samples are counted: a dimension for all tensors, or for some by their path, None where nowhere.
BatchDims = int | Mapping[str, int | None]


class Batch:
    """One real batch, and how to draw others from it.

    Args:
        sample: a tensor, or a nest of tuples, lists and dicts of them; other leaves stay as they are.
        batch_dims: the dimension of every tensor that counts samples; or by a tensor's path, as
            `"['mask']"` or `"[0]"`, or the last part of it, `"mask"`, its own; None: it has none. Tensors
            that are not named have it first.

    Raises:
        TypeError: there is no tensor, or `batch_dims` is of the wrong kind.
        ValueError: the tensors do not agree on the number of samples, or a name or dimension is none of
            theirs.
    """

    def __init__(self, sample: Any, batch_dims: BatchDims = 0) -> None:
        self._sample = sample
        leaves, _ = tree_flatten_with_path(sample)
        tensors = {keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
        if not tensors:
            raise TypeError(f"sample_batch must hold a tensor, got {type(sample).__name__} without any")
        self._dims = {path: _dim(path, tensor, batch_dims) for path, tensor in tensors.items()}
        _check_names(batch_dims, tensors)
        sizes = {path: tensors[path].shape[dim] for path, dim in self._dims.items() if dim is not None}
        if not sizes:
            raise ValueError(f"batch_dims={batch_dims!r} leaves no tensor that counts samples")
        if len(set(sizes.values())) > 1:
            raise ValueError(_disagreement(sizes, self._dims))
        #: Samples in it.
        self.size = next(iter(sizes.values()))
        if self.size == 0:
            raise ValueError("sample_batch has no samples; allowed: at least one")

    def drawn(self, size: int) -> Any:
        """The same nest with so many samples: the first, and where there are fewer all of them again."""

        def draw(path: Any, leaf: Any) -> Any:
            dim = self._dims.get(keystr(path)) if isinstance(leaf, Tensor) else None
            if dim is None:
                return leaf
            if size <= self.size:
                return leaf.narrow(dim, 0, size).clone()
            return leaf.index_select(dim, torch.arange(size, device=leaf.device) % self.size)

        return tree_map_with_path(draw, self._sample)

    def shapes(self, size: int, device: torch.device) -> Any:
        """Empty tensors of the shapes and dtypes of `drawn(size)`, made on a device."""

        def make(path: Any, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            shape, dim = list(leaf.shape), self._dims[keystr(path)]
            if dim is not None:
                shape[dim] = size
            made = torch.empty(shape, dtype=leaf.dtype, device=device)
            return made.requires_grad_() if leaf.requires_grad else made

        return tree_map_with_path(make, self._sample)

    def sizes(self, batch: Any, size: int) -> list[int]:
        """The samples of each part of a batch laid out as this one, cut into parts of at most `size`."""
        whole, rest = divmod(Batch(batch, self._dims).size, size)
        return [size] * whole + [rest] * bool(rest)

    def split(self, batch: Any, sizes: list[int]) -> list[Any]:
        """Views of a batch that is laid out as this one, each of so many samples, in turn."""
        starts = [sum(sizes[:index]) for index in range(len(sizes))]

        def part(start: int, size: int) -> Any:
            def cut(path: Any, leaf: Any) -> Any:
                dim = self._dims.get(keystr(path)) if isinstance(leaf, Tensor) else None
                return leaf if dim is None else leaf.narrow(dim, start, size)

            return tree_map_with_path(cut, batch)

        return [part(start, size) for start, size in zip(starts, sizes, strict=True)]


def _named(path: str, name: str) -> bool:
    return path == name or path.endswith((f"['{name}']", f".{name}"))


def _dim(path: str, tensor: Tensor, batch_dims: BatchDims) -> int | None:
    dim: Any = batch_dims
    if isinstance(batch_dims, Mapping):
        found = [own for name, own in batch_dims.items() if _named(path, name)]
        dim = found[0] if found else 0
    if dim is None:
        return None
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"batch_dims must be an int, or a dict of ints and None; got {batch_dims!r}")
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            f"sample_batch{path} has shape {tuple(tensor.shape)}, and so no dimension {dim} that counts "
            f"samples; name its own, or None if it has none: batch_dims={{{path!r}: ...}}"
        )
    return dim


def _check_names(batch_dims: BatchDims, tensors: Mapping[str, Tensor]) -> None:
    if isinstance(batch_dims, Mapping):
        for name in batch_dims:
            if not any(_named(path, name) for path in tensors):
                raise ValueError(
                    f"batch_dims names {name!r}, which sample_batch has not; allowed: {', '.join(tensors)}"
                )


def _disagreement(sizes: Mapping[str, int], dims: Mapping[str, int | None]) -> str:
    most, _ = Counter(sizes.values()).most_common(1)[0]
    odd = next(path for path, size in sizes.items() if size != most)
    seen = ", ".join(f"{path}: {size} in dimension {dims[path]}" for path, size in sizes.items())
    return (
        f"sample_batch's tensors do not agree on the number of samples ({seen}); name the dimension that "
        f"counts them, or None where there is none, as batch_dims={{{odd!r}: None}}"
    )
