"""FSDP2 on two ranks: checkpointing, hooks, exceptions and other unusual backwards."""

import gc

import pytest
import torch
import torch.distributed as dist
from fsdp_setting import adam, alone, batch, far, in_place, loss_of, network, plainly, sharded, trained, wrap
from loops import Failure, fail, with_backward
from ranks import on_ranks
from ranks_setting import refused
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint


class Checkpointed(nn.Module):
    """A network with checkpointed parts."""

    def __init__(self, model, reentrant):
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, x):
        x = x.detach().requires_grad_()
        for layer in (self.model[:2], self.model[2:4]):
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.model[4](x)


def kinds_of_backwards() -> None:
    """Test both kinds of checkpointing, custom modules, several backwards per micro-batch, and model=."""
    K, UPDATES = 2, 2
    wanted, _ = alone(K, UPDATES)
    for kind in ("checkpoint", "checkpoint, re-entrant", "pieces", "model="):
        model = network()
        for layer in (model[0], model[2]):
            fully_shard(layer)
        if kind.startswith("checkpoint"):
            model = Checkpointed(model, kind == "checkpoint, re-entrant")
        fully_shard(model)
        options = {"model": model} if kind == "model=" else {}
        optimizer = wrap(model, K, **options)
        for index in range(K * UPDATES):
            if kind == "pieces":
                losses = model(batch(index, dist.get_rank())).pow(2).div(3).sum(1)
                for number, loss in enumerate(losses):
                    loss.backward(retain_graph=number < 2)
                assert (model[0].weight.grad is None) == (index % K == 0)
            else:
                loss_of(model, index).backward()
            optimizer.step()
            if index % K == 0:
                assert all(p.grad is None for p in model.parameters())
        assert optimizer.num_updates == UPDATES
        assert far(model, wanted) < 6e-7, (kind, far(model, wanted))


def zeros_that_stay() -> None:
    """Zero gradients stay visible in both loops."""
    K, UPDATES = 2, 2
    wanted, _ = alone(K, UPDATES)
    for steps in (None, K):
        model = sharded()
        optimizer = wrap(model, steps)
        for index in range(K * UPDATES):
            (loss_of(model, index) / (1 if steps else K)).backward()
            if steps or (index + 1) % K == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        assert far(model, wanted) < 3e-7, (steps, far(model, wanted))
        assert all(isinstance(p.grad, DTensor) and not p.grad.to_local().any() for p in model.parameters())


def a_frozen_layer() -> None:
    """A layer is unfrozen between windows."""
    K, UPDATES = 2, 2
    model, reference = sharded(), network()
    optimizer, inner = wrap(model, K), adam(reference)
    for index in range(K * UPDATES):
        for each in (model, reference):
            each[2].requires_grad_(index >= K)
        loss_of(model, index).backward()
        optimizer.step(), optimizer.zero_grad()
        for of_rank in (0, 1):
            (loss_of(reference, index, of_rank) / (2 * K)).backward()
        if (index + 1) % K == 0:
            inner.step(), inner.zero_grad()
    assert far(model, reference) < 3e-7, far(model, reference)


def an_exception() -> None:
    """An exception on both ranks makes the window invalid until discard()."""
    K, UPDATES = 2, 2
    wanted, _ = alone(K, UPDATES)
    model = sharded()
    optimizer = wrap(model, K)
    loss_of(model, 0).backward()
    optimizer.step()
    handle = model[0].register_forward_hook(lambda module, args, output: with_backward(output, fail))
    refused(Failure, "", lambda: loss_of(model, 1).backward())
    handle.remove()
    refused(RuntimeError, "discard()", optimizer.step)
    optimizer.discard()
    for index in range(K * UPDATES):
        loss_of(model, index).backward()
        optimizer.step()
    assert far(model, wanted) < 3e-7


def a_hook_of_the_users() -> None:
    """A user's hook on a shard still sees p.grad, and the sums are correct."""
    K = 2
    wanted, _ = alone(K, 1)
    model, seen = sharded(), []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_local().clone()))
    optimizer = wrap(model, K)
    for index in range(K):
        loss_of(model, index).backward()
        assert len(seen) == index + 1
        optimizer.step()
    assert far(model, wanted) < 3e-7
    optimizer.close()
    assert len(model[0].weight._post_accumulate_grad_hooks) == 1


def a_wrapper_that_is_forgotten() -> None:
    """A deleted wrapper leaves nothing on the parameters, and plain PyTorch continues."""
    model, optimizer = trained(2)
    loss_of(model, 2).backward()
    optimizer.step()
    del optimizer
    gc.collect()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    loss_of(model, 0).backward()
    assert all(p.grad is not None for p in model.parameters())


def bfloat16_shards_after_close() -> None:
    """After close(), FSDP2 stores gradients in the shards' dtype again."""
    low = torch.bfloat16
    model = sharded(low, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    optimizer = wrap(model, 1)
    loss_of(model, 0).backward()
    optimizer.step(), optimizer.zero_grad()
    optimizer.close()
    loss_of(model, 1).backward()
    assert all(p.grad.dtype is low for p in model.parameters())


def no_hooked_module() -> None:
    """A backward through no hooked module may have added to spent gradients, so the wrapper raises."""
    model = sharded()
    optimizer = wrap(model, 1)
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if "Shards" in str(getattr(hook, "args", "")):
                del module._forward_hooks[key]
    loss_of(model, 0).backward()
    optimizer.step()
    refused(RuntimeError, "optimizer.zero_grad()", lambda: loss_of(model, 1).backward())
    optimizer.discard()
    for index in range(2):
        loss_of(model, index).backward()
        optimizer.step(), optimizer.zero_grad()
    assert optimizer.num_updates == 3


@pytest.mark.sweep(pairs=False)
@pytest.mark.parametrize("run", [plainly, in_place])
@pytest.mark.parametrize(
    "check",
    [
        kinds_of_backwards,
        zeros_that_stay,
        a_frozen_layer,
        an_exception,
        a_hook_of_the_users,
        a_wrapper_that_is_forgotten,
        no_hooked_module,
        bfloat16_shards_after_close,
    ],
)
def test_backwards(run, check):
    on_ranks(2, run, check)
