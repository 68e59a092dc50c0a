"""How far one has to walk through the package: calls from file to file on the ways that matter, and how often
an update goes through all parameters.

Whoever reads what happens to a gradient opens a file for each call. Counted in a steady state: what is
prepared once per window or process has been.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import fusedacc

PACKAGE = str(Path(fusedacc.__file__).parent) + os.sep


class Walk:
    """The calls from one file of the package, or from outside, into another file of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, frame, event: str, _) -> None:
        name = frame.f_code.co_filename or ""
        if event != "call" or not name.startswith(PACKAGE):
            return
        caller = frame.f_back
        if caller is None or caller.f_code.co_filename != name:
            call = f"{name.removeprefix(PACKAGE)}:{frame.f_code.co_name}"
            if call not in self.calls:  # once, however many parameters there are
                self.calls.append(call)

    def during(self, run: Callable[[], object]) -> list[str]:
        before = sys.getprofile()
        sys.setprofile(self)
        try:
            run()
        finally:
            sys.setprofile(before)
        return self.calls


def wide(model: bool):
    """A bfloat16 Linear that is too large to wait in a bucket, in the middle of a window."""
    torch.manual_seed(0)
    net = nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = fusedacc.AccumulatingOptimizer(inner, 100, model=net if model else None)
    batch = torch.randn(8, 1024, dtype=torch.bfloat16)
    for _ in range(3):
        net(batch).sum().backward()
        optimizer.step()
    return net, optimizer, batch


@pytest.mark.parametrize(("model", "most"), [(False, 8), (True, 8)], ids=["hook", "module"])
def test_the_way_of_a_gradient(model, most, monkeypatch):
    """From autograd to the kernel, where Python does it all; the backward's begin and end are not its way."""
    monkeypatch.setenv("FUSEDACC_NATIVE_HOOKS", "0")
    net, optimizer, batch = wide(model)
    loss = net(batch).sum()
    capture = optimizer._capture
    begin = type(capture)._begin

    def begun(self):
        sys.setprofile(None)
        try:
            return begin(self)
        finally:
            sys.setprofile(walk)

    monkeypatch.setattr(type(capture), "_begin", begun)
    walk = Walk()
    calls = walk.during(loss.backward)
    end = next((i for i, call in enumerate(calls) if call.endswith(("_finish", ":finish"))), len(calls))
    graph = calls[:end]
    assert 0 < len(graph) <= most, "\n".join(graph)


def at_the_end_of_a_window(layers: int):
    """The wrapper whose `step()` is to end its second window: clipping, then fused AdamW."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)])
    inner = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    optimizer = fusedacc.AccumulatingOptimizer(inner, 2, max_grad_norm=1.0)
    for number in range(4):
        net(torch.randn(2, 8)).sum().backward()
        if number < 3:
            optimizer.step()
        if optimizer.has_updated:
            optimizer.zero_grad()
    assert optimizer.will_update
    assert optimizer.num_updates == 1
    return optimizer


def test_the_end_of_a_window():
    calls = Walk().during(at_the_end_of_a_window(4).step)
    assert 0 < len(calls) <= 22, f"{len(calls)}\n" + "\n".join(calls)


LOOPS = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def innermost_loops(path: str) -> dict[int, str]:
    """By line of a source file: the loop or comprehension around it, in words."""
    found: dict[int, str] = {}

    def visit(node: ast.AST, around: str | None) -> None:
        line = getattr(node, "lineno", None)
        if isinstance(node, LOOPS):
            around = f"{path.removeprefix(PACKAGE)}:{line}"
        if line is not None and around is not None:
            found[line] = around
        for child in ast.iter_child_nodes(node):
            visit(child, around)

    visit(ast.parse(Path(path).read_text()), None)
    return found


class Lines:
    """How often each line of the package runs."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, int], int] = {}

    def __call__(self, frame, event: str, _):
        if not (frame.f_code.co_filename or "").startswith(PACKAGE):
            return None
        if event == "line":
            place = frame.f_code.co_filename, frame.f_lineno
            self.counts[place] = self.counts.get(place, 0) + 1
        return self

    def during(self, run: Callable[[], object]) -> dict[tuple[str, int], int]:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            run()
        finally:
            sys.settrace(before)
        return self.counts


def test_an_update_looks_at_each_parameter_three_times():
    layers = 30
    counts = Lines().during(at_the_end_of_a_window(layers).step)
    often = [place for place, count in counts.items() if count >= 2 * layers]
    assert often
    found = {innermost_loops(path).get(line) for path, line in often} - {None}
    assert 0 < len(found) <= 3, "\n".join(sorted(found))
