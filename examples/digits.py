"""Handwritten digits in batches of 64 as 2 x 32. The loop has no accumulation code."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import fusedacc

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
train = DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=32, shuffle=True)

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = fusedacc.AccumulatingOptimizer(
    torch.optim.AdamW(model.parameters(), lr=3e-3), gradient_accumulation_steps=2
)
for _epoch in range(20):
    for x, y in train:
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()  # every second call updates
        optimizer.zero_grad()
    optimizer.flush()  # 1500 images are 47 micro-batches: the last window holds one
accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
print(f"{optimizer.num_updates} updates, accuracy on {len(labels) - 1500} unseen digits: {accuracy:.1%}")
