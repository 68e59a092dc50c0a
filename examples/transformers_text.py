"""A small Llama learns Python's sources byte by byte with the Trainer, in batches of 64 lines as 4 x 16."""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fusedacc
from fusedacc.integrations.transformers import AccumulationCallback

torch.manual_seed(0)
lines = [line[:64] for line in Path(argparse.__file__).read_bytes().splitlines() if len(line) > 8]
rows = [torch.tensor(list(line)) for line in lines[:1200]]


def collate(batch):
    labels = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=-100)
    return {"input_ids": labels.clamp(min=0), "attention_mask": labels.ne(-100).long(), "labels": labels}


sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
optimizer = fusedacc.AccumulatingOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), model=model)
arguments = TrainingArguments(
    output_dir=tempfile.gettempdir(),
    per_device_train_batch_size=16,
    gradient_accumulation_steps=4,  # set it only here; the Trainer scales losses by a window's tokens
    num_train_epochs=3,
    save_strategy="no",
    logging_strategy="epoch",
    report_to="none",
)
callbacks = [AccumulationCallback()]
trainer = Trainer(model, arguments, collate, rows, optimizers=(optimizer, None), callbacks=callbacks)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"{optimizer.num_updates} updates, loss {losses[0]:.2f} -> {losses[-1]:.2f} nats per byte, by epoch")
