"""Handwritten digits with Accelerate, in batches of 64 as 2 x 32. Turn Accelerate's own accumulation off."""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import fusedacc
from fusedacc.integrations.accelerate import prepare

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
loader = DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=32, shuffle=True)

accelerator = Accelerator()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = fusedacc.AccumulatingOptimizer(
    torch.optim.AdamW(model.parameters(), lr=3e-3), gradient_accumulation_steps=2, max_grad_norm=1.0
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20 * 24)
model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler)
for _epoch in range(20):
    for x, y in loader:
        accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()  # every second call updates, and so does the epoch's last call
        scheduler.step()  # once per update
        optimizer.zero_grad()
x, y = images[1500:].to(accelerator.device), labels[1500:].to(accelerator.device)
accuracy = (model(x).argmax(1) == y).float().mean().item()
print(f"{optimizer.num_updates} updates, accuracy on {len(y)} unseen digits: {accuracy:.1%}")
