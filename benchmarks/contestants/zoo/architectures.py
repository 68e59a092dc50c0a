"""Real architectures whose memory is predicted, with random weights.

Most come from Transformers' configurations, some from this zoo. Training one takes 50 MB to 1 GB.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, nn

from . import Entry, lstm, unet

#: The keyword arguments of a model of Transformers, or the arguments and the targets of an entry of the zoo.
Batch = Any


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model: `make()` builds it in float32, `draw(generator)` draws a micro-batch, `loss(model, batch)`."""

    name: str
    shapes: str
    make: Callable[[], nn.Module]
    draw: Callable[[Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor] = lambda model, batch: model(**batch).loss


def _text(words: int, rows: int, length: int) -> Callable[[Generator], Batch]:
    def draw(generator: Generator) -> Batch:
        tokens = torch.randint(words, (rows, length), generator=generator)
        return {"input_ids": tokens, "labels": tokens.clone()}

    return draw


def _images(rows: int, size: int) -> Callable[[Generator], Batch]:
    def draw(generator: Generator) -> Batch:
        images = torch.randn(rows, 3, size, size, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(1000, (rows,), generator=generator)}

    return draw


def _of_zoo(name: str, entry: Entry) -> Architecture:
    def loss(model: nn.Module, batch: tuple) -> Tensor:
        return entry.loss(model(*batch[0]), batch[1])

    return Architecture(name, entry.shapes, entry.make, entry.batch, loss)


def _transformers(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return what makes a model. Settings with a leading "_" are set on its configuration afterwards."""

    def make() -> nn.Module:
        import transformers  # is not installed where the other suites run

        private = {name: settings[name] for name in settings if name.startswith("_")}
        made = getattr(transformers, f"{config}Config")(
            **{k: settings[k] for k in settings if k not in private}
        )
        for name, value in private.items():
            setattr(made, name, value)
        return getattr(transformers, model)(made)

    return make


def _checkpointed(make: Callable[[], nn.Module], reentrant: bool) -> nn.Module:
    model = make()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model.train()


def _adapted(make: Callable[[], nn.Module]) -> nn.Module:
    import peft

    wanted = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(make(), wanted)


def architectures(tiny: bool = False) -> list[Architecture]:
    """Return all architectures; with `tiny` small ones of the same kinds."""
    width, blocks, words, length, image, rows = (
        (64, 1, 256, 16, 32, 2) if tiny else (256, 4, 8192, 128, 96, 4)
    )
    experts = 4 if tiny else 16
    text = _text(words, rows, length)
    images = _images(rows, image)
    decoder = f"{blocks} blocks of width {width}, {words:,} words"
    tokens = f"{rows} x {length} tokens"
    seen = f"{rows} images of {image} x {image}"
    # The names that most configurations share.
    layers: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": blocks,
        "num_attention_heads": 4,
        "intermediate_size": 4 * width,
    }
    grouped = layers | {
        "vocab_size": words,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    gpt2 = _transformers(
        "GPT2LMHeadModel", "GPT2", vocab_size=words, n_positions=256, n_embd=width, n_layer=blocks, n_head=4
    )
    llama = _transformers("LlamaForCausalLM", "Llama", **grouped | {"intermediate_size": 8 * width // 3})
    t5 = _transformers(
        "T5ForConditionalGeneration",
        "T5",
        vocab_size=words,
        d_model=width,
        d_ff=4 * width,
        num_layers=blocks,
        num_heads=4,
        decoder_start_token_id=0,
    )
    stages = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 64, 64]} if tiny else {}
    resnet = _transformers("ResNetForImageClassification", "ResNet", **stages, num_labels=1000)
    vit = _transformers(
        "ViTForImageClassification", "ViT", **layers, image_size=image, patch_size=16, num_labels=1000
    )
    bert = _transformers("BertForMaskedLM", "Bert", **layers, vocab_size=words)
    mixture = f"2 blocks of width {width}, {experts} experts, top 2, grouped_mm; {tokens}"
    mixed = grouped | {
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_experts_per_tok": 2,
        "_experts_implementation": "grouped_mm",
    }
    mixtral = _transformers("MixtralForCausalLM", "Mixtral", **mixed, num_local_experts=experts)
    qwen = {"num_experts": experts, "moe_intermediate_size": width, "head_dim": width // 4}
    return [
        Architecture("ResNet-50", f"bottlenecks, batch norm; {seen}", resnet, images),
        Architecture("ViT", f"{blocks} blocks of width {width}; {seen}", vit, images),
        Architecture("BERT", f"{decoder}, tied; {tokens}", bert, text),
        Architecture("GPT-2", f"{decoder}, tied; {tokens}", gpt2, text),
        *(
            Architecture(
                f"GPT-2, checkpointed{', reentrant' * reentrant}",
                f"{decoder}, tied; {tokens}; use_reentrant={reentrant}",
                functools.partial(_checkpointed, gpt2, reentrant),
                text,
            )
            for reentrant in (False, True)
        ),
        Architecture("Llama", f"{decoder}; {tokens}", llama, text),
        Architecture(
            "Llama, LoRA",
            f"{decoder}; rank 8 at queries and values; {tokens}",
            functools.partial(_adapted, llama),
            text,
        ),
        Architecture("T5", f"{decoder}, tied; {tokens}", t5, text),
        Architecture("Mixtral", mixture, mixtral, text),
        Architecture(
            "Qwen3-MoE", mixture, _transformers("Qwen3MoeForCausalLM", "Qwen3Moe", **mixed, **qwen), text
        ),
        _of_zoo("LSTM", lstm(2 * width, length, rows)),
        _of_zoo("U-Net", unet(width // 8, image, rows)),
    ]
