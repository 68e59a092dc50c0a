"""An action of a user, as plain data."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Event:
    kind: str
    args: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Event({self.kind!r}, {self.args})"

    def get(self, name: str, default: Any = None) -> Any:
        return self.args.get(name, default)
