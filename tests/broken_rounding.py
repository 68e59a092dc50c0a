"""Mistakes that are likely where sums are rounded stochastically."""

from mutant import read_mutants

ROUNDING_BREAKS = read_mutants(
    r"""
# every addition has the same random bits
fusedacc/accumulators/noise.py: tests/optimizer/test_stochastic_sums.py
-return max(slot.addition + 1, self._floor)
+return 0
# ranks have the same random bits before a reduction
fusedacc/accumulators/noise.py: tests/distributed/test_stochastic_ranks.py
-self._rank * _RANK_STEP
+0
# ranks have different random bits after a reduction
fusedacc/accumulators/noise.py: tests/distributed/test_stochastic_ranks.py
-        self._since = {}
+        self._since = None
# a checkpoint forgets that sums were reduced
fusedacc/accumulators/noise.py: tests/distributed/test_stochastic_ranks.py
-dict.fromkeys(slots, written) if state["reduced"] else None
+None
# a module's later products are rounded to nearest
fusedacc/accumulators/in_place.py: tests/nn/test_stochastic_products.py
-noise = None if self._noise.seed is None else self._noise.of([slot], accumulator.dtype)
+noise = None
# random bits' numbers depend on when users look
fusedacc/optimizer/accumulation.py: tests/optimizer/test_stochastic_checkpoints.py
-            if outermost:
-                self._noise.finish_numbering()
+            pass
# the sums of a model that was cast are taken for bfloat16
fusedacc/accumulators/noise.py: tests/optimizer/test_stochastic_sums.py
-if accumulator is None or not self.rounds(accumulator.dtype)
+if accumulator is None
# ranks that round otherwise go unseen
fusedacc/distributed/agreement.py: tests/distributed/test_agreement.py
-"rounding": (seed is None,
+"rounding": (None,
"""
)
