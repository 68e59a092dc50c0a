"""A framework's accumulation and ours, compared with the exact gradient of each whole batch.

Each `case_<framework>.py` has a function `compare() -> list[Row]`. Tests check the rows, and `table.py`
writes them to docs/integrations.md.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Row:
    """A training run of a framework in three ways.

    Attributes:
        framework: its name and version.
        case: what is trained, in a few words: "token-weighted loss, ragged lengths".
        theirs: largest relative difference of the parameters after the run by the framework's own
            accumulation, against updates from the exact gradient of each whole batch (`difference`).
        ours: the same with fusedacc inside the framework.
        updates: how many updates the reference makes.
        their_updates: how many the framework's own accumulation made.
        our_updates: how many ours made.
        remark: what the framework does otherwise; "" where it is exact.
    """

    framework: str
    case: str
    theirs: float
    ours: float
    updates: int
    their_updates: int
    our_updates: int
    remark: str = ""


def difference(parameters: Sequence[Tensor], reference: Sequence[Tensor], start: Sequence[Tensor]) -> float:
    """Largest |parameter - reference| relative to how far training has moved the reference, in float64.

    Args:
        parameters: after the run, of any floating dtype.
        reference: after the reference run, of the same shapes.
        start: before either.
    """
    worst = 0.0
    for parameter, wanted, before in zip(parameters, reference, start, strict=True):
        wanted = wanted.detach().double()
        moved = (wanted - before.detach().double()).abs().max()
        worst = max(worst, float((parameter.detach().double() - wanted).abs().max() / moved))
    return worst


def snapshot(model: torch.nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def float32_tolerance(reference: torch.nn.Module, updates: int, start: torch.nn.Module, rows: int) -> float:
    """Return the `difference` that rounding a sum over a window's rows, and the parameter, may cause."""
    moved = zip(snapshot(reference), snapshot(start), strict=True)
    sizes = max(float(end.abs().max() / (end - begin).abs().max()) for end, begin in moved)
    return torch.finfo(torch.float32).eps * updates * (rows + sizes)


Run = tuple[torch.nn.Module, int]


def compared(
    framework: str, case: str, start: Sequence[Tensor], exact: Run, theirs: Run, ours: Run, remark: str = ""
) -> Row:
    """Return the row of three runs from `start`. A run is a trained model and its number of updates."""
    wanted = snapshot(exact[0])
    differences = [difference(snapshot(net), wanted, start) for net, _ in (theirs, ours)]
    return Row(framework, case, *differences, exact[1], theirs[1], ours[1], remark)


def equal(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether all parameters have the same bits."""
    return all(map(torch.equal, snapshot(model), snapshot(other)))
