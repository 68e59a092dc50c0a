"""An embedding's weight gradient: the rows that were looked up, against stock's whole table.

    python benchmarks/embedding.py [--quick | --full] [--device cuda]

Stock makes a dense gradient of the table's size and adds it to the sum. `index_add_` is the best that plain
torch has where the gradient need not exist by itself; on a GPU it adds in any order, by atomics. Tokens are
distributed as in text (the k-th most frequent has a share of about 1/k). Bytes are counted by a TrafficMeter;
those of a call vary with its tokens, and the first set's are given. Several sets of tokens and gradients take
turns, so that no call finds its own in a near cache.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import common
import torch
from common import Case, Goal, Results, Variant, cannot_run, first_line, measure
from torch import Tensor

from fusedacc import rows
from fusedacc.functional import total_norm
from fusedacc.traffic import TrafficMeter

#: (rows, columns) of the table, and the numbers of tokens.
SIZES = {
    "quick": [((1000, 64), (128,))],
    "short": [((50_257, 768), (1024,))],
    "full": [((50_257, 768), (64, 256, 1024, 4096, 16_384)), ((128_256, 4096), (1024, 8192))],
}
ROUNDS = {"quick": 3, "short": 15, "full": 25}
SETS = 4
DTYPES = ((torch.float32, torch.float32), (torch.bfloat16, torch.float32))
#: The goal for a micro-batch of 1,024 tokens on a CPU.
GOAL_TOKENS, AT_LEAST = 1024, 50.0


@dataclasses.dataclass
class Work:
    """A sum, and sets of tokens and gradients that take turns."""

    sums: Tensor
    tokens: list[Tensor]
    gradients: list[Tensor]

    def __post_init__(self) -> None:
        self.turn_back()

    def turn_back(self) -> None:
        """The first set is next."""
        self._turns = itertools.cycle(zip(self.tokens, self.gradients, strict=True))

    def next(self) -> tuple[Tensor, Tensor]:
        return next(self._turns)


def text_like(count: int, rows_of_table: int, device: torch.device) -> Tensor:
    """Tokens of which the k-th most frequent has a share of about 1/k."""
    ranks = torch.exp(torch.rand(count, device=device) * math.log(rows_of_table + 1)).long() - 1
    return ranks.clamp_(max=rows_of_table - 1)


def work(size: tuple[int, int], count: int, dtypes: tuple[torch.dtype, torch.dtype], device) -> Work:
    height, columns = size
    return Work(
        torch.zeros(size, dtype=dtypes[1], device=device),
        [text_like(count, height, device) for _ in range(SETS)],
        [torch.randn(count, columns, device=device).to(dtypes[0]) for _ in range(SETS)],
    )


def counted(name: str, run: Callable[[], object], goals: tuple[Goal, ...] = ()) -> Variant:
    with TrafficMeter() as meter:
        run()
    return Variant(name, run, meter.total_bytes, goals, meter.calls)


def accumulations(own: Work, size: tuple[int, int], count: int) -> list[Variant]:
    height, _ = size

    def stock() -> None:
        tokens, gradients = own.next()
        dense = torch.ops.aten.embedding_dense_backward(gradients, tokens, height, -1, False)
        own.sums.add_(dense)

    def index_add() -> None:
        tokens, gradients = own.next()
        own.sums.index_add_(0, tokens, gradients.to(own.sums.dtype))

    def ours() -> None:
        rows.accumulate_rows_(own.sums, *own.next())

    wanted = AT_LEAST if own.sums.device.type == "cpu" and count == GOAL_TOKENS and height > 50_000 else 0.0
    return [
        counted("stock", stock),
        counted("index_add_", index_add),
        counted("fusedacc", ours, (Goal("stock", wanted), Goal("index_add_"))),
    ]


def norms(own: Work) -> list[Variant]:
    def whole() -> None:
        total_norm([own.sums])

    def touched() -> None:
        rows.row_partials(own.sums, own.next()[0])

    return [counted("whole table", whole), counted("rows", touched, (Goal("whole table"),))]


def zeros(own: Work) -> list[Variant]:
    def whole() -> None:
        own.sums.zero_()

    def touched() -> None:
        rows.zero_rows_(own.sums, own.next()[0])

    return [counted("whole table", whole), counted("rows", touched, (Goal("whole table"),))]


def figures(results: Results, effort: str) -> None:
    timer = common.timer_for(results.device)
    for size, counts in SIZES[effort]:
        for count, dtypes in itertools.product(counts, DTYPES):
            names = " into ".join(str(dtype)[6:] for dtype in dtypes)
            table = f"{size[0]} x {size[1]}"
            case = Case("embedding", f"{table}, {count} tokens", "accumulate", f"{SETS} sets in turns", names)
            try:
                own = work(size, count, dtypes, results.device)
                results.add(measure(case, accumulations(own, size, count), ROUNDS[effort], SETS, timer))
                if dtypes[0] == dtypes[1]:
                    for mode, variants in (("norm", norms(own)), ("zero", zeros(own))):
                        part = dataclasses.replace(case, mode=mode, dtypes=names.split()[0])
                        results.add(measure(part, variants, ROUNDS[effort], SETS, timer))
            except RuntimeError as error:  # out of memory, say
                results.add([cannot_run(case, "all", first_line(error))])


def main() -> None:
    options = common.arguments(__doc__).parse_args()
    results = common.results(options)
    figures(results, common.effort(options))
    results.report()


if __name__ == "__main__":
    main()
