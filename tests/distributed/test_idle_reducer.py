"""DDP's own reducer is freed, with its memory, while the wrapper reduces."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from loops import network
from ranks import on_each_rank, on_ranks
from ranks_setting import inner_of, train, wrap
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile


@pytest.mark.parametrize(
    "options",
    [{}, {"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}],
)
@on_each_rank(2)
def test_it_reduces_again_once_the_wrapper_is_closed(options: dict) -> None:
    model, wanted = network(), network()
    parallel = DistributedDataParallel(model, **options)
    optimizer = wrap(model, 2, data_parallel=parallel)
    train(parallel, optimizer, range(3))
    optimizer.close()
    wanted.load_state_dict(model.state_dict())
    train(parallel, inner_of(model), range(3))
    train(DistributedDataParallel(wanted, **options), inner_of(wanted), range(3))
    assert all(map(torch.equal, model.parameters(), wanted.parameters()))


def bytes_of_model_and_wrapper() -> int:
    """Return the bytes that stay allocated after the model and the wrapper are made."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        parallel = DistributedDataParallel(nn.Linear(1000, 1000), init_sync=False)
        optimizer = wrap(parallel, 2, data_parallel=parallel)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    optimizer.close()
    return sum(event["args"]["Bytes"] for event in events if event["name"] == "[memory]")


def test_its_memory_is_free_for_the_sums():
    for kept in on_ranks(2, bytes_of_model_and_wrapper):
        assert 8_000_000 < kept < 8_100_000, "of parameters and sums, and no third of buckets"


@on_each_rank(2)
def test_who_asks_for_it_is_told_where_it_is() -> None:
    parallel = DistributedDataParallel(network())
    optimizer = wrap(parallel, 2, data_parallel=parallel)
    with pytest.raises(AttributeError, match=r"_set_static_graph.*optimizer.close\(\)"):
        parallel._set_static_graph()
    optimizer.close()
