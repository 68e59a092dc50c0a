"""Events in which a user changes p.grad, param_groups or shapes by hand."""

from typing import Any

import torch
from torch import Tensor

from . import edits, regrouping
from .event import Event
from .models import VOCABULARY


class Changes:
    """The events of a `World` in which a user changes something by hand."""

    def chosen(self, event: Event) -> list[int]:
        """Return the indices of the parameters that an event changes: one or all."""
        count = len(self.owned)
        return list(range(count)) if event.get("index") is None else [event.get("index") % count]

    def do_edit(self, event: Event) -> None:
        change, road, value = event.get("change", "halve"), event.get("road"), event.get("value", 0.25)
        for index in self.chosen(event):
            sparse = self.model.spec.front == "sparse" and self.owned[index] is self.model.front.weight
            if (sparse and change != "halve") or (change == "remove" and event.get("index") is None):
                continue
            if hasattr(self.opt, "edit"):
                self.opt.edit(index, change, road, value)
            else:
                edits.edit(self.owned[index], change, road, value)

    def do_edit_spent(self, event: Event) -> None:
        """Write to the gradient that an update has used, or remove it from p.grad."""
        self.written = True
        for index in self.chosen(event):
            edits.edit(self.owned[index], event.get("change"), event.get("road"), event.get("value", 0.25))

    def do_put(self, event: Event) -> None:
        """Replace the gradient that an update has used with one of the user's."""
        (index,) = self.chosen(event)
        if hasattr(self.opt, "put"):
            self.opt.put(index, event.get("value", 0.25))
        else:
            self.owned[index].grad = torch.full_like(self.owned[index], event.get("value", 0.25))

    def regroup(self, change: str, *given: Any) -> None:
        """Call a function of `regrouping`. An oracle has a method for it. A wrapper is not informed."""
        before = self.owned
        if hasattr(self.opt, "resize"):
            getattr(self.opt, change)(*given)
        else:
            getattr(regrouping, change)(self.opt, *given)
        if hasattr(self.opt, "regroup"):
            self.opt.regroup(before)

    def do_append(self, event: Event) -> None:
        known = {id(p) for p in self.owned}
        new = [p for p in self.params if id(p) not in known]
        for p in new:
            p.grad = None
        if new:
            self.regroup("append", new[:1] if event.get("one") else new, bool(event.get("group")))

    def do_remove(self, event: Event) -> None:
        group = self.groups[event.get("index") % len(self.groups)]
        if len(group) < 2:
            return
        p = group[event.get("index") % len(group)]
        self.regroup("remove", p)
        p.grad = None
        self.removed.append(p)

    def do_exchange(self, event: Event) -> None:
        """Replace a parameter with a new one that has the same values."""
        self.replace(self.owned[event.get("index") % len(self.owned)], None)

    def replace(self, old: Tensor, rows: int | None) -> None:
        self.stash = None
        data = old.detach().clone() if rows is None else regrouping.with_rows(old, rows, 0.5)
        new = torch.nn.Parameter(data, requires_grad=old.requires_grad)
        self.regroup("replace", old, new)
        regrouping.put_in(self.model, old, new)

    def do_resize(self, event: Event) -> None:
        """Change the number of rows of the embedding or the head, through `.data` or with new parameters."""
        model, spec, rows = self.model, self.model.spec, event.get("rows")
        resizes_front = spec.front != "linear" and event.get("where") == "front"
        if self.critic is not None and (spec.tied or not resizes_front):
            return  # the critic's input is the head's output
        if spec.tied or resizes_front:
            rows, changing = max(rows, VOCABULARY), [model.front.weight]
            model.front.num_embeddings = rows
        else:
            changing = [model.head.weight]
        if spec.tied or changing[0] is model.head.weight:
            changing.append(model.head.bias)
            model.head.out_features = rows
        self.stash = None
        for p in changing:
            if event.get("new"):
                self.replace(p, rows)
            else:
                self.regroup("resize", p, regrouping.with_rows(p, rows, 0.5))
