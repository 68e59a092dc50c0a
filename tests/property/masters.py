"""The oracle with float32 master weights: the inner optimizer updates them as ordinary parameters."""

from typing import Any

import torch
from torch import Tensor

from .collector import Collector
from .oracle import Loop


class MasterCollector(Collector):
    """The model keeps its parameters, which are the rounded master weights after each update."""

    def __init__(self, inner: torch.optim.Optimizer, loop: Loop) -> None:
        self.low = [list(group["params"]) for group in inner.param_groups]
        groups = [
            {**group, "params": [master_of(p) for p in group["params"]]} for group in inner.param_groups
        ]
        bare = type(inner)(groups)
        bare.defaults = inner.defaults
        super().__init__(bare, loop)

    @property
    def groups(self) -> list[list[Tensor]]:
        return self.low

    @property
    def masters(self) -> list[Tensor]:
        return [master for group in self.inner.param_groups for master in group["params"]]

    def clear(self, set_to_none: bool) -> None:
        for p in self.params:
            if p.grad is not None:
                p.grad = None if set_to_none else torch.zeros_like(p)

    def wide(self, p: Tensor) -> torch.dtype:
        return torch.float32

    def follow(self) -> None:
        """Copy elements of a parameter that the user has written into the master."""
        with torch.no_grad():
            for p, master in zip(self.params, self.masters, strict=True):
                written = p != master.to(p.dtype)
                master[written] = p[written].float()

    def apply(self, finals: list[Tensor | None]) -> None:
        self.follow()
        for master, final in zip(self.masters, finals, strict=True):
            master.grad = final
        self.inner.step()
        with torch.no_grad():
            for p, master, final in zip(self.params, self.masters, finals, strict=True):
                if final is not None:
                    p.copy_(master)

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.low.append(list(group["params"]))
        super().add_param_group({"params": [master_of(p) for p in group["params"]]})

    def master(self, p: Tensor) -> Tensor:
        return next(master for q, master in zip(self.params, self.masters, strict=True) if q is p)

    def append(self, params: list[Tensor], as_group: bool) -> None:
        super().append([master_of(p) for p in params], as_group)
        if as_group:
            self.low.append(list(params))
        else:
            self.low[0].extend(params)

    def remove(self, p: Tensor) -> None:
        super().remove(self.master(p))
        self.low = [[q for q in group if q is not p] for group in self.low]

    def replace(self, old: Tensor, new: Tensor) -> None:
        super().replace(self.master(old), master_of(new))
        self.low = [[new if q is old else q for q in group] for group in self.low]

    def resize(self, p: Tensor, data: Tensor) -> None:
        if p.shape != data.shape:
            super().resize(self.master(p), data.detach().float())
        p.data = data

    def state_dict(self) -> dict[str, Any]:
        self.follow()
        return super().state_dict() | {"masters": [master.detach().clone() for master in self.masters]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        with torch.no_grad():
            for master, saved in zip(self.masters, state["masters"], strict=True):
                master.copy_(saved)


def master_of(p: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(p.detach().float())
