"""What one operator call reads and writes: each operand once.

Compulsory bytes: what an ideal kernel with a perfect cache would move. A tensor that is passed twice is read
once; an expanded one only in the elements it really has; temporaries inside an operator count nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor


@dataclass
class Operand:
    """Bytes read from and written to one tensor, or, where there is no tensor to hand, to some sum."""

    tensor: Tensor | None
    read: int = 0
    written: int = 0
    device: str = ""


class Call:
    """One operator call, its arguments by name, its results in a list."""

    def __init__(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        schema = func._schema
        self.func = func
        self.arguments = schema.arguments
        self.values: dict[str, Any] = {}
        for index, argument in enumerate(schema.arguments):
            given = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
            self.values[argument.name] = given
        self.results = list(tensors_in(result))

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    def tensors(self, name: str) -> list[Tensor]:
        return list(tensors_in(self.values.get(name)))


Rule = Callable[[Call], "list[Operand] | None"]


def name_of(func: OpOverload) -> str:
    """The operator's name with its namespace, without the overload."""
    return func._schema.name


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(*value)
        elif isinstance(value, dict):
            yield from tensors_in(*value.values())


def bytes_of(tensor: Tensor) -> int:
    """Bytes of the elements that a strided tensor really has: those of an expanded one are counted once."""
    if tensor.numel() == 0:
        return 0
    sizes = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    elements = math.prod(size for size, _ in sizes)
    reach = 1 + sum((size - 1) * abs(stride) for size, stride in sizes)  # windows that overlap
    return min(elements, reach) * tensor.element_size()


def whole(
    call: Call,
    unread: Sequence[str] = (),
    overwrites: bool = False,
    kept: Sequence[str] = (),
    partial: dict[str, int] | None = None,
) -> list[Operand]:
    """Each operand once: arguments read, those that the schema marks as changed written, results written.

    Args:
        call: the call.
        unread: arguments that are not read.
        overwrites: arguments that are changed in place are not read either.
        kept: arguments that the schema marks as changed and that are not.
        partial: bytes read of arguments that are read in part only.
    """
    found: list[Operand] = []
    partial = partial or {}
    for argument in call.arguments:
        changed = argument.alias_info is not None and argument.alias_info.is_write
        written = changed and argument.name not in kept
        read = not (argument.name in unread or argument.is_out or (written and overwrites))
        for tensor in call.tensors(argument.name):
            size = bytes_of(tensor)
            share = min(size, partial.get(argument.name, size))
            found.append(Operand(tensor, share if read else 0, size if written else 0))
    given = set(map(identity, tensors_in(call.values)))
    return merged([*found, *writes(result for result in call.results if identity(result) not in given)])


def reads(*values: Any) -> list[Operand]:
    """All tensors in these values, each read whole."""
    return [Operand(tensor, bytes_of(tensor)) for tensor in tensors_in(*values)]


def writes(tensors: Iterable[Tensor]) -> list[Operand]:
    """These tensors, each written whole."""
    return [Operand(tensor, written=bytes_of(tensor)) for tensor in tensors]


def has_data(tensor: Tensor) -> bool:
    """Whether the tensor's elements can be looked at now; on a GPU they are waited for."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def merged(operands: Iterable[Operand]) -> list[Operand]:
    """Each tensor once, with the most that is read and written of it."""
    found: dict[tuple, Operand] = {}
    for operand in operands:
        assert operand.tensor is not None
        known = found.setdefault(identity(operand.tensor), operand)
        known.read, known.written = max(known.read, operand.read), max(known.written, operand.written)
    return list(found.values())


def identity(tensor: Tensor) -> tuple:
    """Equal for two tensors that are the same elements in the same order."""
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
    )
