"""How often an update goes through all parameters, in a steady state: what is prepared once is there."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import fusedacc

PACKAGE = str(Path(fusedacc.__file__).parent) + os.sep


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
