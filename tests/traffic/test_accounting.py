"""The byte counts of the accounting for each kind of loop."""

import pytest
import torch

from fusedacc.traffic import bytes_per_micro_batch, bytes_per_window, total

F32, BF16 = torch.float32, torch.bfloat16

LATER = [  # param, product, sum, loop, bytes in every micro-batch after the first
    (BF16, BF16, F32, "stock", 20),
    (F32, BF16, F32, "stock", 20),
    (BF16, BF16, F32, "by_hand", 28),
    (BF16, BF16, F32, "mixed_add", 12),
    (BF16, BF16, BF16, "stock", 8),
    (F32, F32, F32, "stock", 16),
    (BF16, BF16, F32, "fusedacc", 12),
    (F32, F32, F32, "fusedacc", 16),
    (F32, BF16, F32, "fusedacc", 20),
    (F32, BF16, F32, "gemm", 8),
    (F32, F32, F32, "gemm", 8),
]
FIRST = [
    (BF16, BF16, F32, "stock", 8),
    (BF16, BF16, F32, "mixed_add", 16),
    (F32, F32, F32, "stock", 4),
    (BF16, BF16, F32, "fusedacc", 8),
    (F32, F32, F32, "fusedacc", 4),
    (BF16, BF16, BF16, "fusedacc", 6),
    (BF16, BF16, F32, "gemm", 4),
]


@pytest.mark.parametrize(("first", "rows"), [(False, LATER), (True, FIRST)])
def test_totals(first, rows):
    for param, product, acc, loop, expected in rows:
        parts = bytes_per_micro_batch(param, product, acc, loop=loop, first=first)
        assert total(parts) == expected, (param, product, acc, loop, parts)


def test_a_first_gradient_is_scaled_at_once_if_the_sum_is_visible():
    assert total(bytes_per_micro_batch(F32, F32, F32, first=True, visible=True)) == 12
    assert total(bytes_per_micro_batch(F32, F32, F32, scale_is_one=True, first=True, visible=True)) == 4


def test_a_window_is_the_mean_over_its_micro_batches():
    assert total(bytes_per_window(BF16, BF16, BF16, 8)) == (2 + 7 * 8) / 8
    assert total(bytes_per_window(BF16, BF16, BF16, 6)) == pytest.approx((6 + 5 * 8) / 6)
    parts = bytes_per_window(F32, F32, F32, 8)
    assert total(parts) == (4 + 7 * 16) / 8
    assert total(bytes_per_window(BF16, BF16, F32, 8, loop="stock")) == (8 + 7 * 20) / 8
    assert [part.name for part in bytes_per_window(F32, BF16, F32, 8, loop="stock")].count("cast") == 1


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="loop must be one of stock"):
        bytes_per_micro_batch(F32, F32, F32, loop="fast")
    with pytest.raises(ValueError, match="steps"):
        bytes_per_window(F32, F32, F32, 0)
