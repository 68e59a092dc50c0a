"""Handwritten digits on two processes with DistributedDataParallel.

torchrun --nproc-per-node 2 examples/ddp.py

A batch of 64 is 2 processes x 2 micro-batches of 16. The accumulated gradients are reduced once per update.
"""

import torch
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fusedacc

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
data = TensorDataset(images[:1500], labels[:1500])
sampler = DistributedSampler(data)
train = DataLoader(data, batch_size=16, sampler=sampler)

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
parallel = DistributedDataParallel(model)
optimizer = fusedacc.AccumulatingOptimizer(
    torch.optim.AdamW(model.parameters(), lr=3e-3), gradient_accumulation_steps=2, data_parallel=parallel
)
for epoch in range(20):
    sampler.set_epoch(epoch)
    for x, y in train:
        torch.nn.functional.cross_entropy(parallel(x), y).backward()
        optimizer.step()  # every second call updates
        optimizer.zero_grad()
    optimizer.flush()  # on every rank: 750 images are 47 micro-batches, and the last window holds one
accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
if torch.distributed.get_rank() == 0:
    print(f"{optimizer.num_updates} updates, accuracy on {len(labels) - 1500} unseen digits: {accuracy:.1%}")
torch.distributed.barrier()  # keep the process group alive until every rank is done
torch.distributed.destroy_process_group()
