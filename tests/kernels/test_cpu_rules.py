"""The table of methods on a CPU: what decides, and that each of its methods adds the product."""

import itertools

import pytest
import torch
from cases import PAIR_IDS, native
from gemm_cases import GEMM_PAIRS, assert_is_product, matrices

from fusedacc.kernels import cpu_rules, library, matmul
from fusedacc.kernels.constants import TOKEN_CLASSES, GemmMethod
from fusedacc.kernels.cpu_rules import DEFAULT, PRODUCT_RULES, InstructionSet

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CPU = torch.device("cpu")
#: The fewest and the most tokens of each class, as far as it ends.
TOKENS = (1, *itertools.chain.from_iterable((most, most + 1) for most in TOKEN_CLASSES))


@pytest.fixture
def machine(monkeypatch):
    """Return a function that sets what the processor and torch have."""

    def become(instructions: InstructionSet, mkl: bool = True) -> None:
        monkeypatch.setattr(cpu_rules, "_of_processor", lambda: instructions)
        monkeypatch.setattr(cpu_rules, "_has_mkl_bfloat16", lambda: mkl)

    return become


def methods(accumulator, operand):
    return [cpu_rules.product_rule(accumulator, operand).method(tokens) for tokens in TOKENS]


def test_tokens_decide_by_class(machine):
    machine(InstructionSet.AVX512_BF16)
    whole, rank_k = GemmMethod.WHOLE, GemmMethod.RANK_K
    assert methods(F32, F32) == [whole, whole, rank_k, rank_k, rank_k, rank_k, whole]
    assert methods(F32, F16) == [whole] * len(TOKENS)


def test_without_mkl_blas_takes_its_place(machine):
    machine(InstructionSet.AMX)
    assert set(methods(F32, BF16)) == {GemmMethod.RANK_K, GemmMethod.MKL}
    machine(InstructionSet.AMX, mkl=False)
    assert set(methods(F32, BF16)) == {GemmMethod.RANK_K, GemmMethod.WHOLE}
    rule = cpu_rules.product_rule(F32, BF16)
    assert (rule.few_tokens, rule.experts) == (8, GemmMethod.WHOLE)


@pytest.mark.parametrize(
    ("limit", "wanted"),
    [
        ("", InstructionSet.AMX),
        ("ALL", InstructionSet.AMX),
        ("AVX512_CORE_AMX", InstructionSet.AMX),
        ("avx512_core_bf16", InstructionSet.AVX512_BF16),
        ("AVX512_CORE", InstructionSet.AVX512),
        ("AVX2", InstructionSet.AVX2),
        ("SSE41", InstructionSet.BASELINE),
    ],
)
def test_limits_of_onednn_are_limits_of_the_table(machine, monkeypatch, limit, wanted):
    machine(InstructionSet.AMX)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert cpu_rules.instruction_set() is wanted
    assert cpu_rules.multiplies_bfloat16() == (wanted >= InstructionSet.AVX512_BF16)
    machine(InstructionSet.AVX2)
    assert cpu_rules.instruction_set() is min(wanted, InstructionSet.AVX2)


def test_without_onednn_nothing_multiplies_bfloat16(machine):
    machine(InstructionSet.AMX)
    with torch.backends.mkldnn.flags(enabled=False):
        assert cpu_rules.instruction_set() is InstructionSet.AVX512
    assert cpu_rules.instruction_set() is InstructionSet.AMX


def test_deterministic_algorithms_change_nothing(machine):
    machine(InstructionSet.AMX)
    before = methods(F32, BF16)
    torch.use_deterministic_algorithms(True)
    try:
        assert methods(F32, BF16) == before
    finally:
        torch.use_deterministic_algorithms(False)


def test_slices_of_a_head(machine):
    for instructions in InstructionSet:
        machine(instructions)
        by_loops = instructions < InstructionSet.AMX
        for operand in (BF16, F16):
            assert cpu_rules.loops_multiply_slices(F32, operand) == by_loops
        assert not cpu_rules.loops_multiply_slices(F32, F32)
        assert not cpu_rules.loops_multiply_slices(BF16, BF16)
        assert cpu_rules.onednn_multiplies_logits() == (instructions == InstructionSet.AVX512_BF16)


@native
def test_this_processor(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    capability = library.built_with()["cpu_capability"]
    found = cpu_rules._of_processor()
    assert found.name.lower() == capability or (capability, found) == ("avx512_bf16", InstructionSet.AMX)


def test_the_table_names_every_method_and_differs_from_the_default():
    rules = PRODUCT_RULES.values()
    assert set(GemmMethod) == {method for rule in rules for method in (*rule.methods, rule.experts)}
    assert DEFAULT not in rules


@native
@pytest.mark.parametrize("instructions", InstructionSet)
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
def test_every_rule_adds_the_product(pair, instructions, machine, generator):
    machine(instructions, cpu_rules._has_mkl_bfloat16())
    for tokens in TOKENS:
        tensors = matrices(pair, (60, 40, tokens), generator)
        before = tensors[0].clone()
        matmul.gemm_accumulate_(*tensors, 0.5, 0.25)
        assert_is_product(tensors[0], before, *tensors[1:], 0.5, 0.25)


@native
def test_the_rule_is_described(machine):
    machine(InstructionSet.AVX512_BF16)
    name, words = matmul.describe(CPU, F32, F32, "auto")
    loops = "loops of our own into the sum"
    assert name == "cpu"
    assert words.startswith(
        f"BLAS into the sum for up to 16 tokens, {loops} for up to 100 tokens, BLAS into the sum for more "
        "tokens; first of cpu, eager that can run here"
    )
    assert matmul.describe(CPU, F32, BF16, "auto")[1].startswith(f"{loops}; first of")
    machine(InstructionSet.AMX)
    by_tokens = matmul.describe(CPU, F32, BF16, "auto")[1]
    assert by_tokens.startswith(f"{loops} for up to 16 tokens, MKL's bfloat16 product into the sum for more")
    assert matmul.describe(CPU, F32, BF16, "auto", in_slices=True)[1] == by_tokens
    machine(InstructionSet.AVX2)
    assert matmul.describe(CPU, F32, BF16, "auto", in_slices=True)[1].startswith(f"{loops}; ")
