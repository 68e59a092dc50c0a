"""models.py: bytes compared with hand counts, and rows of ways that cannot run. No test checks times."""

import pytest

from benchmarks.contestants import windows
from benchmarks.records import Results
from benchmarks.suites import models

PARTS = {"clip": "update: clip", "narrow": "update: cast", "optimizer": "update: optimizer"}
PARTS |= {"weights": "weight gradients", "first": "first touch"}


def parts(**own: int) -> dict[str, int]:
    return {PARTS.get(name, name): count for name, count in own.items()}


#: Torch's loop on a CPU: decay, lerp_, mul_, addcmul_, sqrt, div, add_, addcdiv_.
LOOP = 4 + 6 + 4 + 6 + 4 + 4 + 4 + 8
#: Bytes of our clipping, and of the optimizer with float32 and bfloat16 parameters.
CLIPPED, FLOAT32, BFLOAT16 = {"clip": 4}, {"optimizer": 8 + 3 * 8}, {"optimizer": 2 + 3 * 4}
OURS_32, OURS_16 = CLIPPED | FLOAT32, CLIPPED | BFLOAT16 | {"narrow": 6}
STOCK_32, STOCK_16 = {"clip": 4 + 8, "optimizer": 4 + 3 * 8}, {"clip": 2 + 4} | BFLOAT16
MIXED, INSIDE = 6 + 7 * 10, 4 + 7 * 8
#: Bytes read and written per parameter in one window of 8 with clipping and AdamW, counted by hand. The first
#: gradient becomes the sum.
COUNTED = {
    ("float32", "stock fused AdamW"): parts(weights=8 * 4, accumulate=7 * 12, **STOCK_32),
    ("autocast", "stock fused AdamW"): parts(
        forward=8 * 6, weights=8 * 2, cast=8 * 6, accumulate=7 * 12, **STOCK_32
    ),
    ("bfloat16", "stock by hand"): parts(
        weights=8 * 2, cast=8 * 6, accumulate=8 * 20, first=4, narrow=6, clip=2 + 4, optimizer=LOOP
    ),
    ("bfloat16", "stock grad_dtype"): parts(
        weights=8 * 2, cast=8 * 6, accumulate=7 * 12, narrow=6, **STOCK_16
    ),
    ("bfloat16", "stock mixed add_"): parts(weights=8 * 2, accumulate=MIXED, narrow=6, **STOCK_16),
    ("bfloat16", "stock bfloat16 sums"): parts(weights=8 * 2, accumulate=7 * 6, **STOCK_16),
    ("float32", "fusedacc"): parts(weights=8 * 4, accumulate=7 * 12, **OURS_32),
    ("float32", "fusedacc manual loop"): parts(weights=8 * 4, accumulate=7 * 12, **OURS_32),
    ("bfloat16", "fusedacc"): parts(weights=8 * 2, accumulate=MIXED, **OURS_16),
    ("bfloat16", "fusedacc manual loop"): parts(weights=8 * 2, accumulate=MIXED, **OURS_16),
    ("float32", "fusedacc model="): parts(accumulate=INSIDE, **OURS_32),
    ("autocast", "fusedacc model="): parts(forward=8 * 6, accumulate=INSIDE, **OURS_32),
    ("autocast", "fusedacc keep_casts="): parts(forward=6, accumulate=INSIDE, **OURS_32),
    ("bfloat16", "fusedacc model="): parts(accumulate=INSIDE, **OURS_16),
    ("float32", "floor"): parts(weights=8 * 4),
}


def test_counted_bytes_equal_hand_counts() -> None:
    results = Results(None)
    models.count(results)
    setting_of = {dtypes: setting for setting, dtypes in models.DTYPES.items()}
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in results.rows:
        assert (row.benchmark, row.case, row.mode) == ("models", "counted", "window k=8")
        if row.median is None:
            assert row.provider == "torch-optimi"
            continue
        assert row.unit == "B/param"
        assert "not counted" not in row.note
        part = row.metric.removeprefix("bytes: ")
        found.setdefault((setting_of[row.dtypes], row.provider), {})[part] = row.median
    for key, own in found.items():
        total = own.pop("total")
        assert set(own) <= set(models.PARTS)
        assert total == pytest.approx(sum(own.values()), abs=0.01), key
    for key, own in COUNTED.items():
        assert found[key] == pytest.approx(own, abs=0.01), key


def test_the_row_of_a_way_that_raises_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_, **__) -> None:
        raise RuntimeError("no such kernel\nand a long tale")

    monkeypatch.setattr(models.Loop, "step", lambda self: fails() if self.inner.defaults["fused"] else None)
    monkeypatch.setattr(windows.Floor, "obstacle", classmethod(lambda cls: "it is closed today"))
    results, of = Results(None), models.variants(windows.VARIANTS, "float32", None)
    models.model(results, "some", [("a", (4, 4))], "float32", of, "quick")
    notes = {row.provider: row.note for row in results.rows if row.median is None}
    assert notes["stock fused AdamW"] == "not run: RuntimeError: no such kernel"
    assert notes["floor"] == "not run: it is closed today"
    # There is no comparison with it.
    against = {row.against for row in results.rows if row.provider == "fusedacc" and row.metric == "time"}
    assert against == {"stock as written"}
