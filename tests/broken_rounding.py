"""Mistakes that are likely where sums are rounded stochastically."""

from mutant import Mutant

#: Each is one replacement.
ROUNDING_BREAKS = (
    Mutant(
        "every addition has the same random bits",
        "fusedacc/accumulators/noise.py",
        "return max(slot.addition + 1, self._floor)",
        "return 0",
        "tests/optimizer/test_stochastic_sums.py",
    ),
    Mutant(
        "ranks have the same random bits before a reduction",
        "fusedacc/accumulators/noise.py",
        "self._rank * _RANK_STEP",
        "0",
        "tests/distributed/test_stochastic_ranks.py",
    ),
    Mutant(
        "ranks have random bits of their own after a reduction",
        "fusedacc/accumulators/noise.py",
        "        self._since = {}",
        "        self._since = None",
        "tests/distributed/test_stochastic_ranks.py",
    ),
    Mutant(
        "a checkpoint forgets that sums were reduced",
        "fusedacc/accumulators/noise.py",
        'dict.fromkeys(slots, written) if state["reduced"] else None',
        "None",
        "tests/distributed/test_stochastic_ranks.py",
    ),
    Mutant(
        "a module's later products are rounded to nearest",
        "fusedacc/accumulators/in_place.py",
        "noise = None if self._noise.seed is None else self._noise.of([slot], accumulator.dtype)",
        "noise = None",
        "tests/nn/test_stochastic_products.py",
    ),
    Mutant(
        "random bits' numbers depend on when users look",
        "fusedacc/optimizer/accumulation.py",
        "            if outermost:\n                self._noise.finish_numbering()",
        "            pass",
        "tests/optimizer/test_stochastic_checkpoints.py",
    ),
    Mutant(
        "the sums of a model that was cast are taken for bfloat16",
        "fusedacc/accumulators/noise.py",
        "if accumulator is None or not self.rounds(accumulator.dtype)",
        "if accumulator is None",
        "tests/optimizer/test_stochastic_sums.py",
    ),
    Mutant(
        "ranks that round otherwise go unseen",
        "fusedacc/distributed/agreement.py",
        '"rounding": (seed is None,',
        '"rounding": (None,',
        "tests/distributed/test_agreement.py",
    ),
)
