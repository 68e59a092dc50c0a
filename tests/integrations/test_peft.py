"""LoRA adapters of peft on tiny Llama and GPT-2 models: only they are optimized, and they stay peft's."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import peft.optimizers
import pytest
import torch
import transformers
from torch import Tensor

import fusedacc

STEPS = 4
#: Two full windows and one of two micro-batches: means over powers of two round nothing.
MICRO_BATCHES = 10
UPDATES = 3
#: Terms in the longest sum of an adapter's gradient: 3 sequences of 12 tokens, in each micro-batch.
TERMS = 3 * 12 * STEPS
EPS = torch.finfo(torch.float32).eps


def llama(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).to(dtype)


def gpt2(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=64, n_positions=16, **drops)
    return transformers.GPT2LMHeadModel(config).to(dtype)


def adapted(base: torch.nn.Module, cast: bool = True, **settings: Any) -> peft.PeftModel:
    """`base` with LoRA on all its linear layers; B is not zero, so that A learns from the first update on."""
    torch.manual_seed(1)
    conv = isinstance(base, transformers.GPT2LMHeadModel)
    config = peft.LoraConfig(
        r=4, target_modules="all-linear", init_lora_weights=False, fan_in_fan_out=conv, **settings
    )
    return peft.get_peft_model(base, config, autocast_adapter_dtype=cast).train()


def tokens() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 64, (3, 12), generator=generator) for _ in range(MICRO_BATCHES)]


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def values(parameters: dict[str, torch.nn.Parameter]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters.values()]


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trainable(model).values(), lr=0.1, momentum=0.9)


def stock(
    model: torch.nn.Module,
    make: Callable[[torch.nn.Module], torch.optim.Optimizer] = momentum,
    between: Callable[[int], None] = lambda index: None,
) -> list[Tensor]:
    """Losses, and the adapters after float32 sums kept by hand: for float32 adapters, as autograd does."""
    optimizer, losses, data = make(model), [], tokens()
    parameters = trainable(model)
    for start in range(0, MICRO_BATCHES, STEPS):
        window = data[start : start + STEPS]
        sums: dict[str, Tensor] = {}
        for index, batch in enumerate(window):
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            losses.append(loss.detach())
            between(start + index)
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    total = sums.setdefault(name, torch.zeros_like(parameter, dtype=torch.float32))
                    total.add_(parameter.grad.float(), alpha=1 / len(window))
                    parameter.grad = None
        for name, total in sums.items():
            parameters[name].grad = total.to(parameters[name].dtype)
        optimizer.step(), optimizer.zero_grad()
    return losses + values(parameters)


def wrapped(
    model: torch.nn.Module,
    make: Callable[[torch.nn.Module], torch.optim.Optimizer] = momentum,
    between: Callable[[int], None] = lambda index: None,
    inside: bool = False,
) -> tuple[list[Tensor], fusedacc.AccumulatingOptimizer]:
    """Losses and adapters of the counted loop, and the optimizer; `inside`: with `model=`."""
    optimizer = fusedacc.AccumulatingOptimizer(make(model), STEPS, model=model if inside else None)
    parameters, losses = trainable(model), []
    for index, batch in enumerate(tokens()):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        losses.append(loss.detach())
        between(index)
        optimizer.step(), optimizer.zero_grad()
    optimizer.flush()
    assert optimizer.num_updates == UPDATES
    return losses + values(parameters), optimizer


def same(found: list[Tensor], wanted: list[Tensor], exactly: bool) -> None:
    """Equal bit for bit, or within float32 rounding of each term of a value and of an update (below 1)."""
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        if exactly:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=TERMS * EPS, atol=UPDATES * TERMS * EPS)


BASES = [llama, gpt2]
VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora, biases": {"use_rslora": True, "bias": "lora_only", "lora_bias": True},
    "dora": {"use_dora": True},
    "trained head": {"modules_to_save": ["lm_head"]},
}


@pytest.fixture(params=[False, True], ids=["plain", "model="])
def inside(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("base", BASES)
def test_adapters_learn_as_in_stock(base: Any, variant: str, inside: bool) -> None:
    wanted = stock(adapted(base(), **VARIANTS[variant]))
    model = adapted(base(), **VARIANTS[variant])
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    before, start = values(frozen), values(trainable(model))
    found, optimizer = wrapped(model, inside=inside)
    same(found, wanted, exactly=not inside)
    assert not any(map(torch.equal, values(trainable(model)), start))
    assert all(map(torch.equal, values(frozen), before))
    assert all(parameter.grad is None for parameter in frozen.values())
    optimizer.close()


def test_bfloat16_adapters_have_float32_sums() -> None:
    wanted = stock(adapted(llama(torch.bfloat16), cast=False))
    model = adapted(llama(torch.bfloat16), cast=False)
    assert {parameter.dtype for parameter in trainable(model).values()} == {torch.bfloat16}
    same(wrapped(model)[0], wanted, exactly=True)


def two_adapters() -> peft.PeftModel:
    model = adapted(llama())
    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model.add_adapter("second", config)
    return model


def of_all_adapters(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for name, p in model.named_parameters() if "lora_" in name], lr=0.1)


def test_adapters_are_switched_between_windows(inside: bool) -> None:
    """The second adapter is frozen when the wrapper is made, then the first one is."""
    ends = []
    for kind in ("stock", "ours"):
        model = two_adapters()
        model.set_adapter("default")
        adapters = {name: p for name, p in model.named_parameters() if "lora_" in name}
        bare = of_all_adapters(model)
        optimizer: Any = bare
        if kind == "ours":
            optimizer = fusedacc.AccumulatingOptimizer(bare, STEPS, model=model if inside else None)
        data = tokens()[: 2 * STEPS]
        for index, batch in enumerate(data):
            if index == STEPS:
                model.set_adapter("second")
            loss = model(input_ids=batch, labels=batch).loss
            (loss if kind == "ours" else loss / STEPS).backward()
            if kind == "ours" or index % STEPS == STEPS - 1:
                optimizer.step(), optimizer.zero_grad()
        ends.append(values(adapters))
    same(ends[1], ends[0], exactly=not inside)


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens()[0]).logits


def test_adapters_are_saved_loaded_and_merged(inside: bool, tmp_path: Path) -> None:
    """In mid-window too, while the wrapper is alive and after it is closed."""
    model = adapted(llama())
    _, optimizer = wrapped(model, inside=inside)
    batch = tokens()[0]
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    assert optimizer.micro_step == 1
    wanted = logits(model)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path).train()
    assert torch.equal(logits(loaded), wanted)
    merged = copy.deepcopy(model).merge_and_unload()
    torch.testing.assert_close(logits(merged), wanted, rtol=1e-5, atol=1e-5)
    optimizer.close()
    bare = model.unload()
    assert torch.equal(logits(bare), logits(llama()))
    assert not any("lora" in name for name, _ in bare.named_parameters())


def test_resume_in_mid_window_beside_the_saved_adapters(inside: bool, tmp_path: Path) -> None:
    def continued(model: Any, optimizer: Any) -> Iterator[Tensor]:
        for batch in tokens()[6:]:
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step(), optimizer.zero_grad()
        yield from values(trainable(model))

    def made(model: Any) -> fusedacc.AccumulatingOptimizer:
        return fusedacc.AccumulatingOptimizer(momentum(model), STEPS, model=model if inside else None)

    model = adapted(llama())
    optimizer = made(model)
    for batch in tokens()[:6]:
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step(), optimizer.zero_grad()
    model.save_pretrained(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path, is_trainable=True).train()
    resumed = made(loaded)
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    assert all(map(torch.equal, continued(loaded, resumed), continued(model, optimizer)))
