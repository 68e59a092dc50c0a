"""Two ranks on gloo, with DistributedDataParallel and without: correct, by the stock path."""

from __future__ import annotations

import textwrap

from ranks import run_on_two_ranks

SCRIPT = textwrap.dedent(
    """
    import copy, gc, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    import fusedacc

    rank, rendezvous = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    K, UPDATES = 2, 3

    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))

    def loss_of(model, index, of_rank):
        generator = torch.Generator().manual_seed(10 * index + of_rank)
        return model(torch.randn(3, 4, generator=generator)).pow(2).mean()

    def stock(ranks):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for index in range(K * UPDATES):
            for of_rank in ranks:
                (loss_of(model, index, of_rank) / (K * len(ranks))).backward()
            if (index + 1) % K == 0:
                optimizer.step(), optimizer.zero_grad()
        return model

    def wrapped(model, steps):
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return fusedacc.AccumulatingOptimizer(inner, steps)

    def check(what, model, reference):
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=lambda m: f"{what}: {m}")

    both, own = stock([0, 1]), stock([rank])

    for silent in (True, False):  # synchronised once a window, or after every micro-batch
        model = network()
        parallel = DistributedDataParallel(model)
        optimizer = wrapped(parallel, K)
        synchronised = []
        for index in range(K * UPDATES):
            if silent:
                with optimizer.accumulate(model=parallel):
                    synchronised.append(parallel.require_backward_grad_sync)
                    loss_of(parallel, index, rank).backward()
            else:
                loss_of(parallel, index, rank).backward()
            optimizer.step(), optimizer.zero_grad()
        assert optimizer.num_updates == UPDATES
        assert not any(synchronised), "the wrapper reduces"
        check(f"counted, silent={silent}", model, both)
        optimizer.close()

    model = network()
    parallel = DistributedDataParallel(model)
    optimizer = wrapped(parallel, None)
    for index in range(K * UPDATES):
        last = (index + 1) % K == 0
        if last:
            (loss_of(parallel, index, rank) / K).backward()
            optimizer.step(), optimizer.zero_grad()
        else:
            with parallel.no_sync():
                (loss_of(parallel, index, rank) / K).backward()
    check("manual", model, both)

    model = network()
    optimizer = wrapped(model, K)
    for index in range(K * UPDATES):
        loss_of(model, index, rank).backward()
        optimizer.step(), optimizer.zero_grad()
    check("each rank for itself", model, own)
    optimizer.close()

    for silent in (True, False):  # clipped between the last backward and step()
        model = network()
        parallel = DistributedDataParallel(model)
        optimizer = wrapped(parallel, K)
        for index in range(K):
            if silent:
                with optimizer.accumulate(model=parallel):
                    loss_of(parallel, index, rank).backward()
            else:
                loss_of(parallel, index, rank).backward()
            if optimizer.will_update:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
        assert optimizer.num_updates == 1
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        torch.testing.assert_close(norm, torch.tensor(1e-3), rtol=1e-4, atol=0)
        gathered = [torch.empty_like(model[0].weight) for _ in range(2)]
        dist.all_gather(gathered, model[0].weight.grad)
        assert torch.equal(*gathered), f"silent={silent}: ranks differ"
        optimizer.close()

    model = network()
    optimizer = wrapped(model, K)
    text = str(optimizer.explain())
    assert "rank" in text or "process group" in text, text
    del parallel  # no reducer left, and no rank ahead, when the threads of the group end
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    """
)


def test_two_ranks_train_as_stock(tmp_path):
    run_on_two_ranks(tmp_path, SCRIPT)
