"""The loops of docs/audit.md, which show how to fix a problem, have none."""

import re
from pathlib import Path

import pytest
import torch
from auditing_cases import audited
from plain_loops import data, mlp, text, text_model
from torch import nn

import fusedacc

PAGE = Path(fusedacc.__file__).parents[1] / "docs" / "audit.md"
SNIPPETS = [
    snippet
    for snippet in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    if "loader" in snippet
]


@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_a_fixed_loop_has_no_problem(index):
    snippet = SNIPPETS[index]
    has_tokens = "-100" in snippet
    model = text_model() if has_tokens else mlp()
    loader = list(text() if has_tokens else data(8 if "(i + 1)" in snippet else 10))
    names = {"model": model, "loader": loader, "k": 4, "criterion": nn.CrossEntropyLoss(), "nn": nn}
    names |= {"torch": torch, "fusedacc": fusedacc, "optimizer": torch.optim.AdamW(model.parameters())}
    report = audited(lambda: exec("import itertools\n" + snippet, names))
    assert report.status == 0, report.text
    assert report.as_json()["updates"] >= 2


def test_the_template_for_ci_runs():
    (template,) = re.findall(
        r"^```python\n(import fusedacc\n\n\ndef .*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())

    def train():
        for x, y in data(8):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    names = {"train": train}
    exec(template, names)
    names["test_gradient_accumulation"]()


def test_a_gan_that_clears_as_the_page_shows_has_no_problem():
    (snippet,) = re.findall(
        r"^```python\n(critic_optimizer\.zero.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    generator, critic = nn.Linear(8, 16), nn.Linear(16, 1)
    names = {"generator": generator, "real": torch.randn(4, 16), "noise": torch.randn(4, 8)}
    names["critic_optimizer"] = torch.optim.Adam(critic.parameters())
    names["generator_optimizer"] = torch.optim.Adam(generator.parameters())
    names["critic_loss"] = lambda real, fake: critic(fake).mean() - critic(real).mean()
    names["generator_loss"] = lambda fake: critic(fake).square().mean()
    report = audited(lambda: [exec(snippet, names) for _ in range(4)])
    assert (report.status, report.notes) == (0, []), report.text
