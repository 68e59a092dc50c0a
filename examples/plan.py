"""Predict the largest micro-batch that fits, and train with it.

Each update uses 64 pieces of Python's sources. The available memory decides how many fit in one forward and
backward; the rest is accumulated. `python examples/plan.py 100` makes 100 updates.
"""

import sys

import torch
from demo.model import Transformer, load_text, micro_batch

import fusedacc
from fusedacc import planner

WANTED, UPDATES = 64, int(sys.argv[1]) if sys.argv[1:] else 40


def loss_of(model, batch):
    inputs, targets = batch
    return torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def calculate_optimal_batch_size(model, data, available):
    """Return the largest micro-batch and its plan, whose `str()` says where the memory goes."""
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.AdamW(model.parameters()), 1, model=model)
    found = planner.plan(
        model, optimizer, data, global_batch_size=WANTED, memory_budget=available, loss_fn=loss_of
    )
    optimizer.close()  # only the plan needed it
    return found.micro_batch_size, found


torch.manual_seed(0)
text, cpu = load_text(), torch.device("cpu")
model, data = Transformer(width=128, layers=2), micro_batch(text, 0, cpu, size=WANTED)

available = "64MiB"  # None: the free memory
batch_size, found = calculate_optimal_batch_size(model, data, available)
print(found)  # found.dividing() is a plan with equal micro-batches

inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
optimizer = fusedacc.AccumulatingOptimizer(inner, **found.wrapper_arguments())
losses = []
for update in range(UPDATES):
    losses.append(0.0)
    for samples, part in found.split(micro_batch(text, update, cpu, size=WANTED)):
        with optimizer.accumulate(weight=samples if found.ragged else None):  # a mean over samples
            loss = loss_of(model, part)
            loss.backward()
            optimizer.step()  # the last call of a batch updates
        optimizer.zero_grad()
        losses[-1] += loss.item() * samples / WANTED
print(
    f"batch_size={batch_size}: {optimizer.num_updates} updates of {WANTED} samples, "
    f"loss {losses[0]:.2f} -> {losses[-1]:.2f} nats per byte"
)
