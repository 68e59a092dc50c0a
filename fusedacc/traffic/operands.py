"""What one operator call reads and writes: each operand once.

Compulsory bytes: what an ideal kernel with a perfect cache would move. A tensor that is passed twice is read
once; an expanded one only in the elements it really has; temporaries inside an operator count nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._ops import OpOverload


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
        self.results = list(_tensors(result))

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    def tensors(self, name: str) -> list[Tensor]:
        return list(_tensors(self.values.get(name)))


Rule = Callable[[Call], "list[Operand] | None"]


def name_of(func: OpOverload) -> str:
    """The operator's name with its namespace, without the overload."""
    return func._schema.name


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    return _tensors(values)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


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
    found: dict[tuple, Operand] = {}
    partial = partial or {}
    for argument in call.arguments:
        changed = argument.alias_info is not None and argument.alias_info.is_write
        written = changed and argument.name not in kept
        read = not (argument.name in unread or argument.is_out or (written and overwrites))
        for tensor in call.tensors(argument.name):
            operand = found.setdefault(identity(tensor), Operand(tensor))
            size = bytes_of(tensor)
            if read:
                operand.read = max(operand.read, min(size, partial.get(argument.name, size)))
            if written:
                operand.written = size
    for tensor in call.results:
        if identity(tensor) not in found:
            found[identity(tensor)] = Operand(tensor, written=bytes_of(tensor))
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
