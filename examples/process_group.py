"""Handwritten digits on two processes without DistributedDataParallel.

torchrun --nproc-per-node 2 examples/process_group.py

Each process trains on a different part of the digits. The wrapper first gives all ranks the same parameters.
"""

import torch
from sklearn.datasets import load_digits

import fusedacc

torch.distributed.init_process_group("gloo")
rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
torch.manual_seed(rank)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
mine = slice(rank, 1500, ranks)

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = fusedacc.AccumulatingOptimizer(
    torch.optim.AdamW(model.parameters(), lr=3e-3),
    gradient_accumulation_steps=2,
    data_parallel=torch.distributed.group.WORLD,
)
for _epoch in range(20):
    order = torch.randperm(len(labels[mine]))
    for x, y in zip(images[mine][order].split(16), labels[mine][order].split(16), strict=True):
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()  # every second call updates
        optimizer.zero_grad()
    optimizer.flush()  # on every rank, even if it had fewer micro-batches
accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
if rank == 0:
    print(f"{optimizer.num_updates} updates, accuracy on {len(labels) - 1500} unseen digits: {accuracy:.1%}")
torch.distributed.barrier()  # keep the process group alive until every rank is done
torch.distributed.destroy_process_group()
