"""A learning rate schedule that counts updates. Training stops within a window and resumes bitwise equal."""

import io

import torch
from sklearn.datasets import load_digits

import fusedacc
from fusedacc.integrations.scheduler import UpdateScheduler

images, labels = map(torch.tensor, load_digits(return_X_y=True))
batches = [*zip(images[:1500].split(20), labels[:1500].split(20), strict=True)] * 16  # 1200


def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).double()
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.AdamW(model.parameters()), 4)
    return model, optimizer, UpdateScheduler(torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, 301))


def train(model, optimizer, scheduler, start, stop):
    for x, y in batches[start:stop]:
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()  # every fourth call updates
        scheduler.step()  # steps only after an update
        optimizer.zero_grad()


whole, first, second, file = build(), build(), build(), io.BytesIO()
train(*whole, 0, 1200)
train(*first, 0, 602)  # 150 windows and two micro-batches of the next
torch.save([part.state_dict() for part in first], file)
file.seek(0)
for part, state in zip(second, torch.load(file), strict=True):
    part.load_state_dict(state)
train(*second, 602, 1200)
same = all(map(torch.equal, whole[0].parameters(), second[0].parameters()))
accuracy = (second[0](images[1500:]).argmax(1) == labels[1500:]).float().mean()
print(f"{second[2].last_epoch} steps of the schedule, accuracy {accuracy:.1%}, same bits: {same}")
