"""DeepSpeed's ZeRO stages 0 to 2 on one CPU, with and without fusedacc inside.

pip install deepspeed==0.19.8
DS_ACCELERATOR=cpu python examples/other_libraries/deepspeed_zero.py
"""

import os

import deepspeed
import torch
from torch import nn

import fusedacc

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29611")
K = 4


def train(stage, bfloat16, wraps):
    """Train for two updates of K micro-batches, and return the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if wraps:
        optimizer = fusedacc.AccumulatingOptimizer(optimizer)  # without a count: DeepSpeed counts
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": K,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bfloat16},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(2 * K):
        x, y = torch.randn(4, 8), torch.randn(4, 4)
        output = engine(x.bfloat16() if bfloat16 else x).float()
        engine.backward(nn.functional.mse_loss(output, y))
        engine.step()
    return [param.detach().clone() for param in model.parameters()]


for stage in (0, 1, 2):
    for bfloat16 in (False, True):
        stock, ours = (train(stage, bfloat16, wraps) for wraps in (False, True))
        equal = all(map(torch.equal, ours, stock))
        print(f"ZeRO stage {stage}, {'bfloat16' if bfloat16 else 'float32'}: the same bits: {equal}")
        assert equal
