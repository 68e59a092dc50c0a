"""The heads of Liger and cut-cross-entropy inside the wrapper, beside fusedacc's, against float64.

    pip install liger-kernel==0.8.5 cut-cross-entropy==25.1.1
    python examples/other_libraries/heads.py

On a CPU, Liger's Triton kernels run in Triton's interpreter, and cut-cross-entropy compiles PyTorch code.
"""

import os

import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
from cut_cross_entropy import linear_cross_entropy as cut_cross_entropy
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

import fusedacc
from fusedacc.nn.functional import linear_cross_entropy

VOCABULARY, WIDTH, TOKENS, K = 256, 32, 24, 4
implementation = "cce" if torch.cuda.is_available() else "torch_compile"
HEADS = {
    "fusedacc": linear_cross_entropy,
    "Liger": lambda x, weight, targets: LigerFusedLinearCrossEntropyLoss()(weight, x, targets),
    "cut-cross-entropy": lambda x, weight, targets: cut_cross_entropy(
        x, weight, targets, impl=implementation
    ),
}


def sums(head):
    """Return the gradients of a window of K micro-batches; without a head those of PyTorch in float64."""
    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)).to(
        device
    )
    if head is None:
        model.double()
    else:
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = fusedacc.AccumulatingOptimizer(inner, K, model=model)
    for seed in range(K):
        tokens = torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(seed))
        inputs, targets = tokens.to(device)
        hidden = model[0](inputs)
        if head is None:
            (nn.functional.cross_entropy(model[1](hidden), targets) / K).backward()
        else:
            head(hidden, model[1].weight, targets).backward()
            optimizer.step()
            if not optimizer.has_updated:
                optimizer.zero_grad()
    return [param.grad.double() for param in model.parameters()]


right = sums(None)
for name, head in HEADS.items():
    pairs = zip(sums(head), right, strict=True)
    error = max(((mine - exact).abs().max() / exact.abs().max()).item() for mine, exact in pairs)
    print(f"{name}: largest error of a gradient {error:.0e}")
    assert error < 1e-5
