"""Handwritten digits with a Lightning Trainer, in batches of 64 as 2 x 32. `global_step` counts updates."""

import lightning.pytorch as lightning
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import fusedacc
from fusedacc.integrations.lightning import AccumulationCallback

lightning.seed_everything(0)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
train = DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=32, shuffle=True)


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        adamw = torch.optim.AdamW(self.parameters(), lr=3e-3)
        optimizer = fusedacc.AccumulatingOptimizer(adamw, gradient_accumulation_steps=2, max_grad_norm=1.0)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=20 * 24)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


model = Digits()
quiet = {"logger": False, "enable_checkpointing": False}
trainer = lightning.Trainer(max_epochs=20, accelerator="cpu", callbacks=[AccumulationCallback()], **quiet)
trainer.fit(model, train)
accuracy = (model.net(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
print(f"{trainer.global_step} updates, accuracy on {len(labels) - 1500} unseen digits: {accuracy:.1%}")
