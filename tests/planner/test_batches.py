"""Nested batches: the dimension of the samples, batches of other sizes, their parts, and errors."""

import re

import pytest
import torch
from torch.utils._pytree import tree_leaves

from fusedacc.planner.prediction import Batch

CPU = torch.device("cpu")


def nest(size: int = 4) -> dict:
    return {
        "x": torch.arange(3.0 * size).view(size, 3),
        "more": (torch.ones(size, dtype=torch.int64), [torch.zeros(size, 2, 2), "text", None]),
    }


def test_a_nested_batch_keeps_its_structure():
    batch = Batch(nest())
    assert batch.size == 4
    for made in (batch.drawn(3), batch.shapes(3, CPU)):
        assert made["more"][1][1:] == ["text", None]
        assert isinstance(made["more"], tuple)
        found = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        assert [tuple(leaf.shape) for leaf in found] == [(3, 3), (3,), (3, 2, 2)]
        assert [leaf.dtype for leaf in found] == [torch.float32, torch.int64, torch.float32]


def test_draws_start_with_the_first_samples_and_repeat_them():
    batch = Batch(nest())
    x = nest()["x"]
    assert torch.equal(batch.drawn(3)["x"], x[:3])
    assert torch.equal(batch.drawn(6)["x"], torch.cat([x, x[:2]]))
    kept = Batch(x)
    kept.drawn(2).zero_()
    assert torch.equal(kept.drawn(4), x)  # draws are copies


def test_dimensions_by_name_path_and_number():
    sample = {"x": torch.ones(4, 3), "mask": torch.ones(2, 4), "table": torch.ones(7)}
    for dims in ({"mask": 1, "table": None}, {"['mask']": -1, "['table']": None}):
        batch = Batch(sample, dims)
        assert batch.size == 4
        drawn = batch.drawn(9)
        assert [tuple(drawn[name].shape) for name in sample] == [(9, 3), (2, 9), (7,)]
    assert Batch((torch.ones(2, 4), torch.ones(3, 4)), 1).size == 4
    assert Batch((torch.ones(2, 4), torch.ones(9)), {"[1]": None}).size == 2


def test_parts():
    sample = {"x": torch.arange(7), "mask": torch.arange(14).view(2, 7), "table": torch.ones(5)}
    batch = Batch(sample, {"mask": 1, "table": None})
    assert [samples for samples, _ in batch.split(sample, 7)] == [7]
    assert [samples for samples, _ in batch.split(batch.drawn(9), 4)] == [4, 4, 1]
    sizes, parts = zip(*batch.split(sample, 3), strict=True)
    assert sizes == (3, 3, 1)
    assert torch.equal(torch.cat([part["x"] for part in parts]), sample["x"])
    assert torch.equal(torch.cat([part["mask"] for part in parts], 1), sample["mask"])
    assert all(part["table"] is sample["table"] for part in parts)
    assert parts[1]["x"].data_ptr() == sample["x"][3:].data_ptr()  # views


FOUR = torch.ones(4)
DISAGREES = (
    "['scale']: 3 in dimension 0); name the dimension that counts them, or None where there is none, "
    "as batch_dims={\"['scale']\": None}"
)


@pytest.mark.parametrize(
    ("sample", "dims", "error", "told"),
    [
        ("text", 0, TypeError, "sample_batch must hold a tensor, got str"),
        ({}, 0, TypeError, "sample_batch must hold a tensor, got dict"),
        ({"x": FOUR, "y": FOUR, "scale": torch.ones(3)}, 0, ValueError, DISAGREES),
        ({"x": FOUR, "rate": torch.tensor(1.0)}, 0, ValueError, "has shape (), and so no dimension 0"),
        ({"x": FOUR}, {"y": 1}, ValueError, "batch_dims names 'y', which is not in sample_batch"),
        ({"x": FOUR}, {"x": None}, ValueError, "leaves no tensor that counts samples"),
        ({"x": FOUR}, {"x": 2}, ValueError, "no dimension 2"),
        ({"x": FOUR}, "first", TypeError, "batch_dims must be an int, or a dict"),
        ({"x": FOUR}, True, TypeError, "batch_dims must be an int, or a dict"),
        ({"x": torch.ones(0, 2)}, 0, ValueError, "no samples; allowed: at least one"),
    ],
)
def test_bad_batches(sample, dims, error, told):
    with pytest.raises(error, match=re.escape(told)):
        Batch(sample, dims)
