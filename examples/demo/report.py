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
MIXED = ("by_hand", "stock", "mixed_add", "fusedacc")
# What is trained: dtypes of the parameter, of the backward's product and of the sum; the loops to compare.
SETTINGS = {
    "float32": ("float32 parameters and sums", F32, F32, F32, ("stock", "fusedacc")),
    "bfloat16": ("bfloat16 parameters, float32 sums", BF16, BF16, F32, MIXED),
    "autocast": ("float32 parameters under autocast(bfloat16)", F32, BF16, F32, ("stock", "fusedacc")),
}
NAMES = {
    "by_hand": "by hand: acc += g.float() * s",
    "stock": "stock",
    "mixed_add": "stock, mixed add_ in a hook",
    "fusedacc": "fusedacc",
}
# Okabe and Ito's colours, which the colour-blind can tell apart.
PART_COLOURS = {
    "weight-gradient write": "#B4B4B4",
    "cast": "#E69F00",
    "scale": "#CC79A7",
    "first touch": "#009E73",
    "add": "#0072B2",
}
FIRST_TOUCH = ("zero", "first write", "first scale")


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

    @property
    def largest_difference(self) -> float:
        pairs = zip(self.losses["stock"], self.losses["fusedacc"], strict=True)
        return max(abs(a - b) for a, b in pairs)


def bytes_by_part(dtype: str, loop: str, steps: int) -> tuple[Part, ...]:
    """The accounting for one loop in one setting, the wrapper's 1/steps included."""
    _, parameter, product, accumulate, _ = SETTINGS[dtype]
    scale_is_one = loop in ("stock", "mixed_add") or steps == 1
    return bytes_per_window(parameter, product, accumulate, steps, loop=loop, scale_is_one=scale_is_one)


def label(dtype: str, loop: str) -> str:
    return "stock, grad_dtype=float32" if (dtype, loop) == ("bfloat16", "stock") else NAMES[loop]


def table(result: Result) -> str:
    """Plain text: losses side by side, then what each loop costs."""
    stock, wrapped = result.losses["stock"], result.losses["fusedacc"]
    count = len(stock)
    shown = sorted({round(i * (count - 1) / 7) for i in range(8)}) if count > 1 else [0]
    rows = [("", "stock", "fusedacc", "")]
    rows += [(f"loss of update {i + 1}", f"{stock[i]:.6f}", f"{wrapped[i]:.6f}", "") for i in shown]
    rows.append(("largest difference of all losses", "", f"{result.largest_difference:.1e}", ""))
    ratio = result.times["fusedacc"] / result.times["stock"]
    rows.append(
        (
            "time per update, median",
            *(f"{1e3 * result.times[n]:.1f} ms" for n in ("stock", "fusedacc")),
            f"x {ratio:.3f}",
        )
    )
    more = result.peaks["fusedacc"] - result.peaks["stock"]
    rows.append(
        (
            "peak memory",
            *(f"{result.peaks[n] / 1e6:.2f} MB" for n in ("stock", "fusedacc")),
            f"{more / 1e6:+.2f} MB",
        )
    )
    rows.append(
        ("calls to accumulate, per micro-batch", *(str(result.calls[n]) for n in ("stock", "fusedacc")), "")
    )
    lines = [f"{a:<38}{b:>14}{c:>14}  {d}".rstrip() for a, b, c, d in rows]

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
    axes.plot(updates, result.losses["fusedacc"], color="#0072B2", linewidth=1.6, label="fusedacc")
    axes.set(xlabel="update", ylabel="training loss (nats per byte)", title="Same training")
    axes.grid(axis="y", color="#E6E6E6")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper right")
    difference = result.largest_difference
    text = "every loss is equal, bit for bit" if difference == 0 else f"largest difference {difference:.1e}"
    axes.text(0.97, 0.76, text, transform=axes.transAxes, ha="right", color="#555555")


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
        xlim=(0, 30),
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
        sizes["first touch" if part.name in FIRST_TOUCH else part.name] += part.bytes
    return {name: size for name, size in sizes.items() if size}
