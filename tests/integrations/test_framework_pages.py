"""What the pages of docs/integrations tell the users of each framework to write."""

import re

import case_fastai
import case_keras
import case_lightning
import case_transformers
import pages
import torch
from accelerate.state import AcceleratorState, GradientState
from fastai.data.core import DataLoaders
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def test_accelerate():
    x, y = torch.randn(40, 4), torch.zeros(40, 2)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    given = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        "loader": DataLoader(TensorDataset(x, y), batch_size=4),
        "criterion": nn.MSELoss(),
    }
    try:
        found = pages.run("accelerate", **given)
    finally:
        GradientState._reset_state()
        AcceleratorState._reset_state(reset_partial_state=True)
    assert found["optimizer"].num_updates == found["scheduler"].scheduler.last_epoch == 2


def test_transformers(tmp_path):
    given = {
        "model": case_transformers.llama(),
        "collator": case_transformers.collate,
        "folder": str(tmp_path),
    }
    found = pages.run("transformers", torch=torch, data=case_transformers.lines(), **given)
    # 43 lines, 8 to a micro-batch and 8 micro-batches to a window: one window in each epoch.
    assert found["trainer"].state.global_step == found["optimizer"].num_updates == 3


def test_lightning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the Trainer's logs
    found = pages.run("lightning", torch=torch)

    class Module(found["Module"], case_lightning.Module):
        pass

    found["trainer"].fit(
        Module(case_lightning.network()), case_lightning.loader(case_lightning.batches([6] * 10))
    )
    assert found["trainer"].global_step == 2 * 3


def test_fastai():
    batches = case_fastai.Batches(case_fastai.batches([32] * 5))
    dls = DataLoaders(batches, case_fastai.Batches(), device="cpu")
    found = pages.run(
        "fastai", torch=torch, dls=dls, model=case_fastai.network(), criterion=case_fastai.loss_of
    )
    assert found["learn"].opt.opt.num_updates == 2 * 3


def test_keras():
    x, y = case_keras.samples()
    found = pages.run("keras", model=case_keras.regression(), x=x, y=y)
    assert int(found["optimizer"].iterations) == 1  # 150 samples are one part-filled window of three


def test_optimizers():
    found = pages.run("optimizers", model=nn.Linear(4, 2))
    assert found["optimizer"].param_groups[0]["train_mode"]


def test_every_page_is_run_and_linked():
    overview = (pages.PAGES.parent / "integrations.md").read_text()
    found = {page.stem for page in pages.PAGES.glob("*.md")}
    assert set(re.findall(r"\(integrations/(\w+)\.md\)", overview)) == found
    run = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    # These need torch alone: tests/packaging/test_docs.py and tests/distributed/test_torchtitan.py run them.
    assert found - run == {"pytorch", "checkpoints", "torchtitan"}
