"""FSDP2 on two ranks: weighted losses."""

import torch
import torch.distributed as dist
from fsdp_setting import adam, far, loss_of, network, sharded, whole, wrap
from ranks import mesh_of, on_each_rank
from ranks_setting import refused
from torch.distributed.fsdp import fully_shard


@on_each_rank(2)
def test_weights() -> None:
    """FSDP2 averages before weights can be applied. Sums over the weights of all ranks are correct."""
    rank = dist.get_rank()
    model = sharded()
    refused(ValueError, "reduction='weighted'", lambda: wrap(model, 2, reduction="weighted"))
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())

    def weight_of(index, of_rank):
        return (3, 1, 2, 5 if late else 0)[(index + 2 * of_rank) % 4]

    for steps, late, micro_batches in ((2, False, 4), (2, True, 4), (4, True, 2), (None, False, 4)):
        reference = network()
        inner = adam(reference)
        model = sharded()
        if late:  # FSDP2 sums instead
            for module in (model, model[0], model[2]):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
        optimizer = wrap(model, steps, reduction="normalized")
        for index in range(micro_batches):
            total = sum(weight_of(2 * (index // 2) + i, r) for i in (0, 1) for r in (0, 1))
            for of_rank in (0, 1):
                (weight_of(index, of_rank) * loss_of(reference, index, of_rank) / total).backward()
            weight = weight_of(index, rank)
            with optimizer.accumulate(weight=None if late else weight) as micro_batch:
                (weight * loss_of(model, index)).backward()
                if late:
                    micro_batch.weight = weight
            if index % 2:
                if steps == 2 and not late:
                    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                        torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-5, atol=1e-8)
                inner.step(), inner.zero_grad()
            if steps or index % 2:
                optimizer.step(), optimizer.zero_grad()
            if steps == 4 and index % 2:
                optimizer.flush()
                optimizer.zero_grad()
        assert optimizer.num_updates == micro_batches // 2
        assert far(model, reference) < 1e-6, (steps, late, far(model, reference))


@on_each_rank(2)
def test_weights_are_added_over_the_group_with_the_most_ranks() -> None:
    """The first group has one rank only, and is divided by two as the other one, which has both ranks."""
    rank = dist.get_rank()
    total = sum(index + of_rank + 1.0 for index in (0, 1) for of_rank in (0, 1))
    for resumes in (False, True):
        mesh = mesh_of((2, 1), ("both", "one"))
        model = network()
        fully_shard(model[0], mesh=mesh["one"])
        fully_shard(model, mesh=mesh["both"])
        model[0].set_gradient_divide_factor(2.0)
        optimizer = wrap(model, 2, reduction="normalized")
        of_rank, of_both = network(), network()
        for index in (0, 1):
            with optimizer.accumulate(weight=index + rank + 1.0):
                ((index + rank + 1.0) * loss_of(model, index)).backward()
            ((index + rank + 1.0) * loss_of(of_rank, index) / total).backward()
            for other in (0, 1):
                ((index + other + 1.0) * loss_of(of_both, index, other) / total).backward()
            if index == 0:
                optimizer.step(), optimizer.zero_grad()
                if resumes:
                    optimizer.load_state_dict(optimizer.state_dict())
        for layer, reference in ((0, of_rank), (2, of_both), (4, of_both)):
            for p, q in zip(model[layer].parameters(), reference[layer].parameters(), strict=True):
                torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-5, atol=1e-8)
