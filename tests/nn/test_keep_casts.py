"""`keep_casts=True`: a weight is cast once per window, and no result changes."""

import pytest
import torch
import torch.distributed as dist
from kept_casts import BF16, MODELS, Conv1D, CountCasts, autocast, casts_of, loss_of, make, train
from loops import assert_equal_weights
from one_rank import process_group
from torch import nn

import fusedacc


@pytest.mark.sweep
@pytest.mark.parametrize("loop", ["counted", "counted scaled", "manual", "manual scaled"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("hooks", ["0", "1"])
def test_parameters_have_the_same_bits(kind, loop, hooks, monkeypatch):
    monkeypatch.setenv("FUSEDACC_ENGINE", hooks)
    ours, optimizer = train(kind, True, loop)
    theirs, _ = train(kind, False, loop)
    assert_equal_weights(ours, theirs)
    assert optimizer.num_updates == 2
    assert not casts_of(optimizer)


@pytest.mark.parametrize("kind", ["perceptron", "encoder", "not reentrant", "convolutions"])
def test_each_weight_is_cast_once_a_window(kind):
    model, optimizer = make(kind)
    layers = nn.Linear | nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d
    shapes = {
        module.weight.shape
        for name, module in model.named_modules()
        if isinstance(module, layers) and "self_attn" not in name  # attention calls no Linear
    }
    kept: list[torch.Tensor] = []
    with CountCasts() as counted:
        for seed in range(4):
            assert len(casts_of(optimizer)) == len(kept)
            loss_of(model, seed).backward()
            kept = casts_of(optimizer)
            optimizer.step(), optimizer.zero_grad()
    of_shape = {cast.shape: sum(other.shape == cast.shape for other in kept) for cast in kept}
    assert of_shape.keys() == shapes
    assert {shape: counted.found[shape] for shape in shapes} == of_shape


def test_a_reentrant_checkpoint_casts_without_a_graph_and_once():
    """Its first forward runs without gradients, so autocast makes the casts."""
    model, optimizer = make("reentrant")
    with CountCasts() as counted:
        for seed in range(4):
            loss_of(model, seed).backward()
            optimizer.step()
    assert counted.found[model.blocks[0].linear1.weight.shape] == 2 * (4 + 1)


def test_without_autocasts_cache_nothing_is_kept():
    model, optimizer = make("convolutions")
    for seed in range(2):
        with torch.autocast("cpu", BF16, cache_enabled=False):
            model(model.batch(torch.Generator().manual_seed(seed))).float().sum().backward()
        assert not casts_of(optimizer)
        optimizer.step()


def test_the_conv1d_of_transformers():
    def after(keep):
        model, optimizer = make(lambda: nn.Sequential(Conv1D(6, 6), nn.Tanh(), Conv1D(6, 6)), keep)
        for seed in range(8):
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed))
            with autocast():
                out = model(x)
            out.float().square().sum().backward()
            assert len(casts_of(optimizer)) == (2 if keep else 0)
            optimizer.step()
        return model

    assert_equal_weights(after(True), after(False))


def test_a_reduction_over_ranks(tmp_path):
    """Check one rank's part. The last backward reduces, and another rank's weights may be copied."""

    def after(keep):
        model, optimizer = make("perceptron", keep, data_parallel=dist.group.WORLD)
        for seed in range(10):
            loss_of(model, seed).backward()
            optimizer.step()
        optimizer.flush()
        assert optimizer.num_updates == 3
        assert not casts_of(optimizer)
        loss_of(model)
        optimizer.attach(nn.parallel.DistributedDataParallel(model))
        assert not casts_of(optimizer)
        optimizer.close()
        return model

    with process_group("gloo", tmp_path):
        assert_equal_weights(after(True), after(False))


def test_keep_casts_needs_model():
    with pytest.raises(ValueError, match=r"(?s)keep_casts=True needs model=.*allowed: keep_casts=False"):
        fusedacc.AccumulatingOptimizer(torch.optim.SGD(nn.Linear(1, 1).parameters()), keep_casts=True)
    fusedacc.AccumulatingOptimizer(torch.optim.SGD(nn.Linear(1, 1).parameters()), keep_casts=False)
