"""The code on the pages of docs/integrations, and the examples of frameworks on handwritten digits."""

import re

import case_fastai
import case_keras
import case_lightning
import case_transformers
import pages
import pytest
import torch
from example_scripts import printed_by, updates_and_accuracy
from fastai.data.core import DataLoaders
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@pytest.mark.usefixtures("accelerator_state")
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
    found = pages.run("accelerate", **given)
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


@pytest.mark.parametrize(
    ("framework", "epochs"), [("accelerate", 20), ("fastai", 20), ("keras", 10), ("lightning", 20)]
)
def test_examples_learn_digits(framework, epochs):
    """The 47 micro-batches of an epoch make 24 updates. The last one is of a part-filled window."""
    updates, accuracy = updates_and_accuracy(printed_by(f"{framework}_digits.py"))
    assert updates == epochs * 24
    assert accuracy > 85
