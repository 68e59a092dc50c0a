"""Handwritten digits on several ranks, with parameters sharded by FSDP2 and windows of 2 micro-batches.

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fusedacc

dist.init_process_group("gloo")
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
known = TensorDataset(images[:1500], labels[:1500])
# Every rank has the same number of batches, as FSDP2 requires.
sampler = DistributedSampler(known, drop_last=True)
train = DataLoader(known, batch_size=32, sampler=sampler)

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
for layer in (model[0], model[2]):
    fully_shard(layer)
fully_shard(model)
optimizer = fusedacc.AccumulatingOptimizer(
    torch.optim.AdamW(model.parameters(), lr=1e-2),
    gradient_accumulation_steps=2,
    max_grad_norm=1.0,
    model=model,  # the backward adds Linear weight gradients in place while reduction is deferred
)
for epoch in range(10):
    sampler.set_epoch(epoch)
    for x, y in train:
        with optimizer.accumulate(model):  # reduce once per window; without it, every time
            torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()  # every second call updates
        optimizer.zero_grad()
    optimizer.flush()  # on every rank: the last window may not be full
accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
if dist.get_rank() == 0:
    print(f"{optimizer.num_updates} updates, accuracy on {len(labels) - 1500} unseen digits: {accuracy:.1%}")
dist.barrier()  # keep the process group alive until every rank is done
dist.destroy_process_group()
