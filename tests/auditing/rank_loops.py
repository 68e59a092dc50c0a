"""Loops with DistributedDataParallel and FSDP2, for two ranks. As in plain_loops.py."""

import contextlib
import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from plain_loops import K, adam, data, mlp, text, text_model
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

import fusedacc

CASES = {}


def case(function):
    """Add a loop to the cases."""
    CASES[function.__name__] = function
    return function


def batches(n=24, size=16):
    """Return other data on each rank."""
    return data(n, size, seed=10 + dist.get_rank())


def loop(model, optimizer, source, sync=lambda i: True, divide=K, k=K):
    for i, (x, y) in enumerate(source):
        with contextlib.nullcontext() if sync(i) else model.no_sync():
            (F.cross_entropy(model(x), y) / divide).backward()
        if (i + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_ddp():
    model = DDP(mlp())
    loop(model, adam(model), batches())


@case
def right_ddp_no_sync():
    model = DDP(mlp())
    loop(model, adam(model), batches(), lambda i: (i + 1) % K == 0)


@case
def right_ddp_views():
    model = DDP(mlp(), gradient_as_bucket_view=True)
    loop(model, adam(model), batches(), lambda i: (i + 1) % K == 0)


@case
def right_ddp_k1():
    model = DDP(mlp())
    loop(model, adam(model), batches(8), divide=1, k=1)


@case
def right_ddp_two_optimizers():
    """Two optimizers for two halves of a model, which step together."""
    model = DDP(mlp())
    optimizers = [adam(model.module[:4]), adam(model.module[4:])]
    for i, (x, y) in enumerate(batches()):
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@case
def right_ddp_ragged_last_batch():
    """The last micro-batch of each rank's data is smaller, as with drop_last=False."""
    model = DDP(mlp())
    loop(model, adam(model), [*batches(11), *batches(1, size=12)])


@case
def bad_ddp_no_sync_left_on():
    model = DDP(mlp())
    loop(model, adam(model), batches(), lambda i: False)


@case
def bad_ddp_no_sync_on_last():
    model = DDP(mlp())
    loop(model, adam(model), batches(), lambda i: i % K == 0)


@case
def bad_ddp_zero_each():
    model = DDP(mlp())
    optimizer = adam(model)
    for i, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()


@case
def bad_ddp_divided_by_ranks_too():
    model = DDP(mlp())
    loop(model, adam(model), batches(), divide=K * 2)


@case
def bad_ddp_not_divided():
    model = DDP(mlp())
    loop(model, adam(model), batches(), divide=1)


@case
def bad_no_ddp():
    """Each rank trains alone."""
    model = mlp()
    loop(model, adam(model), batches())


@case
def right_all_reduce_by_hand():
    model = mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(batches()):
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= 2
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_all_reduce_sum():
    model = mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(batches()):
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            for p in model.parameters():
                dist.all_reduce(p.grad)
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_all_reduce_each():
    """All-reduce of the running sum after every micro-batch: earlier ones are averaged again and again."""
    model = mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(batches()):
        (F.cross_entropy(model(x), y) / K).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_ddp_tokens():
    model = DDP(text_model())
    optimizer = adam(model)
    for i, (x, y) in enumerate(text(seed=dist.get_rank())):
        (F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_ddp_tokens():
    model = DDP(text_model())
    optimizer = adam(model)
    source = list(text(seed=dist.get_rank()))
    for at in range(0, len(source), K):
        window = source[at : at + K]
        total = torch.tensor([sum(int(y.ne(-100).sum()) for _, y in window)])
        dist.all_reduce(total)
        for x, y in window:
            (F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") * 2 / total).backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def bad_ddp_tokens_of_own_rank():
    """Each rank divides by its own tokens."""
    model = DDP(text_model())
    optimizer = adam(model)
    source = list(text(seed=dist.get_rank() * 5))
    for at in range(0, len(source), K):
        window = source[at : at + K]
        total = sum(int(y.ne(-100).sum()) for _, y in window)
        for x, y in window:
            (F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / total).backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def right_ddp_clip():
    model = DDP(mlp())
    optimizer = adam(model)
    for i, (x, y) in enumerate(batches()):
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()


@case
def right_ddp_scaler_skips():
    """All ranks skip an update because of an inf on one of them."""
    model = DDP(mlp())
    optimizer, scaler = adam(model), torch.amp.GradScaler("cpu", init_scale=128.0)
    for i, (x, y) in enumerate(batches()):
        factor = float("inf") if i == 5 and dist.get_rank() == 1 else 1.0
        with contextlib.nullcontext() if (i + 1) % K == 0 else model.no_sync():
            scaler.scale(F.cross_entropy(model(factor * x), y) / K).backward()
        if (i + 1) % K == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@case
def right_ddp_bf16():
    model = DDP(mlp(torch.bfloat16))
    optimizer = adam(model)
    for i, (x, y) in enumerate(batches()):
        (F.cross_entropy(model(x.bfloat16()), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


def shard():
    """Return a network with FSDP2."""
    model = mlp()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


@case
def right_fsdp2():
    model = shard()
    loop(model, adam(model), batches())


@case
def right_fsdp2_sync_last():
    model = shard()
    optimizer = adam(model)
    for i, (x, y) in enumerate(batches()):
        model.set_requires_gradient_sync((i + 1) % K == 0)
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_fsdp2_never_syncs_last():
    """The last micro-batch is not synchronised, so its gradient waits for the next window."""
    model = shard()
    optimizer = adam(model)
    for i, (x, y) in enumerate(batches()):
        model.set_requires_gradient_sync((i + 1) % K != 0)
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_fsdp2_zero_each():
    model = shard()
    optimizer = adam(model)
    for i, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()


@case
def bad_fsdp2_not_divided():
    model = shard()
    loop(model, adam(model), batches(), divide=1)


@case
def bad_fsdp2_not_divided_but_clipped():
    model = shard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for i, (x, y) in enumerate(batches()):
        F.cross_entropy(model(x), y).backward()
        if (i + 1) % K == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_fsdp2_second_model():
    """Two models that take turns. Micro-batches of the second one are lost."""
    models = shard(), shard()
    optimizers = [adam(model) for model in models]
    source = batches()
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            for x, y in itertools.islice(source, K):
                if model is models[1]:
                    optimizer.zero_grad()
                (F.cross_entropy(model(x), y) / K).backward()
            optimizer.step()
            optimizer.zero_grad()


@case
def right_fsdp2_two_models_step_together():
    models = shard(), shard()
    optimizers = [adam(model) for model in models]
    for i, (x, y) in enumerate(batches(12)):
        for model in models:
            (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@case
def right_fsdp2_mixed():
    model = mlp()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    loop(model, adam(model), batches())


@case
def right_fusedacc_ddp():
    model = DDP(mlp())
    optimizer = fusedacc.AccumulatingOptimizer(adam(model), K, data_parallel=model)
    for x, y in batches(22):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()


@case
def right_fusedacc_fsdp2():
    model = shard()
    optimizer = fusedacc.AccumulatingOptimizer(adam(model), K, model=model, max_grad_norm=0.05)
    for x, y in batches(22):
        with optimizer.accumulate(model):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()


# What the audit cannot judge


def zero_redundancy():
    """Each rank updates one of two layers that have the same shape."""
    model = DDP(nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20)))
    loop(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3), batches())


def other_optimizers():
    """Rank 0 trains another model alone before."""
    if dist.get_rank() == 0:
        model = mlp()
        loop(model, torch.optim.SGD(model.parameters(), lr=0.01), data(K))
    right_ddp()
