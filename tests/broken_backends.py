"""Wrong kernels for self-tests, by what is wrong with them."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fusedacc.kernels import registry, selftest
from fusedacc.kernels.registry import Backend

Broken = Callable[[Backend], dict[str, Any]]


def _adds(change: Callable[..., None]) -> Broken:
    """A backend that spoils each sum after it was right: `change(accumulator, gradient, scale)`."""

    def broken(right: Backend) -> dict[str, Any]:
        def accumulate_(accumulators, gradients, scale, *others, **named):
            found = right.accumulate_(accumulators, gradients, scale, *others, **named)
            for accumulator, gradient in zip(accumulators, gradients, strict=True):
                change(accumulator, gradient, scale)
            return found

        return {"accumulate_": accumulate_}

    return broken


def _spoils_the_tail(accumulator, gradient, scale) -> None:
    if accumulator.dim() == 1 and accumulator.numel() % 8:
        accumulator[-1] += 0.5


def _spoils_the_misaligned(accumulator, gradient, scale) -> None:
    if accumulator.data_ptr() % 16:
        accumulator.view(-1)[0] += 0.5


def _writes_behind_the_end(accumulator, gradient, scale) -> None:
    if accumulator.dim() == 1:
        torch.as_strided(accumulator, (accumulator.numel() + 1,), (1,))[-1] = 0.0


def _ignores_the_scale_on_the_device(accumulator, gradient, scale) -> None:
    if isinstance(scale, torch.Tensor):
        accumulator.add_(gradient.to(accumulator.dtype), alpha=1.0 - 0.375)


def _reads_what_it_overwrites(right: Backend) -> dict[str, Any]:
    def accumulate_(accumulators, gradients, scale, overwrite, *others, **named):
        if isinstance(overwrite, list):
            for accumulator, flag in zip(accumulators, overwrite, strict=True):
                if flag:
                    accumulator.mul_(0.0)
            overwrite = False
        return right.accumulate_(accumulators, gradients, scale, overwrite, *others, **named)

    return {"accumulate_": accumulate_}


def _norm_without_the_last(right: Backend) -> dict[str, Any]:
    return {"norm_partials": lambda tensors, norm_type: right.norm_partials(tensors[:-1], norm_type)}


def _norm_of_squares(right: Backend) -> dict[str, Any]:
    def finish_norm(partials, norm_type, dtype):
        norm, not_finite = right.finish_norm(partials, norm_type, dtype)
        return norm.square(), not_finite

    return {"finish_norm": finish_norm}


def _overlooks_infinity(right: Backend) -> dict[str, Any]:
    def finish_norm(partials, norm_type, dtype):
        norm, not_finite = right.finish_norm(partials, norm_type, dtype)
        return norm, torch.zeros_like(not_finite)

    return {"finish_norm": finish_norm}


def _prepared_adds_once(right: Backend) -> dict[str, Any]:
    def prepare(accumulators):
        run = right.prepare(accumulators)
        return lambda gradients, scale, overwrite, **named: overwrite and run(gradients, scale, overwrite)

    return {"prepare": prepare}


def _takes_each_row_once(right: Backend) -> dict[str, Any]:
    def accumulate_rows_(table, indices, gradients, *others):
        first = {int(row): place for place, row in enumerate(indices.flip(0))}
        kept = len(indices) - 1 - torch.tensor(list(first.values()), device=indices.device)
        right.accumulate_rows_(table, indices[kept], gradients[kept], *others)

    return {"accumulate_rows_": accumulate_rows_}


def _rounds_to_nearest(right: Backend) -> dict[str, Any]:
    def accumulate_(accumulators, gradients, scale, overwrite, beta=1.0, noise=None):
        right.accumulate_(accumulators, gradients, scale, overwrite, beta)

    return {"accumulate_": accumulate_}


def _raises(right: Backend) -> dict[str, Any]:
    def accumulate_(*_, **__):
        raise OSError("no such device\nand more lines")

    return {"accumulate_": accumulate_}


#: What is wrong: the backend's functions, and what the self-test says of them.
BROKEN: dict[str, tuple[Broken, str]] = {
    "tail": (_adds(_spoils_the_tail), "addition: "),
    "misaligned": (_adds(_spoils_the_misaligned), "addition: "),
    "outside": (_adds(_writes_behind_the_end), "addition: 26 of "),
    "device scale": (_adds(_ignores_the_scale_on_the_device), "scale on the device: "),
    "overwritten": (_reads_what_it_overwrites, "overwriting: "),
    "prepared": (_prepared_adds_once, "prepared list: "),
    "norm": (_norm_without_the_last, "norm: the 2-norm is "),
    "joined norm": (_norm_of_squares, "norm is "),
    "infinity": (_overlooks_infinity, "norm: with an inf element it is inf; not finite: 0.0"),
    "rounding": (_rounds_to_nearest, "stochastic rounding: "),
    "raises": (_raises, "OSError: no such device"),
}
#: The same for rows of a table.
BROKEN_ROWS = {"rows": (_takes_each_row_once, "2600 elements are wrong")}


def broken(backend: Backend, what: str) -> Backend:
    """A copy of a backend with that mistake."""
    return replace(backend, **(BROKEN | BROKEN_ROWS)[what][0](backend))


@contextlib.contextmanager
def breaks(name: str, what: str) -> Iterator[None]:
    """The backend of that name has that mistake."""
    right = registry.get(name)
    wrong = broken(replace(right), what)
    changed = {field.name: getattr(wrong, field.name) for field in fields(Backend)}
    with mock.patch.multiple(right, **changed):
        yield


@contextlib.contextmanager
def self_tests(folder: Path, *types: str) -> Iterator[None]:
    """Self-tests run on devices of these types, and nothing was found before."""
    changed = {selftest.VARIABLE: "1", "FUSEDACC_CACHE": str(folder)}
    with (
        mock.patch.dict(os.environ, changed),
        mock.patch.object(selftest, "DEVICE_TYPES", types or ("cuda",)),
    ):
        selftest.forget()
        yield
    selftest.forget()
