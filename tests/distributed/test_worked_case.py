"""Three workers x micro-batch 3 x 2 steps = 18 samples, whose update divides by 18; and 3 x 1 x 2 = 6."""

from __future__ import annotations

import textwrap

from ranks import run_on_ranks

SCRIPT = textwrap.dedent(
    """
    import gc, sys
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    import fusedacc

    rank, rendezvous, ranks = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    meeting = dict(init_method=f"file://{rendezvous}", timeout=timedelta(seconds=20))
    dist.init_process_group("gloo", rank=rank, world_size=ranks, **meeting)
    STEPS, FEATURES = 2, 50

    class Weights(nn.Module):
        '''The gradient of a sample's loss is the sample.'''

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(FEATURES))

        def forward(self, x):
            return x @ self.weight

    def ulps(found, wanted):
        spacing = torch.nextafter(wanted.abs(), torch.tensor(torch.inf)) - wanted.abs()
        return ((found - wanted) / spacing).abs().max().item()

    for per_step in (3, 1):
        samples = ranks * per_step * STEPS
        assert samples == {3: 18, 1: 6}[per_step]
        generator = torch.Generator().manual_seed(samples)
        # Where they have one sign no sum is smaller than its terms, which 1/3 has rounded.
        data = torch.randint(100, (2, STEPS, ranks, per_step, FEATURES), generator=generator).float()
        for ddp in (True, False):
            for reduction in ("sum", "mean", "weighted", "normalized"):
                model = Weights()
                net = DistributedDataParallel(model) if ddp else model
                inner = torch.optim.SGD(model.parameters(), lr=1 / samples if reduction == "sum" else 1.0)
                optimizer = fusedacc.AccumulatingOptimizer(
                    inner, STEPS, reduction=reduction, data_parallel=net if ddp else dist.group.WORLD
                )
                wanted = torch.zeros(FEATURES)
                for window in data:
                    for of_ranks in window:
                        losses = net(of_ranks[rank])
                        # Over ranks "sum" is the mean of their sums, as with DistributedDataParallel.
                        loss = losses.mean() if reduction in ("mean", "weighted") else losses.sum()
                        loss = ranks * loss if reduction == "sum" else loss
                        weight = per_step if reduction in ("weighted", "normalized") else None
                        with optimizer.accumulate(weight=weight):
                            loss.backward()
                        optimizer.step()
                    total = window.sum((0, 1, 2))
                    what = per_step, ddp, reduction
                    if reduction == "sum":
                        assert torch.equal(model.weight.grad, total), what
                        wanted.sub_(total, alpha=1 / samples)
                        assert torch.equal(model.weight, wanted), what
                    else:
                        assert ulps(model.weight.grad, total / samples) <= 3, what
                assert optimizer.num_updates == 2
                optimizer.close()

        # An existing loop divides when all is added: of either sign, bit for bit.
        model = Weights()
        net = DistributedDataParallel(model)
        inner = torch.optim.SGD(model.parameters(), lr=1 / samples)
        optimizer = fusedacc.AccumulatingOptimizer(inner, data_parallel=net)
        first, last = data[0] - 50
        with net.no_sync():
            (ranks * net(first[rank]).sum()).backward()
        (ranks * net(last[rank]).sum()).backward()
        total = (first + last).sum((0, 1))
        assert torch.equal(model.weight.grad, total), per_step
        optimizer.step()
        assert torch.equal(model.weight, torch.zeros(FEATURES).sub(total, alpha=1 / samples)), per_step
        optimizer.close()
    del net, model, optimizer
    gc.collect()  # no reducer left when the threads of the group end
    dist.barrier()
    dist.destroy_process_group()
    """
)


def test_every_sample_of_three_workers_counts_once(tmp_path):
    run_on_ranks(tmp_path, SCRIPT, 3)
