"""Handwritten digits with a fastai Learner, in batches of 32, with an update every 64 samples."""

import torch
from fastai.callback.schedule import Learner  # with fit_one_cycle
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from sklearn.datasets import load_digits

from fusedacc.integrations.fastai import AccumulationCallback, OptFunc

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
digits = list(zip(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels), strict=True))
train, valid = DataLoader(digits[:1500], bs=32, shuffle=True), DataLoader(digits[1500:], bs=297)

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
learn = Learner(
    DataLoaders(train, valid, device="cpu"),
    model,
    loss_func=torch.nn.functional.cross_entropy,
    opt_func=OptFunc(torch.optim.AdamW, max_grad_norm=1.0),
    cbs=AccumulationCallback(n_acc=64),
)
with learn.no_bar(), learn.no_logging():
    learn.fit_one_cycle(20, 3e-3)
x, y = valid.one_batch()
accuracy = (model(x).argmax(1) == y).float().mean().item()
print(f"{learn.opt.opt.num_updates} updates, accuracy on {len(y)} unseen digits: {accuracy:.1%}")
