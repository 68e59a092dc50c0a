"""`rounding=` and `seed=` of the wrapper: errors and `explain()`."""

from typing import Any

import pytest
import torch
from loops import LOW, loss_of, micro_batch, network, wrap

from fusedacc.kernels import torch_state

STOCHASTIC: dict[str, Any] = {"accumulate_dtype": LOW, "rounding": "stochastic"}
DTYPE = "accumulate_dtype is %s; allowed: accumulate_dtype=torch.bfloat16, or rounding='nearest'"
BAD = {
    "unknown": ({"rounding": "random"}, ValueError, "rounding is 'random'; allowed: 'nearest', 'stochastic'"),
    "of another kind": ({"rounding": 1}, ValueError, "rounding is 1; allowed"),
    "default dtype": ({"rounding": "stochastic"}, ValueError, DTYPE % None),
    "float32": (STOCHASTIC | {"accumulate_dtype": torch.float32}, ValueError, DTYPE % "torch.float32"),
    "float16": (STOCHASTIC | {"accumulate_dtype": torch.float16}, ValueError, DTYPE % "torch.float16"),
    "str dtype": (STOCHASTIC | {"accumulate_dtype": "bfloat16"}, ValueError, DTYPE % "bfloat16"),
    "idle seed": ({"seed": 0}, ValueError, "seed is 0, but rounding='nearest' takes no random bits"),
    "float seed": (STOCHASTIC | {"seed": 0.5}, TypeError, r"seed is 0\.5 \(float\); allowed: an int"),
    "bool seed": (STOCHASTIC | {"seed": False}, TypeError, r"seed is False \(bool\); allowed"),
    "negative": (STOCHASTIC | {"seed": -1}, ValueError, r"seed is -1; allowed: 0 to 9223372036854775807"),
    "too large": (STOCHASTIC | {"seed": 2**63}, ValueError, "seed is 9223372036854775808; allowed"),
}


@pytest.mark.parametrize(("options", "kind", "said"), BAD.values(), ids=BAD)
def test_bad_arguments_are_refused_and_change_nothing(options, kind, said):
    model = network(LOW)
    before = [(p.detach().clone(), p.grad_dtype) for p in model.parameters()]
    with pytest.raises(kind, match=said):
        wrap(model, 2, model=model, **options)
    for p, (value, grad_dtype) in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, value)
        assert p.grad_dtype == grad_dtype
        assert not p._backward_hooks
    assert "forward" not in model[0].__dict__
    optimizer = wrap(model, 1, seed=0, **STOCHASTIC)  # no other wrapper holds the parameters
    micro_batch(model, optimizer, 0)
    assert optimizer.num_updates == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_parameters_that_bfloat16_cannot_sum_are_refused(dtype):
    with pytest.raises(ValueError, match=f"accumulate_dtype=torch.bfloat16 does not go with .* of {dtype}"):
        wrap(network(dtype), 2, **STOCHASTIC)


@pytest.mark.parametrize("steps", [2, None])
def test_a_cuda_graph_is_refused_before_anything_is_added(steps, monkeypatch):
    model = network(LOW)
    optimizer = wrap(model, steps, seed=0, **STOCHASTIC)
    monkeypatch.setattr(torch_state, "capturing", lambda: True)
    optimizer.zero_grad()
    with pytest.raises(
        RuntimeError, match=r"would replay the random bits .* allowed: rounding='nearest', or no"
    ):
        loss_of(model).backward()
    monkeypatch.setattr(torch_state, "capturing", lambda: False)
    assert all(p.grad is None for p in model.parameters())
    optimizer.zero_grad()
    for number in range(2):
        micro_batch(model, optimizer, number)
    assert optimizer.num_updates == (1 if steps else 2)


def test_explain_names_the_rounding_and_the_seed():
    model = network(LOW)
    text = wrap(model, 3, seed=41, model=model, **STOCHASTIC).explain()
    assert "the sums of 4 parameters are rounded stochastically" in text
    assert "(seed 41)" in text
    assert "rounded to nearest" not in text
    model = network(LOW)
    assert "stochastic" not in wrap(model, 3, accumulate_dtype=LOW).explain()


def test_explain_shows_two_bytes_at_first_and_six_later():
    """Two more bytes are for the gradient itself."""
    text = wrap(network(LOW), 3, seed=0, **STOCHASTIC).explain().splitlines()
    header = next(line for line in text if "first" in line)
    rows = [line for line in text if line.startswith(("0.", "2."))]
    assert len(rows) == 4, header
    for row in rows:
        assert {"2", "8"} <= set(row.split()), (header, row)
    nearest = wrap(network(LOW), 3, accumulate_dtype=LOW).explain().splitlines()
    assert any("6" in line.split() for line in nearest if line.startswith("0.")), "thirds are not deferred"
