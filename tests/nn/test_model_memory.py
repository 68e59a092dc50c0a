"""`model=`: no backward allocates memory of a weight's size, and a lookup's window moves only its rows."""

import pytest
import torch
from memory import largest_allocation
from torch import nn

import fusedacc
from fusedacc.traffic import TrafficMeter

WIDTH, HIDDEN, ROWS = 1024, 2048, 3000


class Layers(nn.Module):
    """Weights of at least 4 MiB each: more than the 3 MiB in which a product of another dtype is computed."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(rows, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, tokens):
        return self.down(torch.tanh(self.up(self.embedding(tokens))))


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(0, ROWS, (4,), generator=torch.Generator().manual_seed(seed))


def loss_of(model, seed: int, kind: str):
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        out = model(tokens(seed))
    return out.float().square().mean()


def make(kind: str, steps: int = 4, wraps: bool = True, rows: int = ROWS, **options):
    model = Layers(rows).to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    given = {"model": model} if wraps else {}
    return model, fusedacc.AccumulatingOptimizer(inner, steps, **given, **options)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "autocast"])
def test_a_backward_allocates_nothing_of_a_weights_size(kind):
    smallest = WIDTH * HIDDEN * (2 if kind == "bfloat16" else 4)
    for wraps, expected in ((False, True), (True, False)):
        model, optimizer = make(kind, wraps=wraps)
        for seed in range(3):
            loss = loss_of(model, seed, kind)
            found = largest_allocation(loss.backward)
            if seed > 0:  # the first window allocates the sums
                assert (found >= smallest) is expected
            optimizer.step()


def counted(run) -> dict:
    """Return the meter's counts for `run`. The meter must know every operator."""
    with TrafficMeter() as meter:
        run()
    assert meter.uncounted == {}
    return meter.as_dict()


LOOKUPS = {
    "mean": {},
    "clipped": {"max_grad_norm": 1.0},
    "weighted": {"reduction": "weighted", "max_grad_norm": 1.0},
    "normalized": {"reduction": "normalized"},
}


@pytest.mark.parametrize("options", LOOKUPS.values(), ids=LOOKUPS)
def test_a_lookup_moves_only_its_rows(options):
    """A micro-batch moves the same bytes in a table of any height.

    Once per window the table is set to zero, read for the norm, and scaled if weights determine the scale.
    """

    def moved(rows: int) -> list[dict[str, int]]:
        model, optimizer = make("float32", 2, rows=rows, **options)
        found = []
        for seed in range(6):
            weight = 1.0 + seed % 3 if "reduction" in options else None
            with optimizer.accumulate(weight=weight):
                loss = model.embedding(tokens(seed)).square().mean()
                found.append(counted(loss.backward))
            found.append(counted(optimizer.step))
            found.append(counted(optimizer.zero_grad))
        return [{name: op["total_bytes"] for name, op in one["by_op"].items()} for one in found]

    by_height = dict.fromkeys(("aten::zero_", "fusedacc::norm_partials", "aten::_fused_sgd_"), 0)
    once = by_height.copy()
    for low, high in zip(moved(ROWS), moved(2 * ROWS), strict=True):
        for name in by_height:
            once[name] += low.pop(name, 0)
            by_height[name] += high.pop(name, 0)
        for found in (low, high):
            found.pop("fusedacc::finish_norm", None)
        if "fusedacc::scale_accumulate_" in low:
            assert "reduction" in options
            continue
        assert low == high
        assert sum(low.values()) < 32 * 4 * WIDTH * 4  # 4 rows: their gradient is made and added
    table = ROWS * WIDTH * 4
    assert once["aten::zero_"] == 3 * table
    assert once["fusedacc::norm_partials"] == pytest.approx(
        3 * table if "max_grad_norm" in options else 0, rel=0.01
    )
    for name, found in by_height.items():
        assert found == pytest.approx(2 * once[name], rel=0.01), name
