"""FSDP2 on two ranks: gradients that it has not yet reduced, when windows continue, end early or are lost."""

import pytest
import torch
from fsdp_setting import alone, far, hybrid, in_place, loss_of, plainly, sharded, wrap
from ranks import on_ranks
from ranks_setting import refused


def what_fsdp_keeps() -> None:
    """The wrapper counts gradients that FSDP2 holds. It cannot save them or end a window with them."""
    model = sharded()
    optimizer = wrap(model, 2)
    model.set_requires_gradient_sync(False)
    loss_of(model, 0).backward()
    refused(RuntimeError, "set_requires_gradient_sync(True)", optimizer.state_dict)
    optimizer.step()
    assert optimizer.micro_step == 1
    refused(RuntimeError, "set_requires_gradient_sync(True)", optimizer.state_dict)
    optimizer.state_dict(include_partial=False)

    def ignored():
        with optimizer.ignore():
            loss_of(model, 7).backward()

    refused(RuntimeError, "ignore()", ignored)
    optimizer.discard()
    for index in (0, 1):
        loss_of(model, index).backward()
        if index == 0:
            optimizer.step()
    refused(RuntimeError, "step() would update without them", optimizer.step)
    # discard() also discards the gradients that FSDP2 holds.
    optimizer.discard()
    assert (optimizer.micro_step, optimizer.num_updates) == (0, 0)
    wanted, _ = alone(2, 1)
    for index in (0, 1):
        with optimizer.accumulate(model):
            loss_of(model, index).backward()
        optimizer.step()
    assert optimizer.num_updates == 1
    assert far(model, wanted) < 3e-7


def flush_synchronises() -> None:
    """Test flush() with and without a micro-batch that no step() has ended."""
    wanted, _ = alone(3, 1)
    for ends in (True, False):
        for synchronised in ((), (1,)):
            model = sharded()
            optimizer = wrap(model, 5)
            for index in range(3):
                model.set_requires_gradient_sync(index in synchronised)
                loss_of(model, index).backward()
                if ends or index < 2:
                    optimizer.step(), optimizer.zero_grad()
            optimizer.flush()
            assert (optimizer.num_updates, optimizer.micro_step) == (1, 0)
            assert far(model, wanted) < 3e-7, (ends, synchronised, far(model, wanted))
            optimizer.close()
            model.set_requires_gradient_sync(True)  # FSDP2 continues as before
            model.zero_grad()
            loss_of(model, 3).backward()
            stock = sharded()
            stock.load_state_dict(model.state_dict())
            loss_of(stock, 3).backward()
            for p, q in zip(model.parameters(), stock.parameters(), strict=True):
                torch.testing.assert_close(p.grad.to_local(), q.grad.to_local(), rtol=1e-6, atol=1e-8)


def replicas_that_wait() -> None:
    """Test HSDP whose replicas are synchronized once per window."""
    K, UPDATES = 2, 2
    wanted, _ = alone(K, UPDATES)
    model = sharded(mesh=hybrid(2, 1))
    optimizer = wrap(model, K)
    for index in range(K * UPDATES):
        model.set_requires_all_reduce(optimizer.will_update)
        loss_of(model, index).backward()
        if index % K == 0:
            refused(RuntimeError, "FSDP2 keeps", optimizer.state_dict)
        optimizer.step(), optimizer.zero_grad()
    assert optimizer.num_updates == UPDATES
    assert far(model, wanted) < 3e-7


@pytest.mark.sweep(pairs=False)
@pytest.mark.parametrize("run", [plainly, in_place])
@pytest.mark.parametrize("check", [what_fsdp_keeps, flush_synchronises, replicas_that_wait])
def test_what_fsdp_keeps(run, check):
    on_ranks(2, run, check)
