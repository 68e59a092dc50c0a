"""A language model's head and its cross-entropy: forward and backward of a micro-batch within a window.

PyTorch holds all logits. Ours holds those of a slice of the vocabulary, and adds its product to its rows of
the sum. `formulas` has the bytes and the peak memory of Liger and Apple's cut-cross-entropy, which are Triton
kernels for a GPU.

- `head`: the sizes that have goals; with --full also with one thread. On a GPU a head of
  128,256 x 4,096.
- `head_limit`: tokens per second of a small GPT under a limit of live memory, with the largest micro-batch
  that fits.
- `head_memory`: the peak against the vocabulary.
- `head_sweep`, with --full: vocabularies, widths, tokens and dtypes. Sizes of more than `MOST` operations per
  call get a row that says so.
- `head_chunks`: torch's chunked function.
"""

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedacc
from fusedacc.commands.timing import take_turns, timer_for
from fusedacc.nn.functional import linear_cross_entropy

from .. import harness, records
from ..contestants.zoo.networks import GPT
from ..harness import INSIDE, STOCK, peak_of, progress
from ..records import Case, Goal, Line, Results, Row, cannot_run, row

#: torch's chunked function, by its `chunking_method`.
CHUNKED = {
    f"torch chunked, {how}": how for how in ("auto", "aspect_ratio", "aspect_ratio:2", "aspect_ratio:4")
}
BENCHMARKS = ("head", "head_limit", "head_memory", "head_sweep", "head_chunks")
VOCABULARIES, WIDTHS, TOKENS = (32_000, 50_257, 128_256), (768, 2048), (64, 128, 256, 512, 1024, 2048, 4096)
#: The most operations of the four products of a call of the sweep: more take over 20 s on two cores.
MOST = 1e12
#: Vocabularies of `head_memory`, and the other sizes of its head.
PEAK_VOCABULARIES = (8192, 16384, 32_000, 50_257, 65_536, 98_304, 128_256)
PEAK_WIDTH, PEAK_TOKENS = 768, 512
#: The most rounds, and the least in `head` and in the sweep; in between, so many seconds at `_SPEED`
#: operations per second.
ROUNDS, SECONDS = {"quick": 2, "short": 15, "full": 15}, {"head": 40, "head_sweep": 3}
FEWEST, _SPEED = {"head": 5, "head_sweep": 2}, 1e11
#: Tokens of the first call, which makes the sums.
FIRST_TOKENS = 256
#: Goals: the most time relative to PyTorch, by dtype and tokens; and the most peak memory.
AT_MOST = {("float32", tokens): 1.0 for tokens in (128, 512, 1024)} | {("bfloat16", 512): 1.1}
PEAK_SHARE, AVX2_AT_MOST = 1 / 12, 1.35


@dataclasses.dataclass(frozen=True)
class Size:
    """A micro-batch of a head. threads: 0: all."""

    vocabulary: int
    width: int
    tokens: int
    dtype: str
    threads: int = 0

    @property
    def operations(self) -> int:
        return 8 * self.vocabulary * self.width * self.tokens

    def case(self, benchmark: str) -> Case:
        sizes = f"{self.vocabulary} x {self.width}"
        parts = [f"{sizes}, {self.tokens} tokens"]
        parts += [f"{self.threads} thread{'s' * (self.threads > 1)}"] if self.threads else []
        return Case(benchmark, ", ".join(parts), "micro-batch", f"{self.tokens} tokens, {sizes}", self.dtype)


@dataclasses.dataclass(frozen=True)
class Limited:
    """A GPT, the sequences of an update, and the most bytes that may be alive, weights and state too."""

    vocabulary: int
    width: int
    layers: int
    length: int
    sequences: int
    limit: int

    @property
    def case(self) -> Case:
        shapes = f"{self.sequences} x {self.length} tokens, {self.vocabulary} x {self.width}, "
        shapes += f"{self.layers} layers"
        return Case("head_limit", f"{self.limit / 1e6:g} MB", "update", shapes, "float32")


LIMITED = {
    "quick": Limited(1000, 32, 1, 16, 4, 2_000_000),
    "short": Limited(50_257, 384, 4, 128, 16, 700_000_000),
}
LIMITED["full"] = LIMITED["short"]


def main_sizes(effort: str, device: torch.device) -> list[Size]:
    """Return the sizes that have goals; with --full also with one thread.

    No size has a goal on a GPU.
    """
    if effort == "quick":
        return [Size(1000, 32, 16, dtype) for dtype in ("float32", "bfloat16", "autocast")]
    if device.type == "cuda":
        return [Size(128_256, 4096, tokens, "bfloat16") for tokens in (2048, 8192, 512)]
    combinations = [
        ("float32", 128),
        ("float32", 512),
        ("bfloat16", 512),
        ("bfloat16", 128),
        ("float32", 1024),
    ]
    threads = torch.get_num_threads()
    counts = (threads, 1) if effort == "full" and threads > 1 else (threads,)
    return [Size(50_257, 768, tokens, dtype, count) for count in counts for dtype, tokens in combinations]


def sweep_sizes(effort: str) -> list[Size]:
    """Return the cheapest first, so that an interrupted sweep has all sizes up to some."""
    if effort != "full":
        return []
    every = itertools.product(VOCABULARIES, WIDTHS, TOKENS, ("float32", "bfloat16", "autocast"))
    return sorted((Size(*each) for each in every), key=lambda size: size.operations)


def chunk_sizes(effort: str) -> list[Size]:
    if effort == "full":
        every = itertools.product(VOCABULARIES[:2], WIDTHS[:1], TOKENS[:2], ("float32", "bfloat16"))
        return [Size(*each) for each in every]
    return [Size(1000, 32, 16, "float32") if effort == "quick" else Size(50_257, 768, 128, "float32")]


@functools.lru_cache(maxsize=1)
def weight_of(vocabulary: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a weight for all ways, because a large one takes seconds to make."""
    torch.manual_seed(0)
    return torch.empty(vocabulary, width, device=device).uniform_(-0.05, 0.05).to(dtype)


def micro_batch(way: str, size: Size, device: torch.device) -> Callable[..., object]:
    """Return a forward and backward of the head, which sums the weight's gradients from call to call.

    It takes all tokens, or as many as its argument says.
    """
    dtype = torch.bfloat16 if size.dtype == "bfloat16" else torch.float32
    model = nn.utils.skip_init(nn.Linear, size.width, size.vocabulary, bias=False, device=device, dtype=dtype)
    model.weight.data = weight_of(size.vocabulary, size.width, dtype, device)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(size.tokens, size.width, generator=generator).to(device, dtype).requires_grad_()
    target = torch.randint(size.vocabulary, (size.tokens,), generator=generator).to(device)
    optimizer = None
    if way == INSIDE:
        optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(model.parameters()), model=model)

    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        if way == INSIDE:
            return linear_cross_entropy(hidden, model.weight, target)
        if way == STOCK:
            return F.cross_entropy(model(hidden).float(), target)
        options = nn.LinearCrossEntropyOptions(chunking_method=CHUNKED[way])
        return F.linear_cross_entropy(hidden, model.weight, target, options=options)

    def run(tokens: int = size.tokens) -> object:
        used = hidden if tokens >= size.tokens else hidden[:tokens]
        with torch.autocast(device.type, torch.bfloat16, enabled=size.dtype == "autocast"):
            found = loss(used, target[:tokens])
        found.backward()
        hidden.grad = None
        return optimizer

    return run


def peak_row(case: Case, way: str, peak: int, most: float = 0.0) -> Row:
    limits = {way: (most / 1e6, "a twelfth of stock")} if most else {}
    return records.value_rows(case, "peak memory", "MB", {way: peak / 1e6}, limits)[0]


def measured(benchmark: str, size: Size, effort: str, device: torch.device, note: str = "") -> list[Row]:
    """Return a size's rows by this process: time with bytes, and peak. note: what disturbed the times."""
    case = size.case(benchmark)
    runs = {}
    peaks = {}
    moved = {}
    for way in (STOCK, INSIDE):
        runs[way] = run = micro_batch(way, size, device)
        run(FIRST_TOKENS)

        def counted(way: str = way, run: Callable[[], object] = run) -> None:
            moved[way] = records.counted(run).total_bytes

        peaks[way] = peak_of(counted, device)
    rounds = max(FEWEST[benchmark], int(SECONDS[benchmark] * _SPEED / (1.75 * size.operations)))
    timed = harness.rounds(min(ROUNDS[effort], rounds), case.case, 0)
    seconds = take_turns(runs, timed, timer_for(device))
    judged = benchmark == "head" and (size.vocabulary, size.width) == (50_257, 768) and device.type == "cpu"
    limit = AT_MOST.get((size.dtype, size.tokens), 0.0) if judged else 0.0
    if limit == 1.0 and torch.backends.cpu.get_cpu_capability() != "AVX512":
        limit = AVX2_AT_MOST
    goal = Goal(STOCK, 1 / limit if limit else 0.0)
    found = records.timed_rows(case, seconds, {INSIDE: [goal]}, note)
    found = [dataclasses.replace(each, bytes=moved[each.provider]) for each in found]
    found.append(peak_row(case, STOCK, peaks[STOCK]))
    return [*found, peak_row(case, INSIDE, peaks[INSIDE], PEAK_SHARE * peaks[STOCK] if judged else 0.0)]


def rows_here(benchmark: str, size: Size, effort: str, results: Results, note: str) -> None:
    """Measure one size with its threads."""
    if size.operations > MOST and results.device.type == "cpu":
        why = f"a call has {size.operations / 1e12:.1f}e12 operations, over 20 s on two cores"
        results.add([cannot_run(size.case(benchmark), INSIDE, why)])
        return
    before = torch.get_num_threads()
    shown = results.conditions["threads"]
    torch.set_num_threads(size.threads or before)
    try:
        results.conditions["threads"] = records.conditions_of(results.device)["threads"]
        results.add(measured(benchmark, size, effort, results.device, note))
    finally:
        torch.set_num_threads(before)
        results.conditions["threads"] = shown


def chunks(size: Size, results: Results) -> None:
    """Add time and peak of torch's chunks. The first call takes several times as long as the next ones."""
    case = size.case("head_chunks")
    runs = {}
    found = []
    for way in CHUNKED:
        run = micro_batch(way, size, results.device)
        peak = results.attempt(case, [way], peak_of, run, results.device)
        if peak is not None:
            found.append(peak_row(case, way, peak))
            runs[way] = run
    seconds = take_turns(runs, harness.rounds(1, case.case, 0), timer_for(results.device))
    results.add(found + records.timed_rows(case, seconds, {}))


def peak_case(vocabulary: int) -> Case:
    shapes = f"{PEAK_TOKENS} tokens, {vocabulary} x {PEAK_WIDTH}"
    return Case("head_memory", str(vocabulary), "micro-batch", shapes, "float32")


def peaks(vocabulary: int, results: Results) -> None:
    """Add the peak of one vocabulary, with PyTorch and with ours."""
    found = []
    for way in (STOCK, INSIDE):
        run = micro_batch(way, Size(vocabulary, PEAK_WIDTH, PEAK_TOKENS, "float32"), results.device)
        run()
        found.append(peak_row(peak_case(vocabulary), way, peak_of(run, results.device)))
    results.add(found)


class Training:
    """Updates of a GPT with tied weights, whose micro-batches have `size` sequences."""

    def __init__(self, way: str, of: Limited, size: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = GPT(of.vocabulary, of.width, of.layers, of.length).to(device)
        self.tokens = torch.randint(of.vocabulary, (of.sequences, of.length), device=device)
        self.size = size
        self.ours = way == INSIDE
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        if self.ours:
            self.model.head = nn.Identity()
            self.optimizer = fusedacc.AccumulatingOptimizer(self.optimizer, model=self.model)

    def update(self, sequences: int | None = None) -> None:
        """Make one update of so many sequences, or of all."""
        parts = self.tokens[:sequences].split(self.size)
        for part in parts:
            found = self.model(part).flatten(0, 1)
            target = F.pad(part[:, 1:], (0, 1), value=-100).flatten()
            if self.ours:
                loss = linear_cross_entropy(found, self.model.words.weight, target)
            else:
                loss = F.cross_entropy(found, target)
            del found
            (loss / len(parts)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def under_limit(of: Limited, results: Results) -> None:
    """Add the largest micro-batch of each way that fits, and the time of an update with it."""
    case = of.case
    sizes = [2**power for power in range(of.sequences.bit_length()) if of.sequences % 2**power == 0]
    runs: dict[str, Training] = {}
    found: list[Row] = []
    for way in (STOCK, INSIDE):

        def peak(size: int, way: str = way) -> int:
            def updates() -> None:
                training = Training(way, of, size, results.device)
                for _ in range(2):
                    training.update(2 * size)

            return peak_of(updates, results.device)

        fits = list(itertools.takewhile(lambda size: peak(size) <= of.limit, sizes))
        if not fits:
            found.append(cannot_run(case, way, "one sequence does not fit"))
            continue
        runs[way] = Training(way, of, fits[-1], results.device)
        found.append(row(case, way, metric="micro-batch", unit="sequences", median=fits[-1]))
    timed = {way: training.update for way, training in runs.items()}
    seconds = take_turns(timed, harness.rounds(5, case.case), timer_for(results.device))
    found_times = records.timed_rows(case, seconds, {INSIDE: [Goal(STOCK, 1.0)]} if STOCK in runs else {})
    for way, time in zip(timed, found_times, strict=True):
        found.append(time)
        speed = of.sequences * of.length / statistics.median(seconds[way])
        found.append(row(case, way, metric="speed", unit="tokens/s", median=speed))
    results.add(found)


def formulas(vocabulary: int, width: int, tokens: int, size: int) -> dict[str, tuple[int, int]]:
    """Return bytes moved and bytes at the peak by name, for `size` bytes per element.

    Liger and torch take as many tokens at once as make the logits as large as the input, rounded up to a
    power of two, or a part of that: each chunk reads the weight twice, and reads and writes its gradient.
    torch holds a second gradient, scaled by the loss's. Cut-cross-entropy reads the weight in the forward
    and twice in the backward, and holds no logits, but its gradient in float32. All add their gradient to
    the sum.
    """
    weight = vocabulary * width
    logits = tokens * vocabulary
    rows = tokens * width
    whole = 2 ** math.ceil(math.log2(math.ceil(tokens / math.ceil(vocabulary / width))))
    add = 3 * weight * size
    parts = {"Liger": 1} | {f"torch chunked, aspect_ratio:{part}": part for part in (1, 2, 4)}
    found = {}
    for name, part in parts.items():
        chunk = max(1, whole // part)
        gradients = 1 if name == "Liger" else 2
        moved = (math.ceil(tokens / chunk) * 4 * weight + 5 * logits + 3 * rows) * size + add
        found[name] = moved, (gradients * weight + chunk * vocabulary + rows) * size
    moved = 3 * weight * size + 2 * 4 * weight + 4 * rows * size + add
    return found | {"cut-cross-entropy": (moved, 4 * (weight + rows))}


def figures(results: Results, effort: str, only: str = "", resume: bool = False, note: str = "") -> None:
    """Run cases with `only` in their names, and with `resume` only unfinished ones. note: see `measured`."""
    sizes_of = (("head", main_sizes(effort, results.device)), ("head_sweep", sweep_sizes(effort)))
    parts: list[tuple[Case, Callable[[], object]]] = [
        (size.case(benchmark), functools.partial(rows_here, benchmark, size, effort, results, note))
        for benchmark, sizes in sizes_of
        for size in sizes
    ]
    parts.append((LIMITED[effort].case, functools.partial(under_limit, LIMITED[effort], results)))
    for vocabulary in PEAK_VOCABULARIES[: 1 if effort == "quick" else None]:
        parts.append((peak_case(vocabulary), functools.partial(peaks, vocabulary, results)))
    for size in chunk_sizes(effort) if hasattr(nn, "LinearCrossEntropyOptions") else ():
        parts.append((size.case("head_chunks"), functools.partial(chunks, size, results)))
    parts.sort(key=lambda part: BENCHMARKS.index(part[0].benchmark))
    started = dict(results.conditions)
    for case, run in progress(parts, "heads", "case"):
        if only not in f"{case.benchmark} {case.case} {case.dtypes}":
            continue
        before = finished(results, case.benchmark) if resume else []
        if not any((case.case, case.dtypes) == (line["case"], line["dtypes"]) for line in before):
            # A resumed run keeps its date, so that its rows belong to one run.
            results.conditions |= {name: (before or [started])[-1][name] for name in ("commit", "date")}
            run()


def finished(results: Results, benchmark: str) -> list[Line]:
    """Return the rows of the last run, if it was of the same commit on the same machine."""
    here = results.conditions
    lines = records.read(results.path) if results.path else []
    same = [line for line in lines if (line["benchmark"], line["device"]) == (benchmark, here["device"])]
    last = records.newest(same, benchmark) if same else []
    fits = all(line[key].rstrip("+") == here[key].rstrip("+") for line in last for key in ("torch", "commit"))
    return last if fits else []


if __name__ == "__main__":
    parser = harness.arguments(__doc__)
    parser.add_argument("--only", default="", help="a part of the names of the cases that are run")
    parser.add_argument("--resume", action="store_true", help="leave out what the last run has measured")
    parser.add_argument("--note", default="", help="what disturbs the times, written beside each of them")
    options = parser.parse_args()
    if options.only:  # a part of a run replaces no older one
        kept = harness.results(options)
        figures(kept, harness.effort(options), options.only, options.resume, options.note)
        kept.report()
    else:
        harness.run(figures, options, resume=options.resume, note=options.note)
