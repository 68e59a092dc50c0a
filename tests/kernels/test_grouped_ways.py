"""How grouped products are added, the thresholds for that, and how a trial sets them."""

import pytest
import torch
from answers import answer
from cases import PAIR_IDS, native
from gemm_cases import GEMM_PAIRS
from grouped_cases import groups, operator

from fusedacc.kernels import grouped, library
from fusedacc.kernels.grouped import NEVER, grouped_accumulate_

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CPU = torch.device("cpu")


def test_selection_names_the_backend_and_the_reason(monkeypatch):
    assert grouped.select(CPU, F32, F32, "eager").reason == "chosen by backend='eager'"
    chosen = grouped.select(CPU, F32, F32)
    assert chosen.reason.startswith("first of cpu, eager that can run here")
    if library.load_error() is None:
        assert chosen.name == "cpu"
        assert chosen.how == "BLAS for each expert, loops of our own for up to 8 tokens"
        assert "FUSEDACC_TUNE=0 disables trials" in chosen.reason
    monkeypatch.setenv("FUSEDACC_BACKEND", "eager")
    assert grouped.select(CPU, F32, F32).reason == "chosen by FUSEDACC_BACKEND='eager'"
    assert grouped.describe(CPU, F32, F32, "auto", {}) == (
        "eager",
        "torch's product for each expert; chosen by FUSEDACC_BACKEND='eager'",
    )


@native
@pytest.mark.parametrize("has", [True, False])
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
def test_without_trials_the_cpu_decides_whether_products_are_rounded(pair, has, monkeypatch):
    monkeypatch.setattr(grouped, "multiplies_bfloat16", lambda: has)
    found = grouped.thresholds(pair[1], pair[0])
    assert found.rank_k_tokens == 8
    assert found.rounded_tokens == (16 if has and pair[0] == BF16 else NEVER)


def answers_for(pair, few, rounded):
    """Return the answers that set these thresholds."""
    name, found = f"grouped products of {str(pair[0])[6:]} into {str(pair[1])[6:]}", []
    for tokens in grouped.RANK_K_CLASSES:
        found += [f"{name}, {tokens} tokens each", "rank_k" if tokens <= few else "blas"]
    for tokens in grouped.ROUNDED_CLASSES:
        way = "rounded" if tokens >= rounded else "exact"
        found += [f"{name}, {tokens} tokens each, rounded or not", way]
    return found


@native
@pytest.mark.parametrize("pair", [(F32, F32), (BF16, F32), (BF16, BF16), (F16, F32)], ids=str)
@pytest.mark.parametrize("few", [0, 4, 16, 32])
@pytest.mark.parametrize("rounded", [16, 256, NEVER])
def test_answers_become_thresholds(pair, few, rounded, monkeypatch):
    monkeypatch.setattr(grouped, "multiplies_bfloat16", lambda: True)
    if pair[0] != BF16:
        rounded = NEVER
    kept = {}
    with answer(*answers_for(pair, few, rounded)):
        assert grouped.describe(CPU, pair[1], pair[0], "auto", {})[1].startswith("a trial will decide how")
        chosen = grouped.select(CPU, pair[1], pair[0], kept=kept)
        assert chosen.run.keywords == {"rank_k_tokens": few, "rounded_tokens": rounded}
        name, words = grouped.describe(CPU, pair[1], pair[0], "auto", kept)
    assert (name, words.partition("; ")[0]) == (chosen.name, chosen.how)
    assert (f"up to {few} tokens" in chosen.how) == (few > 0)
    assert (f"bfloat16 product from {rounded} on" in chosen.how) == (rounded != NEVER)
    with answer(*answers_for(pair, 8, NEVER)):  # answers kept from another machine stay
        again = grouped.select(CPU, pair[1], pair[0], kept=kept)
    assert again.run.keywords == chosen.run.keywords


@native
def test_every_answer_is_followed(generator, monkeypatch):
    """A rounded product has other bits. The operator handles experts with few tokens."""
    monkeypatch.setattr(grouped, "multiplies_bfloat16", lambda: True)
    for few, rounded in ((0, NEVER), (16, NEVER), (4, 16)):
        accumulator, *others = groups((BF16, F32), (40, 50), (3, 40, 12), generator)
        expected = accumulator.clone()
        operator(expected, *others, 0.5, 0.25, thresholds=(few, rounded))
        with answer(*answers_for((BF16, F32), few, rounded)):
            grouped_accumulate_(accumulator, *others, 0.5, 0.25)
        assert torch.equal(accumulator, expected)
