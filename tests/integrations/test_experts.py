"""Transformers' mixtures of experts with `model=`: gradients of stacked weights go straight to the sums."""

import contextlib
import copy
import re
from unittest import mock

import pytest
import sweeps
import torch
import transformers
from example_scripts import printed_by

import fusedacc
from fusedacc.nn.stacked import StackedSum
from fusedacc.traffic import TrafficMeter

K = 4
COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "intermediate_size": 48,
}
MODELS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"moe_intermediate_size": 24, "num_experts": 8, "head_dim": 8},
    "DeepseekV3": {
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    "GptOss": {"num_local_experts": 4, "head_dim": 8},
}


def made(name: str, implementation: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**COMMON | MODELS[name])
    config._experts_implementation = implementation
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    assert model.config._experts_implementation == implementation
    return model


def loss_of(model: torch.nn.Module, index: int) -> torch.Tensor:
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(index))
    return model(input_ids=ids, labels=ids).loss


def wrapped(model: torch.nn.Module, **options) -> fusedacc.AccumulatingOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return fusedacc.AccumulatingOptimizer(inner, K, model=model, **options)


def assert_trains_as(twin: torch.nn.Module, model: torch.nn.Module, optimizer, indices=range(K)) -> None:
    """The gradients of a window, against those of a model that divides its losses."""
    for index in indices:
        loss_of(model, index).backward()
        if index < K - 1:
            optimizer.step()
        (loss_of(twin, index) / K).backward()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        if indices.stop == K:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-7, msg=name)


def stacked(model: torch.nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.dim() == 3]


def paths(optimizer: fusedacc.AccumulatingOptimizer) -> dict[str, str]:
    rows = [line.split() for line in optimizer.explain().splitlines()]
    return {row[0]: row[2] for row in rows if len(row) > 4 and row[0].startswith("model.")}


PRECISIONS = {
    "float32": (torch.float32, contextlib.nullcontext, 1e-5),
    "bfloat16": (torch.bfloat16, contextlib.nullcontext, 5e-3),
    "autocast": (torch.float32, lambda: torch.autocast("cpu", torch.bfloat16), 5e-3),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("name", MODELS)
def test_sums_are_those_of_the_models_own_gradients(name, implementation, precision):
    """In float64: where routing may flip no other model is an oracle."""
    dtype, context, most = PRECISIONS[precision]
    model = made(name, implementation, dtype)
    twin = copy.deepcopy(model)
    optimizer = wrapped(model)
    found = paths(optimizer)
    assert len(stacked(model)) == 4
    assert {found[each] for each in stacked(model)} == {"grouped"}
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in twin.parameters()]
    for index in range(K):
        with context():
            loss = loss_of(model, index)
        loss.backward()
        if index < K - 1:
            optimizer.step()
        twin.zero_grad()
        with context():
            loss = loss_of(twin, index) / K
        loss.backward()
        for total, p in zip(sums, twin.parameters(), strict=True):
            if p.grad is not None:
                total += p.grad
    for (each, p), total in zip(model.named_parameters(), sums, strict=True):
        if total.any():
            assert (p.grad.double() - total).norm() <= most * total.norm(), each


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("name", MODELS)
def test_no_gradient_of_a_stacked_weight_is_written(name, implementation):
    model = made(name, implementation)
    optimizer = wrapped(model)
    loss_of(model, 0).backward()
    optimizer.step()
    seen = []
    for p in dict(model.named_parameters()).values():
        if p.dim() == 3:
            node = p.expand_as(p).grad_fn.next_functions[0][0]
            node.register_prehook(lambda gradients: seen.extend(g for g in gradients if g is not None))
    with TrafficMeter(optimizer) as meter:
        loss_of(model, 1).backward()
    assert seen == []
    assert not {"aten::_grouped_mm", "fusedacc::grouped_accumulate_"} & set(meter.uncounted)
    assert ("fusedacc::grouped_accumulate_" in meter.as_dict()["by_op"]) == (implementation == "grouped_mm")


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_checkpointed_experts(implementation, reentrant):
    model = made("Qwen3Moe", implementation)
    twin = copy.deepcopy(model)
    optimizer = wrapped(model)
    for each in (model, twin):
        each.train()
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_trains_as(twin, model, optimizer)


def test_what_copies_weights_stays_stock_and_explain_says_so():
    model = made("Mixtral", "batched_mm")
    twin = copy.deepcopy(model)
    optimizer = wrapped(model)
    name = stacked(model)[0]
    assert paths(optimizer)[name] == "multi_tensor"
    assert "Transformers' batched_mm for experts copies or repacks weights" in optimizer.explain()
    assert_trains_as(twin, model, optimizer, range(2))
    assert paths(optimizer)[name] == "multi_tensor"
    # One that is changed to a known one is followed from then on.
    model.set_experts_implementation("grouped_mm")
    twin.set_experts_implementation("grouped_mm")
    assert_trains_as(twin, model, optimizer, range(2, K))
    assert paths(optimizer)[name] == "grouped"


def test_rows_of_other_ranks_experts():
    """Expert-parallel sentinels: tokens whose expert is none of this module's."""
    model = made("Qwen3Moe", "grouped_mm")
    twin = copy.deepcopy(model)
    optimizer = wrapped(model)
    for each in (model, twin):
        experts = each.model.layers[0].mlp.experts
        experts._is_expert_parallel = True
        for index in range(2):
            generator = torch.Generator().manual_seed(index)
            x = torch.randn(10, 32, generator=generator)
            owner = torch.randint(0, 10, (10, 2), generator=generator).clamp(max=8)  # 8: on another rank
            weights = torch.rand(10, 2, generator=generator)
            (experts(x, owner, weights).pow(2).sum() / (K if each is twin else 1)).backward()
            if each is model:
                optimizer.step()
    sums = dict(zip([n for n, _ in model.named_parameters()], optimizer._slots, strict=True))
    for name, p in twin.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(sums[name].accumulator, p.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_the_example():
    printed = printed_by("experts_text.py", {"updates=60": "updates=20"})
    updates, before, after = re.search(r"(\d+) updates, .* ([\d.]+) -> ([\d.]+) nats", printed).groups()
    assert int(updates) == (60 if sweeps.FULL else 20)
    assert float(after) < float(before) - 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "implementation"), [("Mixtral", "eager"), ("Mixtral", "grouped_mm"), ("GptOss", "grouped_mm")]
)
def test_compiled_models_add_up(name, implementation, dtype):
    model, found = made(name, implementation, dtype), []
    eager = copy.deepcopy(model)
    for net, call in ((model, torch.compile(model, backend="aot_eager")), (eager, eager)):
        optimizer = wrapped(net, reduction="sum")
        with mock.patch.object(
            StackedSum, "add_part", autospec=True, side_effect=StackedSum.add_part
        ) as loops:
            for index in range(2):
                loss_of(call, index).backward()
                optimizer.step()
        found.append([slot.accumulator for slot in optimizer._slots])
        experts = [slot for slot in optimizer._slots if slot.param.dim() == 3]
        # The loops of "eager" run between graphs, as written.
        in_graph = net is model and implementation == "grouped_mm"
        assert [slot.compiled for slot in experts] == [in_graph] * 4
        assert loops.called is (implementation == "eager")
        optimizer.close()
    most = 2e-2 if dtype is torch.bfloat16 else 1e-5
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() <= most * theirs.norm()
