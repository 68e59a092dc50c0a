"""Copies of a model and its optimizer to train in their place: of fake tensors, or real ones."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ..kernels.rounding_arguments import NEAREST, STOCHASTIC
from ..optimizer import AccumulatingOptimizer


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
    """How an optimizer is made for a copy. The wrapper is not kept: another may claim its parameters."""

    #: The optimizer that has the state.
    inner: Optimizer
    #: What the wrapper was made with; None for the stock loop.
    arguments: dict[str, Any] | None
    #: Whether the wrapper was made with `model=`.
    takes_model: bool


def recipe_of(optimizer: Optimizer | Recipe) -> Recipe:
    """That of an optimizer as it is now: the wrapper, or a bare one; a recipe as it is."""
    if isinstance(optimizer, Recipe):
        return optimizer
    if not isinstance(optimizer, AccumulatingOptimizer):
        return Recipe(optimizer, None, False)
    replaced = optimizer._parameter_set._replacements is not None
    return Recipe(optimizer.optimizer, arguments_of(optimizer), replaced)


def fake_copy(
    mode: FakeTensorMode,
    model: nn.Module,
    recipe: Recipe,
    windows: Sequence[int],
    device: torch.device,
) -> Copy:
    """A copy of fake tensors of `mode`, on `device`; nothing is allocated. Enter `mode` for its use.

    windows: micro-batches of each update to come, where the wrapper counts them.
    """

    def fake(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 and tensor.device.type == "cpu" and not tensor.requires_grad:
            with _disable_current_modes():
                value = tensor.item()
            return torch.tensor(value, dtype=tensor.dtype)  # whose value stays known, as a step's must be
        if tensor.device.type == device.type:
            return mode.from_tensor(tensor)
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    with mode, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        return _copy(model, recipe, windows, fake)


def real_copy(model: nn.Module, recipe: Recipe, windows: Sequence[int]) -> Copy:
    """A copy that can be trained and thrown away."""
    return _copy(model, recipe, windows, None)


def arguments_of(optimizer: AccumulatingOptimizer) -> dict[str, Any]:
    """What the wrapper was made with, but for the inner optimizer, the model and ranks."""
    window, parameters = optimizer._window, optimizer._parameter_set
    seed = optimizer._accumulators.noise.seed
    given = {
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
    return given


def _copy(
    model: nn.Module,
    recipe: Recipe,
    windows: Sequence[int],
    replaced: Callable[[Tensor], Tensor] | None,
) -> Copy:
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
        warnings.simplefilter("ignore")  # who made the wrapper has seen them
        return Copy(copied_model, AccumulatingOptimizer(copied, **given))


def _tensors(model: nn.Module, inner: Optimizer) -> Iterator[Tensor]:
    """All that a copy would allocate: of modules, also where they are no parameters and no buffers."""
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        yield from _of(vars(module))
    for group in inner.param_groups:
        yield from _of(group)
    for state in inner.state.values():
        yield from _of(state)


def _of(values: dict[str, Any]) -> Iterator[Tensor]:
    for value in values.values():
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
