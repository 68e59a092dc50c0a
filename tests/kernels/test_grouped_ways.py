"""How grouped products are added, and what explains it."""

import pytest
import torch
from cases import native
from gemm_cases import GEMM_PAIRS
from grouped_cases import assert_are_products, groups

from fusedacc.kernels import cpu_rules, grouped, library
from fusedacc.kernels.cpu_rules import InstructionSet
from fusedacc.kernels.grouped import grouped_accumulate_

F32, BF16 = torch.float32, torch.bfloat16
CPU = torch.device("cpu")


def test_selection_names_the_backend_and_the_reason(monkeypatch):
    assert grouped.select(CPU, F32, F32, "eager").reason == "chosen by backend='eager'"
    monkeypatch.setattr(cpu_rules, "instruction_set", lambda: InstructionSet.AVX2)
    chosen = grouped.select(CPU, F32, F32)
    assert chosen.reason.startswith("first of cpu, eager that can run here")
    if library.load_error() is None:
        assert chosen.name == "cpu"
        assert chosen.how == "BLAS for each expert, loops of our own for up to 8 tokens"
    monkeypatch.setenv("FUSEDACC_BACKEND", "eager")
    assert grouped.select(CPU, F32, F32).reason == "chosen by FUSEDACC_BACKEND='eager'"
    assert grouped.describe(CPU, F32, F32, "auto") == (
        "eager",
        "torch's product for each expert; chosen by FUSEDACC_BACKEND='eager'",
    )


@native
@pytest.mark.parametrize("instructions", InstructionSet)
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=str)
def test_every_rule_adds_every_expert(pair, instructions, generator, monkeypatch):
    """Where torch has no MKL, or the processor lacks the instructions, another method adds the same sums."""
    monkeypatch.setattr(cpu_rules, "instruction_set", lambda: instructions)
    tensors = groups(pair, (40, 50), (3, 40, 12, 0), generator)
    accumulator, *others = tensors
    before = accumulator.clone()
    grouped_accumulate_(accumulator, *others, 0.5, 0.25)
    assert_are_products(accumulator, before, *others, 0.5, 0.25)


@native
@pytest.mark.parametrize(
    ("pair", "instructions", "words"),
    [
        ((BF16, F32), InstructionSet.AVX512_BF16, "loops of our own for each expert"),
        (
            (BF16, F32),
            InstructionSet.AMX,
            "MKL's bfloat16 product for each expert, loops of our own for",
        ),
        ((BF16, BF16), InstructionSet.AMX, "oneDNN's bfloat16 product for each expert, loops of our own for"),
    ],
)
def test_the_rule_is_described(pair, instructions, words, monkeypatch):
    monkeypatch.setattr(cpu_rules, "instruction_set", lambda: instructions)
    monkeypatch.setattr(cpu_rules, "_has_mkl_bfloat16", lambda: True)
    assert grouped.describe(CPU, pair[1], pair[0], "auto")[1].startswith(words)
