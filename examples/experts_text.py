"""Train a small mixture of experts (Qwen3-MoE) on Python's sources, then fine-tune it on Python's manual.

A batch has 16 pieces of 64 bytes, as 8 micro-batches of 2. Few tokens reach each of a layer's 16 experts.
With `model=`, the backward adds the experts' weight gradients directly to the accumulated gradients.
"""

import argparse
import pydoc_data.topics

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import fusedacc

STEPS, PIECES, LENGTH = 8, 2, 64


def pieces(text):
    """Return a text as a tensor of bytes with shape [pieces, 64]."""
    known = torch.tensor(list(text.encode()))
    return known[: len(known) // LENGTH * LENGTH].view(-1, LENGTH)


def loss_of(model, batch):
    return model(input_ids=batch, labels=batch).loss


def train(model, text, updates, lr):
    """Train for a number of updates and return the optimizer."""
    inner = torch.optim.AdamW(model.parameters(), lr=lr)
    optimizer = fusedacc.AccumulatingOptimizer(inner, gradient_accumulation_steps=STEPS, model=model)
    order = torch.randint(len(text), (updates * STEPS, PIECES))
    for micro_batch in text[order]:
        loss_of(model, micro_batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return optimizer


torch.manual_seed(0)
with open(argparse.__file__) as file:
    sources = pieces(file.read())
manual = pieces("".join(pydoc_data.topics.topics.values()))
manual, held_out = manual[:-64], manual[-64:]
sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=256, head_dim=16, **sizes, **experts))
train(model, sources, updates=60, lr=3e-3)
with torch.no_grad():
    before = loss_of(model, held_out).item()
optimizer = train(model, manual, updates=60, lr=1e-3)
with torch.no_grad():
    after = loss_of(model, held_out).item()
print(f"{optimizer.num_updates} updates, loss on the manual {before:.2f} -> {after:.2f} nats per byte")
