"""Pickles and checkpoints made by commit a2da67c load, and training continues from them as it did there.

This file made `old_files.tar.xz` with torch 2.13.0 and that commit's package, of which nothing was built:

    PYTHONPATH=<a checkout of a2da67c> FUSEDACC_TUNE=0 python tests/optimizer/test_old_files.py

Each case trains a model of `network()` for `Case.before` micro-batches of `inputs()`, without random numbers.
It is saved as a checkpoint of model and wrapper and as a pickle of both. That commit then loaded its own
files, ended the window, trained two more windows, and saved the parameters, the float32 masters and the
counters in `expected`.
"""

import functools
import io
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusedacc

ARCHIVE = Path(__file__).with_name("old_files.tar.xz")
K = 4


@dataclass(frozen=True)
class Case:
    """A loop that ends after `before` micro-batches.

    Args:
        ended: whether `step()` has ended the last of them.
        replace: whether the wrapper has the model too.
    """

    before: int
    ended: bool = True
    dtype: torch.dtype = torch.float32
    replace: bool = False
    steps: int | None = K
    settings: dict[str, Any] = field(default_factory=dict)


WEIGHTED = {"reduction": "weighted", "max_grad_norm": 0.25}
CASES = {
    # The first gradients became the accumulators unscaled. They are still to be multiplied by 2.
    "deferred": Case(5, settings=WEIGHTED),
    "masters": Case(6, dtype=torch.bfloat16, settings=WEIGHTED | {"master_weights": True}),
    # After the window's last backward and before its step(), p.grad holds the final gradients.
    "published": Case(8, ended=False, replace=True),
    # p.grad is the accumulator. The checkpoint holds it, but pickles do not hold p.grad, as in torch.
    "manual": Case(6, steps=None, settings={"max_grad_norm": 0.25}),
}


def network(case: Case) -> nn.Module:
    """Return an Embedding of six rows and a Linear, with small multiples of 1/32."""
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 2, bias=False))
    with torch.no_grad():
        for prime, parameter in zip((5, 7), model.parameters(), strict=True):
            values = torch.arange(parameter.numel()).mul(prime).remainder(13).sub(6).div(32)
            parameter.copy_(values.view_as(parameter))
    return model.to(case.dtype)


def inputs(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows that a micro-batch looks up, and its weights of the model's output."""
    rows = torch.tensor([index, 2 * index + 1, index + 3]).remainder(6)
    weights = torch.arange(6).add(index).mul(7).remainder(5).sub(2)
    return rows, weights.view(3, 2).float()


def made(case: Case, model: nn.Module) -> fusedacc.AccumulatingOptimizer:
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = case.settings | ({"model": model} if case.replace else {})
    return fusedacc.AccumulatingOptimizer(inner, case.steps, **settings)


def train(
    case: Case, model: nn.Module, optimizer: fusedacc.AccumulatingOptimizer, begin: int, end: int
) -> None:
    """Run micro-batches. The last one has no `step()` if `case.ended` is false."""
    for index in range(begin, end):
        weighted = "reduction" in case.settings
        with optimizer.accumulate(weight=index % 3 + 1 if weighted else None):
            rows, weights = inputs(index)
            output = model(rows).float()
            # In bfloat16 gradients do not depend on the weights, because machines round them differently.
            low = case.dtype is torch.bfloat16
            loss = (output * weights).sum() if low else (output + weights).square().mean()
            (loss if case.steps else loss / K).backward()
        if index + 1 < end or case.ended or index >= case.before:
            step(case, optimizer, index)


def step(case: Case, optimizer: fusedacc.AccumulatingOptimizer, index: int) -> None:
    if case.steps or index % K == K - 1:
        optimizer.step(), optimizer.zero_grad()


def saved(case: Case) -> dict[str, bytes]:
    """Return a checkpoint and a pickle of a run of this case."""
    model = network(case)
    optimizer = made(case, model)
    train(case, model, optimizer, 0, case.before)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    contents = {}
    for kind, value in {"checkpoint": state, "pickle": (model, optimizer)}.items():
        file = io.BytesIO()
        torch.save(value, file)
        contents[kind] = file.getvalue()
    return contents


def loaded(case: Case, kind: str, content: bytes) -> tuple[nn.Module, fusedacc.AccumulatingOptimizer]:
    if kind == "pickle":
        return torch.load(io.BytesIO(content), weights_only=False)
    state = torch.load(io.BytesIO(content), weights_only=True)
    model = network(case)
    optimizer = made(case, model)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return model, optimizer


def continued(case: Case, kind: str, content: bytes) -> dict[str, Any]:
    """Return what loading finds, and the result of the rest of the window and two more windows."""
    model, optimizer = loaded(case, kind, content)
    shown = [parameter.grad is not None for parameter in model.parameters()]
    found = {"found": (optimizer.num_updates, optimizer.micro_step, shown)}
    if not case.ended:
        step(case, optimizer, case.before - 1)
    train(case, model, optimizer, case.before, 4 * K)
    state = optimizer.state_dict()["state"]
    masters = [state[index]["fusedacc_master"] for index in state if "fusedacc_master" in state[index]]
    return found | {
        "updates": optimizer.num_updates,
        "parameters": torch.cat([parameter.detach().flatten() for parameter in model.parameters()]),
        "masters": torch.cat([master.flatten() for master in masters]) if masters else None,
    }


@functools.cache
def content_of(name: str) -> bytes:
    with tarfile.open(ARCHIVE) as archive:
        return archive.extractfile(name).read()


@pytest.mark.parametrize("kind", ["checkpoint", "pickle"])
@pytest.mark.parametrize("name", CASES)
def test_training_continues_from_old_files_as_it_did(name: str, kind: str) -> None:
    """On the CPU that made the files, to the same bits.

    Elsewhere torch's loops and ours may round differently. The tolerance is for four updates by AdamW, of
    about ten operations each, on parameters below 1/4.
    """
    case = CASES[name]
    expected = torch.load(io.BytesIO(content_of("expected")), weights_only=True)[f"{name}-{kind}"]
    result = continued(case, kind, content_of(f"{name}-{kind}"))
    assert (result["found"], result["updates"]) == (expected["found"], expected["updates"])
    if case.dtype is torch.bfloat16:
        # Near a tie, the last bit of a master decides how it is rounded.
        assert result["parameters"].equal(result["masters"].bfloat16())
    compared = "parameters" if expected["masters"] is None else "masters"
    error = (result[compared] - expected[compared]).abs().max().item()
    assert error <= 4 * 10 * torch.finfo(torch.float32).eps / 4


@pytest.mark.parametrize("name", CASES)
def test_new_checkpoints_have_the_keys_of_old_ones(name: str) -> None:
    old, new = (
        torch.load(io.BytesIO(content), weights_only=True)["optimizer"]
        for content in (content_of(f"{name}-checkpoint"), saved(CASES[name])["checkpoint"])
    )
    assert new.keys() == old.keys()
    assert new["fusedacc"].keys() >= old["fusedacc"].keys()
    assert new["fusedacc"]["window"].keys() == old["fusedacc"]["window"].keys()
    for part in ("state", "param_groups"):
        entries = [list(each[part].values()) if part == "state" else each[part] for each in (new, old)]
        ours = [[{key for key in entry if "fusedacc" in key} for entry in found] for found in entries]
        assert ours[0] == ours[1] != []


def write() -> None:
    contents, expected = {}, {}
    for name, case in CASES.items():
        for kind, content in saved(case).items():
            contents[f"{name}-{kind}"] = content
            expected[f"{name}-{kind}"] = continued(case, kind, content)
    file = io.BytesIO()
    torch.save(expected, file)
    with tarfile.open(ARCHIVE, "w:xz") as archive:
        for name, content in {**contents, "expected": file.getvalue()}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


if __name__ == "__main__":
    write()
