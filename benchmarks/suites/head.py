"""A language model's head and its cross-entropy: forward and backward of a micro-batch within a window.

PyTorch holds all logits, and writes a gradient of the weight that it adds to the sum. torch 2.13's chunked
function and Liger hold the logits of some tokens at a time, and read and write the weight's gradient once
for each chunk. Ours holds a slice of the vocabulary, and adds its product to its rows of the sum.

Liger and Apple's cut-cross-entropy are Triton kernels for a GPU: their rows of bytes and of peak memory are
by formula (`formulas`), and say so.

Then the peak against the vocabulary, which docs/figures/head_memory.png shows; and a small GPT under a limit
of live memory, each way with the largest micro-batch that fits: what an update of equal tokens takes.

Goals on a CPU, with a vocabulary of 50,257 and a width of 768, against PyTorch: time in float32 at most
1.0 with AVX-512 and 1.35 without, in bfloat16 at 512 tokens at most 1.1; the peak of live bytes at most a
twelfth.

    python -m benchmarks.suites.head [--quick | --full] [--device cuda]
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import fusedacc
from fusedacc.commands.measuring.records import (
    Case,
    Goal,
    Results,
    Variant,
    at_most,
    cannot_run,
    first_line,
    row,
    rows_of,
)
from fusedacc.commands.measuring.timing import take_turns, timer_for
from fusedacc.nn.functional import linear_cross_entropy

from .. import harness
from ..harness import progress
from ..machines.zoo.transformers import GPT

PLAIN, OURS = "stock", "fusedacc, model="
#: torch's chunked function, by its `chunking_method`.
CHUNKED = {
    f"torch chunked, {how}": how for how in ("auto", "aspect_ratio", "aspect_ratio:2", "aspect_ratio:4")
}
VOCABULARIES, WIDTHS = (32_000, 50_257, 128_256), (768, 2048)
SIZES = {
    "quick": [(1000, 32, 16)],
    "short": [(50_257, 768, tokens) for tokens in (128, 512, 1024)],
    "full": list(itertools.product(VOCABULARIES, WIDTHS, (64, 128, 256, 512, 1024, 2048, 4096))),
}
DTYPES = {"quick": ("float32", "bfloat16", "autocast"), "short": ("float32", "bfloat16")}
DTYPES["full"] = DTYPES["quick"]
#: Vocabularies of which the peak alone is measured, and the head's other sizes; one for --quick.
PEAK_VOCABULARIES = (8192, 16384, 32_000, 50_257, 65_536, 98_304, 128_256)
PEAK_WIDTH, PEAK_TOKENS = 768, 512
ROUNDS = {"quick": 2, "short": 5, "full": 9}
#: Of PyTorch's time, by dtype and tokens; and of its peak memory.
AT_MOST = {("float32", tokens): 1.0 for tokens in (128, 512, 1024)} | {("bfloat16", 512): 1.1}
PEAK_SHARE, AVX2_AT_MOST = 1 / 12, 1.35


@dataclasses.dataclass(frozen=True)
class Limited:
    """A GPT, the sequences of an update, and the most bytes that may be alive, weights and state too."""

    vocabulary: int
    width: int
    layers: int
    length: int
    sequences: int
    limit: int


LIMITED = {
    "quick": Limited(1000, 32, 1, 16, 4, 1_000_000),
    "short": Limited(50_257, 384, 4, 128, 32, 600_000_000),
}
LIMITED["full"] = LIMITED["short"]


def micro_batch(
    way: str, vocabulary: int, width: int, tokens: int, dtype: str, device: torch.device
) -> Callable[[], object]:
    """A forward and a backward of the head; the weight's gradients are summed from call to call."""
    torch.manual_seed(0)
    own = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    model = nn.Linear(width, vocabulary, bias=False).to(device, own)
    hidden = torch.randn(tokens, width).to(device, own).requires_grad_()
    target = torch.randint(vocabulary, (tokens,)).to(device)
    optimizer = None
    if way == OURS:
        optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(model.parameters()), model=model)

    def loss() -> torch.Tensor:
        if way == OURS:
            return linear_cross_entropy(hidden, model.weight, target)
        if way == PLAIN:
            return F.cross_entropy(model(hidden).float(), target)
        options = nn.LinearCrossEntropyOptions(chunking_method=CHUNKED[way])
        return F.linear_cross_entropy(hidden, model.weight, target, options=options)

    def run() -> object:
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "autocast"):
            found = loss()
        found.backward()
        hidden.grad = None
        return optimizer

    return run


def peak_of(run: Callable[[], object], device: torch.device) -> int:
    """Live bytes beyond those before, at the peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in events), initial=0))


class Training:
    """Updates of a GPT of tied weights, whose micro-batches have `size` sequences."""

    def __init__(self, way: str, of: Limited, size: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = GPT(of.vocabulary, of.width, of.layers, max(1, of.width // 64), of.length).to(device)
        self.tokens = torch.randint(of.vocabulary, (of.sequences, of.length), device=device)
        self.size, self.ours = size, way == OURS
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters())
        if self.ours:
            self.model.head = nn.Identity()
            self.optimizer = fusedacc.AccumulatingOptimizer(self.optimizer, model=self.model)

    def update(self, sequences: int | None = None) -> None:
        """One update of so many sequences, or all."""
        parts = self.tokens[:sequences].split(self.size)
        for part in parts:
            found, target = self.model(part)[:, :-1].flatten(0, 1), part[:, 1:].flatten()
            if self.ours:
                loss = linear_cross_entropy(found, self.model.words.weight, target)
            else:
                loss = F.cross_entropy(found, target)
            del found
            (loss / len(parts)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def under_limit(results: Results, of: Limited) -> None:
    """The largest micro-batch of each way that fits, and the time of an update with it."""
    shapes = f"{of.sequences} x {of.length} tokens, {of.vocabulary} x {of.width}, {of.layers} layers"
    case = Case("head_limit", f"{of.limit / 1e6:g} MB", "update", shapes, "float32")
    sizes = [2**power for power in range(of.sequences.bit_length()) if of.sequences % 2**power == 0]
    runs: dict[str, Training] = {}
    for way in (PLAIN, OURS):

        def peak(size: int, way: str = way) -> int:
            def updates() -> None:
                training = Training(way, of, size, results.device)
                training.update(2 * size), training.update(2 * size)

            return peak_of(updates, results.device)

        fits = list(itertools.takewhile(lambda size: peak(size) <= of.limit, sizes))
        if not fits:
            results.add([cannot_run(case, way, "one sequence does not fit")])
            continue
        runs[way] = Training(way, of, fits[-1], results.device)
        results.add([row(case, way, metric="micro-batch", unit="sequences", median=fits[-1])])
    timed = {way: training.update for way, training in runs.items()}
    seconds = take_turns(timed, harness.rounds(3, case.case), timer_for(results.device))
    goal = (Goal(PLAIN, 1.0),) if PLAIN in runs else ()
    for way in timed:
        found = rows_of(case, [Variant(way, goals=goal if way == OURS else ())], seconds)
        speed = of.sequences * of.length / statistics.median(seconds[way])
        results.add([*found, row(case, way, metric="speed", unit="tokens/s", median=speed)])


def formulas(vocabulary: int, width: int, tokens: int, size: int) -> dict[str, tuple[int, int]]:
    """Bytes moved and bytes at the peak by name, of `size` bytes an element.

    Liger takes as many tokens at once as make the logits as large as the input, rounded up to a power of two:
    each chunk reads the weight twice, and reads and writes its gradient. Cut-cross-entropy reads the weight
    in the forward and twice in the backward, and holds no logits, but its gradient in float32. Both gradients
    are read and added to the sum.
    """
    weight, logits, rows = vocabulary * width, tokens * vocabulary, tokens * width
    chunk = 2 ** math.ceil(math.log2(math.ceil(tokens / math.ceil(vocabulary / width))))
    chunks = math.ceil(tokens / chunk)
    add = 3 * weight * size
    return {
        "Liger": (
            (chunks * 4 * weight + 5 * logits + 3 * rows) * size + add,
            (weight + chunk * vocabulary + rows) * size,
        ),
        "cut-cross-entropy": (
            3 * weight * size + 2 * 4 * weight + 4 * rows * size + add,
            4 * (weight + rows),
        ),
    }


def figures(results: Results, effort: str, only: str = "") -> None:
    """`only`: a part of the names of the cases that are run."""
    device = results.device
    cases = list(itertools.product(SIZES[effort], DTYPES[effort]))
    for (vocabulary, width, tokens), dtype in progress(cases, "heads", "case"):
        shapes = f"{tokens} tokens, {vocabulary} x {width}"
        case = Case("head", f"{vocabulary} x {width}, {tokens} tokens", "micro-batch", shapes, dtype)
        if only not in f"{case.benchmark} {case.case} {dtype}":
            continue
        runs, peaks, ways = {}, {}, [PLAIN, OURS]
        # In bfloat16, and with more tokens, torch's chunks take minutes on a CPU.
        if hasattr(nn, "LinearCrossEntropyOptions") and (
            effort != "short" or (tokens, dtype) == (SIZES["short"][0][2], "float32")
        ):
            ways += CHUNKED
        for way in ways:
            try:
                made = micro_batch(way, vocabulary, width, tokens, dtype, device)
                if way in (PLAIN, OURS):  # torch's chunks take long, and their first call as much memory
                    made()
                peaks[way] = peak_of(made, device)
                runs[way] = made
            except Exception as error:
                results.add([cannot_run(case, way, first_line(error))])
        add(results, case, runs, peaks, (vocabulary, width, tokens), ROUNDS[effort])
    vocabularies = PEAK_VOCABULARIES[: 1 if effort == "quick" else None]
    if only in "head_limit":
        under_limit(results, LIMITED[effort])
    if only not in "head_memory":
        return
    for vocabulary, way in itertools.product(progress(vocabularies, "peaks", "case"), (PLAIN, OURS)):
        run = micro_batch(way, vocabulary, PEAK_WIDTH, PEAK_TOKENS, "float32", device)
        run()
        shapes = f"{PEAK_TOKENS} tokens, {vocabulary} x {PEAK_WIDTH}"
        case = Case("head_memory", str(vocabulary), "micro-batch", shapes, "float32")
        figure = {"metric": "peak memory", "unit": "MB", "median": peak_of(run, device) / 1e6}
        results.add([row(case, way, **figure)])


def add(
    results: Results,
    case: Case,
    runs: dict[str, Callable[[], object]],
    peaks: dict[str, int],
    sizes: tuple[int, int, int],
    rounds: int,
) -> None:
    """The rows of one case: times, peaks and bytes."""
    fits = sizes[:2] == (50_257, 768) and results.device.type == "cpu"
    limit = AT_MOST.get((case.dtypes, sizes[2]), 0.0) if fits else 0.0
    if limit == 1.0 and torch.backends.cpu.get_cpu_capability() != "AVX512":
        limit = AVX2_AT_MOST
    # torch's chunks take ten times as long on a CPU: a round of them says enough.
    timed = {way: run for way, run in runs.items() if way in (PLAIN, OURS)}
    seconds = take_turns(timed, harness.rounds(rounds, case.case), timer_for(results.device))
    others = {way: run for way, run in runs.items() if way not in timed}
    seconds |= take_turns(others, [0], timer_for(results.device)) if others else {}
    goal = Goal(PLAIN, 1 / limit if limit else 0.0)
    found = [
        row for way in timed for row in rows_of(case, [Variant(way, goals=(goal,) * (way == OURS))], seconds)
    ]
    results.add(found + rows_of(case, [Variant(way) for way in others], seconds))
    memory = {"metric": "peak memory", "unit": "MB"}
    for way, peak in peaks.items():
        held = at_most(PEAK_SHARE * peaks[PLAIN], peak, "a twelfth of stock") if way == OURS and fits else {}
        results.add([row(case, way, median=peak / 1e6, **memory, **held)])
    moved = {"metric": "bytes", "unit": "MB"}
    size, note = 4 if case.dtypes == "float32" else 2, "by formula: a Triton kernel for a GPU"
    known = formulas(*sizes, size).items()
    results.add([row(case, name, median=peak / 1e6, note=note, **memory) for name, (_, peak) in known])
    counted = {way: harness.counted(runs[way]).total_bytes for way in timed}
    results.add([row(case, way, median=total / 1e6, **moved) for way, total in counted.items()])
    results.add([row(case, name, median=total / 1e6, note=note, **moved) for name, (total, _) in known])


if __name__ == "__main__":
    parser = harness.arguments(__doc__)
    parser.add_argument("--only", default="", help="a part of the names of the cases that are run")
    options = parser.parse_args()
    if options.only:  # a part of a run replaces no older one
        kept = harness.results(options)
        figures(kept, harness.effort(options), options.only)
        kept.report()
    else:
        harness.run(figures, options)
