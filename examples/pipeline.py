"""Handwritten digits with a pipeline of two stages on two ranks, with windows of 2 batches.

Each batch of 32 goes through the pipeline in 4 micro-batches. An update takes the mean over 2 batches.

torchrun --nproc-per-node 2 examples/pipeline.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, TensorDataset

import fusedacc

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)  # both ranks draw the same batches
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
# The stages exchange tensors of a fixed shape, so every batch must have the same size.
train = DataLoader(TensorDataset(images[:1500], labels[:1500]), 32, shuffle=True, drop_last=True)
unseen = DataLoader(TensorDataset(images[1500:], labels[1500:]), 32, drop_last=True)

layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()), torch.nn.Linear(64, 10)
stage = PipelineStage(layers[rank], rank, 2, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=torch.nn.functional.cross_entropy)
optimizer = fusedacc.AccumulatingOptimizer(
    torch.optim.AdamW(stage.submod.parameters(), lr=1e-2),
    gradient_accumulation_steps=2,
    model=stage.submod,
    max_grad_norm=1.0,  # the norm over both stages
)
optimizer.attach(schedule)  # on every rank
for _epoch in range(10):
    for x, y in train:
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y)
        optimizer.step()  # every second call updates
        optimizer.zero_grad()
    optimizer.flush()  # on every rank; has nothing to do here, because 46 batches are 23 full windows
right = 0
for x, y in unseen:
    scores = schedule.eval(x) if rank == 0 else schedule.eval(target=y)  # None on other ranks
    right += 0 if scores is None else (scores.argmax(1) == y).sum().item()
if rank == 1:
    count = 32 * len(unseen)
    print(f"{optimizer.num_updates} updates, accuracy on {count} unseen digits: {right / count:.1%}")
dist.barrier()  # keep the process group alive until every rank is done
dist.destroy_process_group()
