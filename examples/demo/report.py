"""Reports the results as numbers, in words and as a table. The words follow from the numbers."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from fusedacc.commands import timing

from .measure import PARTS

SETTINGS = {
    "float32": "float32 parameters and sums",
    "bfloat16": "bfloat16 parameters, float32 sums",
    "autocast": "float32 parameters under autocast(bfloat16)",
}
#: For each dtype, how the best loop with plain PyTorch accumulates.
STOCK = {
    "float32": "autograd's own sums",
    "bfloat16": "a hook adds each gradient to a float32 sum",
    "autocast": "autograd's own sums",
}


@dataclass(frozen=True)
class ModelResult:
    """The results of one model, by loop.

    Attributes:
        losses, times: the loss of each update, and the seconds of each timed one.
        peaks: the peak bytes of live tensors.
        parts: the bytes moved in one window, also by `measure.PARTS`.
        calls: the calls of accumulating operators in one window.
    """

    name: str
    parameters: int
    vocabulary: int
    micro_batch_size: int
    context: int
    losses: dict[str, list[float]]
    times: dict[str, list[float]]
    peaks: dict[str, int]
    parts: dict[str, dict[str, int]]
    calls: dict[str, int]

    @property
    def shape(self) -> str:
        return (
            f"{self.parameters / 1e6:.1f} M parameters, vocabulary of {self.vocabulary:,}, "
            f"micro-batches of {self.micro_batch_size} x {self.context} {self.name}"
        )

    @property
    def wrapped(self) -> list[str]:
        return [name for name in self.losses if name != "stock"]

    def difference(self, loop: str) -> float:
        """Return the largest difference between a loop's losses and plain PyTorch's."""
        return max(abs(a - b) for a, b in zip(self.losses["stock"], self.losses[loop], strict=True))

    def ratio(self, loop: str) -> tuple[float, float, float]:
        """Return the ratio of the time per update to plain PyTorch's, and the ends of its 95 % interval."""
        return timing.ratio(self.times[loop], self.times["stock"])

    def bytes(self, loop: str) -> int:
        return sum(self.parts[loop].values())

    def share_of_gradients(self) -> float:
        """Return the fraction of plain PyTorch's bytes that writing and summing gradients takes."""
        return self.parts["stock"][PARTS[1]] / self.bytes("stock")


@dataclass(frozen=True)
class Result:
    """The results of one run of the demo."""

    dtype: str
    steps: int
    conditions: str
    models: list[ModelResult]


def equality(model: ModelResult, loop: str) -> str:
    """Describe how closely a loop's losses agree with plain PyTorch's."""
    difference = model.difference(loop)
    return "equal, bit for bit" if difference == 0 else f"within {difference:.1e}"


def time_taken(model: ModelResult, loop: str) -> str:
    """Describe a loop's time with its interval. Claim a difference only if the interval excludes 1."""
    median, low, high = model.ratio(loop)
    if low > 1 or high < 1:
        return f"took {median:.2f} times as long as stock ({low:.2f} to {high:.2f})"
    return f"took as long as stock, within the measurement's precision ({low:.2f} to {high:.2f})"


def bytes_moved(model: ModelResult, loop: str) -> str:
    """Describe how many bytes a loop moves, compared with plain PyTorch."""
    percent = round(100 * (model.bytes(loop) / model.bytes("stock") - 1))
    if percent == 0:
        return "moved as many bytes"
    return f"moved {abs(percent)} % {'more' if percent > 0 else 'fewer'} bytes"


def summary(model: ModelResult) -> list[str]:
    """Summarize the results of one model."""
    share = 100 * model.share_of_gradients()
    lines = [f"{model.name}: writing and summing gradients takes {share:.0f} % of the bytes of stock."]
    for loop in model.wrapped:
        found = f"{time_taken(model, loop)} and {bytes_moved(model, loop)}; losses {equality(model, loop)}"
        lines.append(f"  {loop:<17}{found}.")
    return lines


def table(result: Result) -> str:
    """Return the results as plain text: a block for each model, then the summaries."""
    lines = [
        result.conditions,
        f"stock: plain PyTorch, {STOCK[result.dtype]}. 1 MB is 10^6 bytes. Bytes are counted, not timed.",
    ]
    for model in result.models:
        lines += ["", f"{model.name}: {model.shape}", *(_line(row) for row in _rows(model))]
    lines += ["", *(line for model in result.models for line in summary(model))]
    return "\n".join(lines)


def _line(row: tuple[str, ...]) -> str:
    what, *cells = row
    return f"  {what:<36}" + "".join(f"{cell:>22}" for cell in cells)


def _rows(model: ModelResult) -> list[tuple[str, ...]]:
    names, wrapped = list(model.losses), model.wrapped
    count = len(model.losses["stock"])
    shown = sorted({round(i * (count - 1) / 3) for i in range(4)})
    medians = [statistics.median(model.times[name]) for name in names]
    ratios = ["{:.2f} ({:.2f} to {:.2f})".format(*model.ratio(name)) for name in wrapped]
    more = [round((model.peaks[name] - model.peaks["stock"]) / 1e6, 2) + 0.0 for name in wrapped]  # no -0.00
    rows = [("", *names)]
    rows += [(f"loss of update {i + 1}", *(f"{model.losses[n][i]:.6f}" for n in names)) for i in shown]
    rows += [
        (f"  all {count} against stock's", "", *(equality(model, n) for n in wrapped)),
        ("time per update, median", *(f"{1e3 * median:.1f} ms" for median in medians)),
        ("  of stock's, 95 % interval", "", *ratios),
        ("peak memory", *(f"{model.peaks[n] / 1e6:.2f} MB" for n in names)),
        ("  against stock", "", *(f"{difference:+.2f} MB" for difference in more)),
        ("bytes moved in a window", *(f"{model.bytes(n) / 1e6:.0f} MB" for n in names)),
    ]
    rows += [(f"  {part}", *(f"{model.parts[n][part] / 1e6:.0f} MB" for n in names)) for part in PARTS]
    return [*rows, ("calls to accumulate in a window", *(str(model.calls[n]) for n in names))]
