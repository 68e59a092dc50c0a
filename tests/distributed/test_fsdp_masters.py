"""FSDP2 on two ranks: master weights of bfloat16 shards, mixed precision, explain() and the meter."""

import torch
from fsdp_setting import adam, far, loss_of, sharded, wrap
from ranks import on_each_rank
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import fusedacc
from fusedacc.autograd.reasons import REASONS, SHARDED


@on_each_rank(2)
def test_masters() -> None:
    """Master weights get the same updates as float32 parameters with these gradients."""
    K, UPDATES = 2, 3
    for steps in (None, K):
        for inner in (adam, lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)):
            model = sharded(torch.bfloat16)
            optimizer = wrap(model, steps, inner, master_weights=True)
            wide = sharded(torch.bfloat16).float()
            reference = inner(wide)
            for index in range(K * UPDATES):
                last = (index + 1) % K == 0
                (loss_of(model, index) / (1 if steps else K)).backward()
                if last:
                    for p, q in zip(model.parameters(), wide.parameters(), strict=True):
                        q.grad = p.grad.clone()
                        assert q.grad.dtype == torch.float32
                    reference.step()
                if steps or last:
                    optimizer.step(), optimizer.zero_grad()
                for p, q in zip(model.parameters(), wide.parameters(), strict=True):
                    assert p.dtype == p.to_local().dtype == torch.bfloat16
                    assert torch.equal(p.to_local(), q.to_local().bfloat16()), (steps, index)
            assert all(
                isinstance(value, DTensor) and value.to_local().dtype == torch.float32
                for state in optimizer.state.values()
                for name, value in state.items()
                if name != "step"
            )
            saved = optimizer.state_dict()
            optimizer.load_state_dict(saved)
            for index, entry in saved["state"].items():
                kept = optimizer.state_dict()["state"][index]["fusedacc_master"]
                assert torch.equal(kept.to_local(), entry["fusedacc_master"].to_local())


@on_each_rank(2)
def test_mixed_precision() -> None:
    """FSDP2's mixed precision: float32 shards and bfloat16 computations."""
    K, UPDATES = 2, 3
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, stock = sharded(mp_policy=policy), sharded(mp_policy=policy)
    optimizer, inner = wrap(model, K), adam(stock)
    for index in range(K * UPDATES):
        with optimizer.accumulate(model):
            loss_of(model, index).backward()
        optimizer.step(), optimizer.zero_grad()
        (loss_of(stock, index) / K).backward()
        if (index + 1) % K == 0:
            inner.step(), inner.zero_grad()
    assert far(model, stock) < 2e-2  # losses are divided before they are rounded to 16 bits
    text = optimizer.explain()
    assert REASONS[SHARDED].words in text
    assert text.count("fsdp2") >= 6, text
    assert "set_requires_gradient_sync(False)" in text, text
    assert f"{4 * sum(p.numel() for p in model.parameters()):,} bytes" in text, text


@on_each_rank(2)
def test_the_meter() -> None:
    """The meter counts this rank's part.

    torch 2.11 runs an operator on DTensors once more with fake tensors, the first time that it meets them.
    """
    model = sharded()
    optimizer = wrap(model, 1, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    loss_of(model, 0).backward()
    optimizer.step()
    loss_of(model, 0).backward()
    with fusedacc.traffic.TrafficMeter(model) as meter:
        optimizer.step()
    own = sum(4 * p.to_local().numel() for p in model.parameters())
    figures = meter.as_dict()
    assert figures["by_phase"] == {"update": 3 * own}, (figures, own)
    assert figures["by_kind"] == {"weights": 2 * own, "gradients": own}, figures["by_kind"]
    with fusedacc.traffic.TrafficMeter(optimizer) as meter:
        loss_of(model, 1).backward()
        optimizer.step()
    assert meter.total_bytes > 3 * own
