"""The documents: their links, and the code in them that needs only torch."""

import copy
import re
from pathlib import Path

import pages
import pytest
import torch
from loops import loss_of, network
from torch import nn

import fusedacc

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "tests/emulation/README.md"]
DOCUMENTS += ["benchmarks/README.md", "benchmarks/NOTES.md"]
DOCUMENTS += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))


def anchors(text: str) -> set[str]:
    """Return the names of a text's headings in links, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_have_targets(document):
    path = ROOT / document
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text()), link


def test_every_page_of_a_framework_is_run_and_linked():
    framework_pages = {page.stem for page in pages.PAGES.glob("*.md")}
    overview = (ROOT / "docs/integrations.md").read_text()
    assert set(re.findall(r"\(integrations/(\w+)\.md\)", overview)) == framework_pages
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert set(re.findall(r'pages\.run\("(\w+)"', tests)) == framework_pages


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text()) < 10_000


def data(micro_batches: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(3, 4, generator=generator), torch.zeros(3, 2)) for _ in range(micro_batches)]


def test_the_quick_start_runs():
    assert pages.run("../quickstart")["optimizer"].num_updates == 2


def test_the_pytorch_page_trains_as_plain_float64():
    """Run three epochs of two full windows and a last window of two micro-batches."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    start, exact = copy.deepcopy(model).double(), copy.deepcopy(model).double()
    given = {"model": model, "loader": data(10), "criterion": nn.MSELoss(), "epochs": 3, "num_updates": 9}
    found = pages.run("pytorch", torch=torch, **given)
    assert found["optimizer"].num_updates == found["scheduler"].last_epoch == 9
    assert found["optimizer"].param_groups[0]["lr"] == 0  # the end of the cosine schedule

    plain = torch.optim.AdamW(exact.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(plain, T_max=9)
    for _ in range(3):
        for window in (data(10)[:4], data(10)[4:8], data(10)[8:]):
            for x, y in window:
                (nn.functional.mse_loss(exact(x.double()), y.double()) / len(window)).backward()
            plain.step(), plain.zero_grad(), scheduler.step()
    for mine, right, before in zip(model.parameters(), exact.parameters(), start.parameters(), strict=True):
        # A gradient takes tens of operations, and AdamW moves a weight by at most its learning rate.
        assert (mine - right).abs().max() < 100 * torch.finfo(torch.float32).eps * before.abs().max()
        assert (right - before).abs().max() > 1e-3


def test_the_memory_page_plans_and_trains(monkeypatch, capsys):
    monkeypatch.setattr("fusedacc.planner.budget.scratch_bytes", lambda: 0)
    (batch, _), *_ = data(1)
    given = {"model": nn.Linear(4, 2), "batch": batch, "loss_fn": lambda model, batch: model(batch).sum()}
    found = pages.run("../memory", only="planner.plan(", torch=torch, **given)
    assert found["plan"].micro_batch_size == 64
    assert found["optimizer"].gradient_accumulation_steps == found["plan"].gradient_accumulation_steps == 1
    assert capsys.readouterr().out.startswith("micro_batch_size=64, ")


def test_the_checkpoints_page_restores_the_optimizer(tmp_path):
    model = network()
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.AdamW(model.parameters()), 4)
    for seed in range(6):
        loss_of(model, seed).backward()
        optimizer.step(), optimizer.zero_grad()
    before = copy.deepcopy(optimizer.state_dict())
    given = {"model": model, "optimizer": optimizer, "path": tmp_path / "file", "folder": tmp_path / "folder"}
    pages.run("checkpoints", torch=torch, **given)
    assert (optimizer.num_updates, optimizer.micro_step) == (1, 2)
    assert str(optimizer.state_dict()) == str(before)


def test_the_head_page_trains():
    """This is the part that needs only torch. `tests/integrations` runs all of it with Transformers."""
    found = pages.run("../head", only="linear_cross_entropy(", torch=torch)
    assert found["optimizer"].num_updates == 1
    assert "head" in found["optimizer"].explain()


def second_moments(beta2: float, updates: int, dtype: torch.dtype) -> list[float]:
    """Return AdamW's second moment after 40 batches with gradients of 1, and then 14 with gradients of 0.

    Args:
        updates: the number of updates in which each batch is used.
    """
    param = nn.Parameter(torch.ones(16, dtype=dtype))
    optimizer = torch.optim.AdamW([param], lr=0.0, betas=(0.9, beta2))
    found = []
    for batches, value in ((40, 1.0), (14, 0.0)):
        for _ in range(batches * updates):
            param.grad = torch.full_like(param, value)
            optimizer.step()
        found.append(optimizer.state[param]["exp_avg_sq"].mean().item())
    return found


def test_the_page_on_small_batches_keeps_the_half_life(capsys):
    found = pages.run("../do-you-need-accumulation")
    printed = "0.99840: 7,084,917 tokens, as 7,084,917"
    assert capsys.readouterr().out == f"{printed}\n"
    assert f"`{printed}`" in (ROOT / "docs/do-you-need-accumulation.md").read_text()
    assert found["optimizer"].num_updates == 3

    right = [1 - 0.95**40, (1 - 0.95**40) * 0.95**14]
    assert second_moments(0.95, 1, torch.float32) == pytest.approx(right, rel=1e-5)
    assert second_moments(found["beta2_small"], 32, torch.float32) == pytest.approx(right, rel=1e-4)
    assert second_moments(found["beta2_small"], 32, torch.bfloat16) == [0.5, 0.5]


def test_the_page_on_other_libraries_trains():
    """These are the parts that need only torch. test_reduced_outside.py has the part that needs ranks."""
    assert pages.run("../with-what-you-use", only="import torch")["optimizer"].num_updates == 1
