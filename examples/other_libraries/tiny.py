"""A tiny Llama, a tokenizer of characters and a few texts, made without a download, for the scripts here."""

import json
import os
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

os.environ["HF_HUB_OFFLINE"] = "1"
SPECIAL = ["<pad>", "<s>", "</s>"]
CHARACTERS = [*map(chr, range(32, 127)), "\n"]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each printable character of ASCII."""
    vocabulary = {token: index for index, token in enumerate(SPECIAL + CHARACTERS)}
    characters = Tokenizer(models.BPE(vocabulary, [], unk_token="<pad>"))
    characters.decoder = decoders.Fuse()
    special = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=characters, padding_side="left", **special)


def llama() -> LlamaForCausalLM:
    """Return a model with two layers of width 32, always with the same weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(SPECIAL + CHARACTERS), **sizes, **special))


def save_llama(folder: Path) -> None:
    """Save the model and the tokenizer."""
    llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def save_instructions(file: Path, count: int) -> None:
    """Save instructions with answers of 2 to 70 characters, as a list in JSON."""
    rows = [(f"say {'ab' * (i % 7 + 1)}", "xy" * (i % 5 * i % 11 * 3 + 1)) for i in range(count)]
    file.write_text(
        json.dumps([{"instruction": said, "input": "", "output": answer} for said, answer in rows])
    )


class Record(TrainerCallback):
    """Keeps the gradients of the first update, and the parameters after each update."""

    def __init__(self) -> None:
        self.gradients: list[torch.Tensor] = []
        self.parameters: list[list[torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        if not self.gradients:
            self.gradients = [param.grad.clone() for param in model.parameters() if param.grad is not None]

    def on_step_end(self, args, state, control, model, **kwargs):
        self.parameters.append([param.detach().clone() for param in model.parameters()])


def compare(name: str, stock: Record, ours: Record, exact: bool) -> None:
    """Print the largest difference of a parameter after any update, and fail if it is too large.

    Args:
        exact: whether the parameters must have the same bits.
    """
    assert len(stock.parameters) == len(ours.parameters) > 0
    difference = max(
        (mine - theirs).abs().max().item()
        for one, other in zip(ours.parameters, stock.parameters, strict=True)
        for mine, theirs in zip(one, other, strict=True)
    )
    print(f"{name}: {len(ours.parameters)} updates, largest difference of a parameter {difference:g}")
    assert difference == 0 if exact else difference < 1e-3
