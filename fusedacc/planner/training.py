"""The training step that is planned: batches of any size, copies of model and optimizer, and the loop."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map_with_path

from ..accumulators.reduction import reduction_of
from ..kernels.rounding import NEAREST, STOCHASTIC
from ..optimizer import AccumulatingOptimizer
from .allocations import ACCUMULATORS, ACTIVATIONS, GRADIENTS, OPTIMIZER, PARAMETERS, TEMPORARIES

#: The dimension that counts samples: for all tensors, or by path; None for a tensor without one.
BatchDims = int | Mapping[str, int | None]


class Batch:
    """One real batch, and how to make others of another size. Arguments and errors as those of `plan`.

    batch_dims: a dict names a tensor by its path (`"['mask']"`, `"[0]"`) or the last part of it (`"mask"`).
    Tensors that it does not name count samples in dimension 0.
    """

    def __init__(self, sample: Any, batch_dims: BatchDims = 0) -> None:
        self._sample = sample
        leaves, _ = tree_flatten_with_path(sample)
        tensors = {keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
        if not tensors:
            raise TypeError(f"sample_batch must hold a tensor, got {type(sample).__name__} without any")
        self._dims = {path: _dim(path, tensor, batch_dims) for path, tensor in tensors.items()}
        for name in batch_dims if isinstance(batch_dims, Mapping) else ():
            if not any(_named(path, name) for path in tensors):
                raise ValueError(
                    f"batch_dims names {name!r}, which is not in sample_batch; allowed: {', '.join(tensors)}"
                )
        sizes = {path: tensors[path].shape[dim] for path, dim in self._dims.items() if dim is not None}
        if not sizes:
            raise ValueError(f"batch_dims={batch_dims!r} leaves no tensor that counts samples")
        #: Samples in it.
        self.size, _ = Counter(sizes.values()).most_common(1)[0]
        odd = [path for path, size in sizes.items() if size != self.size]
        if odd:
            seen = ", ".join(
                f"{path}: {size} in dimension {self._dims[path]}" for path, size in sizes.items()
            )
            raise ValueError(
                f"sample_batch's tensors do not agree on the number of samples ({seen}); name the dimension "
                f"that counts them, or None where there is none, as batch_dims={{{odd[0]!r}: None}}"
            )
        if self.size == 0:
            raise ValueError("sample_batch has no samples; allowed: at least one")

    def drawn(self, size: int) -> Any:
        """Return a batch of `size` samples: the first ones, repeated if there are too few."""

        def draw(leaf: Tensor, dim: int) -> Tensor:
            if size <= self.size:
                return leaf.narrow(dim, 0, size).clone()
            return leaf.index_select(dim, torch.arange(size, device=leaf.device) % self.size)

        return self._map(draw, self._sample)

    def shapes(self, size: int, device: torch.device) -> Any:
        """Return empty tensors on a device with the shapes and dtypes of `drawn(size)`."""

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
        """Return the samples in each part if a batch of this layout is cut into parts of at most `size`."""
        return parts_of(Batch(batch, self._dims).size, size)

    def split(self, batch: Any, sizes: list[int]) -> list[Any]:
        """Return views of a batch of this layout, with `sizes[i]` samples in part i."""

        def part(size: int, end: int) -> Any:
            return self._map(lambda leaf, dim: leaf.narrow(dim, end - size, size), batch)

        return [part(size, end) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]

    def _map(self, change: Callable[[Tensor, int], Tensor], batch: Any) -> Any:
        def changed(path: Any, leaf: Any) -> Any:
            dim = self._dims.get(keystr(path)) if isinstance(leaf, Tensor) else None
            return leaf if dim is None else change(leaf, dim)

        return tree_map_with_path(changed, batch)


def parts_of(samples: int, size: int) -> list[int]:
    """Return the sizes of the parts of at most `size`; the last one may be smaller."""
    whole, rest = divmod(samples, size)
    return [size] * whole + [rest] * bool(rest)


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
            f"samples; give its own dimension, or None: batch_dims={{{path!r}: ...}}"
        )
    return dim


class Copy(NamedTuple):
    """A model and the optimizer that trains it: the wrapper, or a bare one."""

    model: nn.Module
    optimizer: Optimizer

    @property
    def inner(self) -> Optimizer:
        """The optimizer that has the state."""
        own = self.optimizer
        return own.optimizer if isinstance(own, AccumulatingOptimizer) else own


class Recipe(NamedTuple):
    """How to make an optimizer for a copy. Keeps no wrapper, so that another one can claim its parameters."""

    inner: Optimizer
    #: The wrapper's arguments, without the inner optimizer, the model and the ranks; None for the plain loop.
    arguments: dict[str, Any] | None
    #: Whether the wrapper was made with `model=`.
    takes_model: bool


def recipe_of(optimizer: Optimizer | Recipe) -> Recipe:
    """Return the recipe of an optimizer as it is now; return a recipe unchanged."""
    if isinstance(optimizer, Recipe):
        return optimizer
    if not isinstance(optimizer, AccumulatingOptimizer):
        return Recipe(optimizer, None, False)
    window, parameters = optimizer._window, optimizer._parameter_set
    seed = optimizer._accumulators.noise.seed
    arguments = {
        "gradient_accumulation_steps": window.schedule,
        "reduction": window.reduction.name,
        "accumulate_dtype": optimizer._accumulate_dtype,
        "rounding": NEAREST if seed is None else STOCHASTIC,
        "seed": seed,
        **dataclasses.asdict(optimizer._update_settings),
        "master_weights": optimizer._masters is not None,
        "keep_casts": parameters.casts is not None,
        "backend": optimizer._accumulators.backend,
        "private_gradients": window.private,
    }
    return Recipe(optimizer.optimizer, arguments, parameters._replacements is not None)


def fake_copy(
    mode: FakeTensorMode, model: nn.Module, recipe: Recipe, windows: Sequence[int], device: torch.device
) -> Copy:
    """Return a copy made of fake tensors of `mode` on `device`. Enter `mode` to use it.

    windows: micro-batches of each update to come, for a wrapper that counts them.
    """

    def fake(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 and tensor.device.type == "cpu" and not tensor.requires_grad:
            with _disable_current_modes():
                value = tensor.item()
            return torch.tensor(value, dtype=tensor.dtype)  # the value stays known, as of an optimizer's step
        if tensor.device.type == device.type:
            return mode.from_tensor(tensor)
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    with mode, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        return copy_of(model, recipe, windows, fake)


def copy_of(
    model: nn.Module,
    recipe: Recipe,
    windows: Sequence[int],
    replaced: Callable[[Tensor], Tensor] | None = None,
) -> Copy:
    """Return a copy to train and throw away. `replaced` makes its tensors; by default they are copied."""
    inner, given = recipe.inner, recipe.arguments
    memo: dict[int, Any] = {}
    if replaced is not None:
        for tensor in _tensors(model, inner):
            memo.setdefault(id(tensor), replaced(tensor))
    copied_model = copy.deepcopy(model, memo)
    copied_model.zero_grad(set_to_none=True)
    copied = copy.deepcopy(inner, memo)
    if given is None:
        return Copy(copied_model, copied)
    given = dict(given)
    if given["gradient_accumulation_steps"] is not None:
        given["gradient_accumulation_steps"] = lambda updates: windows[min(updates, len(windows) - 1)]
    given["model"] = copied_model if recipe.takes_model else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user has seen them
        return Copy(copied_model, AccumulatingOptimizer(copied, **given))


def _tensors(model: nn.Module, inner: Optimizer) -> Iterator[Tensor]:
    """Yield all tensors that a copy would allocate, also those of modules that are not registered."""
    yield from model.parameters()
    yield from model.buffers()
    for values in (*map(vars, model.modules()), *inner.param_groups, *inner.state.values()):
        yield from (leaf for leaf in tree_leaves(list(values.values())) if isinstance(leaf, Tensor))


#: The loss of a batch, a 0-dim tensor.
LossFunction = Callable[[nn.Module, Any], Tensor]
#: Called with the phase that begins: "forward", "backward" or "update".
Phase = Callable[[str], contextlib.AbstractContextManager[None]]
#: Micro-batches per window that need to run: the first and the last. Those between are like the last.
MICRO_BATCHES = 2
#: The kind of newly allocated memory, by phase.
KIND_IN = {"forward": ACTIVATIONS, "backward": TEMPORARIES, "update": TEMPORARIES}


def windows_of(steps: int) -> tuple[int, ...]:
    """Return the windows to run: one that creates the state, then one like those of `steps` micro-batches."""
    return 1, min(steps, MICRO_BATCHES)


def models_own_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return `model(**batch).loss`, as in Transformers."""
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"loss_fn=None calls model(**sample_batch).loss, and sample_batch is a {type(batch).__name__}; "
            "allowed: a dict, or a loss_fn(model, batch) that returns the loss"
        )
    return model(**batch).loss


def train(
    copy: Copy,
    draw: Callable[[], Any],
    loss_fn: LossFunction,
    windows: Sequence[int],
    phase: Phase,
    look: Callable[[], None],
    in_flight: int = 1,
) -> None:
    """Run whole windows, each with an update at its end.

    windows: micro-batches of each window; the wrapper's schedule must match. draw: makes a micro-batch. look:
    called between phases, when memory may have got a new use. in_flight: forward passes before the first
    backward pass, as in a pipeline schedule; the wrapper counts all of them as one micro-batch.
    """
    model, optimizer = copy
    wrapper = optimizer if isinstance(optimizer, AccumulatingOptimizer) else None
    counted = wrapper is not None and wrapper.gradient_accumulation_steps is not None
    weighted = wrapper is not None and reduction_of(wrapper.reduction).weighs
    look()
    for steps in windows:
        for step in range(steps):
            around: Any = wrapper.accumulate(weight=1.0) if wrapper and weighted else contextlib.nullcontext()
            with around:
                with phase("forward"):
                    losses = [_checked_loss(loss_fn(model, draw())) for _ in range(in_flight)]
                    if not counted and steps > 1:
                        losses = [loss / steps for loss in losses]
                with phase("backward"):
                    while losses:
                        losses.pop(0).backward()
                look()
                if counted or step == steps - 1:
                    with phase("update"):
                        optimizer.step()
            look()
            if counted or step == steps - 1:
                optimizer.zero_grad()


def _checked_loss(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"loss_fn must return the loss, a 0-dim tensor; got {found}")
    return loss


def held(copy: Copy) -> dict[str, list[Tensor]]:
    """Return the tensors that outlive a micro-batch, by kind."""
    model, optimizer = copy
    sums: list[Any] = []
    state = [value for own in copy.inner.state.values() for value in own.values()]
    if isinstance(optimizer, AccumulatingOptimizer):
        sums = [optimizer._accumulators.grads.current(slot) for slot in optimizer._slots]
        state += optimizer._masters.tensors() if optimizer._masters is not None else []
    return {
        GRADIENTS: [p.grad for p in model.parameters() if p.grad is not None],
        ACCUMULATORS: [value for value in sums if isinstance(value, Tensor)],
        OPTIMIZER: [value for value in state if isinstance(value, Tensor)],
        PARAMETERS: [*model.parameters(), *model.buffers()],
    }
