"""Real architectures whose memory is predicted: from Transformers' configurations, with random weights, and
from the models of `machines/zoo`. Sizes are such that training one takes 50 MB to 1 GB."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import recurrent, vision

#: What a model takes, and its targets: a loss's arguments.
Batch = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model and a micro-batch of it.

    `make()` builds the model in float32, from torch's random state; `draw(generator)` a batch, which
    `loss(model, batch)` takes. `shapes`: in words a reader can check.
    """

    name: str
    shapes: str
    make: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]


def models_own(model: nn.Module, batch: Batch) -> Tensor:
    """As Transformers' models have it."""
    return model(**batch).loss


def classified(model: nn.Module, batch: Batch) -> Tensor:
    """Of a model that takes one tensor and returns logits."""
    logits = model(batch["inputs"]).float()
    return functional.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())


def denoised(model: nn.Module, batch: Batch) -> Tensor:
    """Of a model that returns what it was given without noise."""
    return functional.mse_loss(model(batch["inputs"]).float(), batch["labels"])


def _text(words: int, rows: int, length: int) -> Callable[[torch.Generator], Batch]:
    def draw(generator: torch.Generator) -> Batch:
        tokens = torch.randint(words, (rows, length), generator=generator)
        return {"input_ids": tokens, "labels": tokens.clone()}

    return draw


def _images(rows: int, size: int) -> Callable[[torch.Generator], Batch]:
    def draw(generator: torch.Generator) -> Batch:
        images = torch.randn(rows, 3, size, size, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(1000, (rows,), generator=generator)}

    return draw


def _transformers(model: str, config: str, settings: Mapping[str, Any], **own: Any) -> nn.Module:
    import transformers  # is not where the other suites run

    made = getattr(transformers, config)(**settings)
    for name, value in own.items():
        setattr(made, name, value)
    return getattr(transformers, model)(made)


def _checkpointed(make: Callable[[], nn.Module], reentrant: bool) -> nn.Module:
    model = make()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model.train()


def _adapted(make: Callable[[], nn.Module]) -> nn.Module:
    import peft

    wanted = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(make(), wanted)


def _gpt2(width: int, blocks: int, words: int) -> Callable[[], nn.Module]:
    settings = {"vocab_size": words, "n_positions": 256, "n_embd": width, "n_layer": blocks, "n_head": 4}
    return functools.partial(_transformers, "GPT2LMHeadModel", "GPT2Config", settings)


def _llama(width: int, blocks: int, words: int) -> Callable[[], nn.Module]:
    settings = {
        "vocab_size": words,
        "hidden_size": width,
        "intermediate_size": 8 * width // 3,
        "num_hidden_layers": blocks,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    return functools.partial(_transformers, "LlamaForCausalLM", "LlamaConfig", settings)


def _experts(model: str, width: int, experts: int, words: int) -> Callable[[], nn.Module]:
    settings = {
        "vocab_size": words,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
    }
    if model == "Mixtral":
        settings |= {"num_local_experts": experts}
    else:
        settings |= {"num_experts": experts, "moe_intermediate_size": width, "head_dim": width // 4}
    return functools.partial(
        _transformers, f"{model}ForCausalLM", f"{model}Config", settings, _experts_implementation="grouped_mm"
    )


def _bytes(rows: int, length: int) -> Callable[[torch.Generator], Batch]:
    def draw(generator: torch.Generator) -> Batch:
        tokens = torch.randint(256, (rows, length + 1), generator=generator)
        return {"inputs": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone()}

    return draw


def _noisy(rows: int, size: int) -> Callable[[torch.Generator], Batch]:
    def draw(generator: torch.Generator) -> Batch:
        clean, noise = (torch.randn(rows, 3, size, size, generator=generator) for _ in range(2))
        return {"inputs": clean + noise, "labels": noise}

    return draw


def architectures(tiny: bool = False) -> list[Architecture]:
    """All; or tiny ones of the same kinds."""
    width, blocks, words, length, image, rows = (
        (64, 1, 256, 16, 32, 2) if tiny else (256, 4, 8192, 128, 96, 4)
    )
    text = _text(words, rows, length)
    gpt2, llama = _gpt2(width, blocks, words), _llama(width, blocks, words)
    decoder = f"{blocks} blocks of width {width}, {words:,} words"
    tokens = f"{rows} x {length} tokens"
    experts = 4 if tiny else 16
    resnet = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 64, 64]} if tiny else {}
    bert = {
        "vocab_size": words,
        "hidden_size": width,
        "num_hidden_layers": blocks,
        "num_attention_heads": 4,
        "intermediate_size": 4 * width,
    }
    vit = bert | {"image_size": image, "patch_size": 16, "num_labels": 1000}
    del vit["vocab_size"]
    t5 = {"vocab_size": words, "d_model": width, "d_ff": 4 * width, "num_layers": blocks, "num_heads": 4}
    t5 |= {"decoder_start_token_id": 0}
    images = _images(rows, image)
    seen = f"{rows} images of {image} x {image}"

    def own(model: str, config: str, settings: Mapping[str, Any]) -> Callable[[], nn.Module]:
        return functools.partial(_transformers, model, f"{config}Config", settings)

    resnet50 = own("ResNetForImageClassification", "ResNet", resnet | {"num_labels": 1000})
    of_transformers = {
        "ResNet-50": (f"bottlenecks, batch norm; {seen}", resnet50, images),
        "ViT": (
            f"{blocks} blocks of width {width}; {seen}",
            own("ViTForImageClassification", "ViT", vit),
            images,
        ),
        "BERT": (f"{decoder}, tied; {tokens}", own("BertForMaskedLM", "Bert", bert), text),
        "GPT-2": (f"{decoder}, tied; {tokens}", gpt2, text),
        "GPT-2, checkpointed": (
            f"{decoder}, tied; {tokens}; use_reentrant=False",
            functools.partial(_checkpointed, gpt2, False),
            text,
        ),
        "GPT-2, checkpointed, reentrant": (
            f"{decoder}, tied; {tokens}; use_reentrant=True",
            functools.partial(_checkpointed, gpt2, True),
            text,
        ),
        "Llama": (f"{decoder}; {tokens}", llama, text),
        "Llama, LoRA": (
            f"{decoder}; rank 8 at queries and values; {tokens}",
            functools.partial(_adapted, llama),
            text,
        ),
        "T5": (f"{decoder}, tied; {tokens}", own("T5ForConditionalGeneration", "T5", t5), text),
    }
    mixture = f"2 blocks of width {width}, {experts} experts, top 2, grouped_mm; {tokens}"
    for name, kind in (("Mixtral", "Mixtral"), ("Qwen3-MoE", "Qwen3Moe")):
        of_transformers[name] = mixture, _experts(kind, width, experts, words), text
    return [
        *(Architecture(name, *about, models_own) for name, about in of_transformers.items()),
        Architecture(
            "LSTM",
            f"2 layers of width {2 * width}, 256 bytes; {tokens}",
            functools.partial(recurrent.LSTM, 256, 2 * width, 2),
            _bytes(rows, length),
            classified,
        ),
        Architecture(
            "U-Net",
            f"3 levels from {width // 8} channels, group norm; {seen}",
            functools.partial(vision.UNet, width // 8),
            _noisy(rows, image),
            denoised,
        ),
    ]
