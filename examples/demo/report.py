"""The table and the plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fusedacc.traffic import Part, bytes_per_window, total

if TYPE_CHECKING:
    from matplotlib.axes import Axes

F32, BF16 = torch.float32, torch.bfloat16
MIXED = ("by_hand", "stock", "mixed_add", "fusedacc", "gemm")
ONE_DTYPE = ("stock", "fusedacc", "gemm")
# What is trained: dtypes of the parameter, of the backward's product and of the sum; the loops to compare.
SETTINGS = {
    "float32": ("float32 parameters and sums", F32, F32, F32, ONE_DTYPE),
    "bfloat16": ("bfloat16 parameters, float32 sums", BF16, BF16, F32, MIXED),
    "autocast": ("float32 parameters under autocast(bfloat16)", F32, BF16, F32, ONE_DTYPE),
}
NAMES = {
    "by_hand": "by hand: acc += g.float() * s",
    "stock": "stock",
    "mixed_add": "stock, mixed add_ in a hook",
    "fusedacc": "fusedacc",
    "gemm": "fusedacc, model=, a Linear",
}
# Okabe and Ito's colours, which the colour-blind can tell apart.
PART_COLOURS = {
    "weight-gradient write": "#B4B4B4",
    "cast": "#E69F00",
    "scale": "#CC79A7",
    "first touch": "#009E73",
    "add": "#0072B2",
    "product into the sum": "#56B4E9",
}
#: The accounting's names of parts that the plot calls otherwise.
DRAWN_AS = {
    "zero": "first touch",
    "first write": "first touch",
    "first scale": "first touch",
    "weight-gradient product": "product into the sum",
}


@dataclass(frozen=True)
class Result:
    """What one run of the demo found. `losses`, `times` (s), `peaks` (bytes) and `calls` are by loop name."""

    dtype: str
    steps: int
    parameters: int
    conditions: str
    losses: dict[str, list[float]]
    times: dict[str, float]
    peaks: dict[str, int]
    calls: dict[str, int]

    def largest_difference(self, loop: str) -> float:
        """Of a loop's losses from stock's."""
        return max(abs(a - b) for a, b in zip(self.losses["stock"], self.losses[loop], strict=True))


def bytes_by_part(dtype: str, loop: str, steps: int) -> tuple[Part, ...]:
    """The accounting for one loop in one setting, the wrapper's 1/steps included."""
    _, parameter, product, accumulate, _ = SETTINGS[dtype]
    scale_is_one = loop in ("stock", "mixed_add") or steps == 1
    return bytes_per_window(parameter, product, accumulate, steps, loop=loop, scale_is_one=scale_is_one)


def label(dtype: str, loop: str) -> str:
    return "stock, grad_dtype=float32" if (dtype, loop) == ("bfloat16", "stock") else NAMES[loop]


def table(result: Result) -> str:
    """Plain text: losses side by side, then what each loop costs."""
    names = list(result.losses)
    wrapped = [name for name in names if name != "stock"]
    count = len(result.losses["stock"])
    shown = sorted({round(i * (count - 1) / 7) for i in range(8)}) if count > 1 else [0]
    ratios = [result.times[name] / result.times["stock"] for name in wrapped]
    more = [(result.peaks[name] - result.peaks["stock"]) / 1e6 for name in wrapped]
    rows = [("", *names)]
    rows += [(f"loss of update {i + 1}", *(f"{result.losses[n][i]:.6f}" for n in names)) for i in shown]
    rows += [
        ("largest difference from stock's", "", *(f"{result.largest_difference(n):.1e}" for n in wrapped)),
        ("time per update, median", *(f"{1e3 * result.times[n]:.1f} ms" for n in names)),
        ("  against stock", "", *(f"x {ratio:.3f}" for ratio in ratios)),
        ("peak memory", *(f"{result.peaks[n] / 1e6:.2f} MB" for n in names)),
        ("  against stock", "", *(f"{difference:+.2f} MB" for difference in more)),
        ("calls to accumulate, per micro-batch", *(str(result.calls[n]) for n in names)),
    ]
    lines = ["".join([f"{what:<38}", *(f"{cell:>18}" for cell in cells)]) for what, *cells in rows]

    lines += ["", f"bytes per parameter and micro-batch, by accounting, mean over a window of {result.steps}"]
    for loop in SETTINGS[result.dtype][4]:
        parts = bytes_by_part(result.dtype, loop, result.steps)
        detail = ", ".join(f"{part.name} {part.bytes:g}" for part in parts)
        lines.append(f"  {label(result.dtype, loop):<32}{total(parts):>8.2f}   {detail}")
    return "\n".join([result.conditions, "", *lines])


def plot(result: Result, path: Path) -> None:
    """Both loss curves, and the bytes each loop moves by part. Writes a PNG to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    style = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#555555",
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlesize": 11.5,
        "figure.facecolor": "white",
    }
    with plt.rc_context(style):
        figure, (curves, bars) = plt.subplots(1, 2, figsize=(12.5, 5.2), width_ratios=(1, 1.25))
        draw_losses(curves, result)
        draw_bytes(bars, result)
        figure.text(0.012, 0.015, result.conditions, fontsize=8.5, color="#555555", ha="left", va="bottom")
        figure.tight_layout(rect=(0, 0.07, 1, 1), w_pad=2.5)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def draw_losses(axes: Axes, result: Result) -> None:
    updates = range(1, len(result.losses["stock"]) + 1)
    axes.plot(updates, result.losses["stock"], color="#E69F00", linewidth=5, alpha=0.55, label="stock loop")
    axes.plot(updates, result.losses["fusedacc"], color="#0072B2", linewidth=1.8, label="fusedacc")
    inside = {"color": "#222222", "linewidth": 1.2, "linestyle": (0, (1, 2)), "label": "fusedacc, model="}
    axes.plot(updates, result.losses["fusedacc, model="], **inside)
    axes.set(xlabel="update", ylabel="training loss (nats per byte)", title="Same training")
    axes.grid(axis="y", color="#E6E6E6")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper right")
    for height, loop in ((0.71, "fusedacc"), (0.66, "fusedacc, model=")):
        difference = result.largest_difference(loop)
        told = "equal, bit for bit" if difference == 0 else f"within {difference:.1e} of stock's"
        text = f"{loop.removeprefix('fusedacc, ')}: every loss {told}"
        axes.text(0.97, height, text, transform=axes.transAxes, ha="right", color="#555555", fontsize=9)


def draw_bytes(axes: Axes, result: Result) -> None:
    position, ticks, labels = 0.0, [], []
    for dtype, (title, *_, loops) in SETTINGS.items():
        trained = dtype == result.dtype
        heading = title + (", trained here" if trained else "")
        colour = "#222222" if trained else "#777777"
        axes.text(0.1, position + 0.05, heading, va="center", fontweight="bold", fontsize=9.5, color=colour)
        for loop in loops:
            position += 1
            ticks.append(position)
            labels.append(label(dtype, loop))
            stacked = stack(bytes_by_part(dtype, loop, result.steps))
            left = 0.0
            for part, size in stacked.items():
                axes.barh(
                    position,
                    size,
                    left=left,
                    height=0.74,
                    color=PART_COLOURS[part],
                    alpha=1.0 if trained else 0.5,
                    edgecolor="white",
                    linewidth=0.8,
                )
                left += size
            axes.text(left + 0.3, position, f"{left:.1f}", va="center", color=colour)
        position += 1.35
    axes.set_yticks(ticks, labels)
    axes.tick_params(axis="y", length=0)
    axes.set(
        xlabel=f"bytes per parameter and micro-batch (mean over a window of {result.steps})",
        xlim=(0, 34),
        title="Bytes moved, by part",
    )
    axes.set_ylim(position - 0.6, -0.6)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x", color="#E6E6E6")
    axes.set_axisbelow(True)
    for part, colour in PART_COLOURS.items():
        axes.barh(0, 0, color=colour, label=part)
    axes.legend(frameon=False, loc="upper right", fontsize=9)


def stack(parts: Sequence[Part]) -> dict[str, float]:
    """Bytes by the parts the plot has colours for, in its order."""
    sizes = dict.fromkeys(PART_COLOURS, 0.0)
    for part in parts:
        sizes[DRAWN_AS.get(part.name, part.name)] += part.bytes
    return {name: size for name, size in sizes.items() if size}
