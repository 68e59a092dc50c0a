"""What is sent between ranks, and when: the sizes of collectives, and the bytes that the kernel has sent."""

import functools
import json
import tempfile
from pathlib import Path

import counting_ranks
import forked
import pytest
from counting_ranks import PARAMETERS, STEPS, WINDOWS

from fusedacc.distributed import wire

#: For each way: the loop, what reduces the gradients, and the wrapper's options.
OURS = {
    "ours": ("counted", "ddp", {}),
    "ours, bfloat16": ("counted", "ddp", {"reduce_dtype": "bfloat16"}),
    "ours, clip": ("counted", "ddp", {"max_grad_norm": 0.1, "skip_nonfinite": True}),
    "ours, weighted": ("counted", "ddp", {"reduction": "weighted"}),
    "ours, manual": ("manual", "ddp", {"max_grad_norm": 0.1}),
    "ours, group": ("counted", "group", {}),
}
STOCK = {"stock, each": ("each", "ddp", {}), "stock": ("stock", "ddp", {})}
#: FSDP2 on two replicas of two shards.
REPLICAS = {defer: ("counted", "replicas", {"defer": defer}) for defer in ("all", "all_reduce", "none")}
#: The bytes relative to plain PyTorch's.
FLOAT32, BFLOAT16 = 1.01, 0.51


@functools.cache
def found(world: int) -> tuple[list[dict], str]:
    """Return the results of each rank, and why there was no separate network ("" if there was one)."""
    program = Path(counting_ranks.__file__).read_text()
    ways = {
        2: STOCK | OURS,
        3: STOCK | {name: OURS[name] for name in ("ours", "ours, bfloat16")},
        4: REPLICAS,
    }
    refusal = ""
    for network in ("alone", "shared"):
        with tempfile.TemporaryDirectory() as folder:
            arguments = folder, str(world), json.dumps(ways[world]), network
            ended = forked.run(program, *arguments, GLOO_SOCKET_IFNAME="lo")
            if network == "alone" and ended.returncode == counting_ranks.NOT_ALLOWED:
                refusal = ended.stdout.strip()
                continue
            assert not ended.returncode, ended.stderr
            texts = [Path(folder, f"{rank}.json").read_text() for rank in range(world)]
            return list(map(json.loads, texts)), refusal
    raise AssertionError("a shared network is always allowed")


def sent(world: int, way: str) -> list[int]:
    """Return the bytes that all ranks have sent, by micro-batch."""
    ranks, refusal = found(world)
    if refusal:
        pytest.skip(f"Linux refuses to create a network namespace ({refusal})")
    return ranks[0][way]["sent"]


COUNTED = {
    "by size": lambda way: sum(map(sum, found(2)[0][0][way]["sizes"])),
    "by the kernel": lambda way: sum(sent(2, way)),
}


@pytest.mark.parametrize("counted", COUNTED.values(), ids=COUNTED)
@pytest.mark.parametrize("way", OURS)
def test_a_window_sends_no_more_than_stock_with_no_sync(way, counted):
    assert counted(way) <= (BFLOAT16 if "bfloat16" in way else FLOAT32) * counted("stock")
    assert counted("stock, each") == pytest.approx(STEPS * counted("stock"), rel=0.01)


@pytest.mark.parametrize("way", OURS)
def test_a_window_has_a_collective_per_bucket_and_one_for_its_numbers(way):
    for rank in found(2)[0]:
        *before, last = rank[way]["sizes"]
        assert before == [[]] * (STEPS - 1)
        assert len(last) == rank[way]["buckets"] + 1 > 2
        assert last[-2] < 100, "the numbers are sent before the last bucket"
        assert rank[way]["updates"] == WINDOWS


@pytest.mark.parametrize("way", OURS)
def test_nothing_is_sent_before_the_last_micro_batch(way):
    *before, last = sent(2, way)
    assert max(before) < 10_000, "but for the barriers between which they are counted"
    assert last > PARAMETERS


@pytest.mark.parametrize("world", [2, 3])
def test_the_formula_gives_what_is_sent(world):
    names = ("stock, each", "stock", "ours", "ours, bfloat16")
    for scheme, name in zip(wire.SCHEMES, names, strict=True):
        wanted = wire.bytes_per_update(scheme, PARAMETERS, world, STEPS)
        assert sum(sent(world, name)) / world == pytest.approx(wanted, rel=0.01), name


def test_what_defer_saves_on_two_replicas_of_two_shards():
    """A micro-batch that defers the all-reduce sends no shard to the other replica. One that defers all sends
    only parameters.
    """
    all_reduced = 4 * PARAMETERS // 2 * 4  # by the four ranks: in a ring of two, each sends its shards once
    everything, only_all_reduce, nothing = (sent(4, defer) for defer in REPLICAS)
    assert nothing[0] - only_all_reduce[0] == pytest.approx(all_reduced, rel=0.01)
    assert only_all_reduce[0] - everything[0] >= 4 * PARAMETERS // 2 * 4, "reduce-scatter"
    assert everything[1] == pytest.approx(only_all_reduce[1], rel=0.01)
    assert everything[1] == pytest.approx(nothing[1], rel=0.01)


def test_the_page_shows_the_table_that_is_computed():
    page = Path(__file__).parents[2] / "docs" / "distributed.md"
    assert wire.table(**wire.SHOWN) in page.read_text()
