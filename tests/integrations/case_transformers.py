"""The Trainer's accumulation and ours, on small models and lines of Python code."""

import itertools
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from comparison import Row, compared, float32_tolerance, snapshot
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer
from transformers import TrainingArguments as Arguments

import fusedacc
from fusedacc.integrations.transformers import AccumulationCallback

STEPS, EPOCHS, LR, MOMENTUM = 4, 4, 0.2, 0.9
WARMUP = 5
SHARED = {
    "vocab_size": 128,
    "initializer_range": 0.2,
    "use_cache": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
UPDATES_PER_EPOCH = 6  # 43 lines, two to a micro-batch: 22 micro-batches, five windows of four and one of two


def lines() -> list[dict[str, list[int]]]:
    """Return lines of 2 to 64 bytes."""
    found = [line for line in Path(textwrap.__file__).read_bytes().splitlines() if len(line) > 1][:43]
    return [{"input_ids": [min(byte, 127) for byte in line[:64]]} for line in found]


def collate(examples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    rows = [torch.tensor(example["input_ids"]) for example in examples]
    pad = nn.utils.rnn.pad_sequence
    labels = pad(rows, batch_first=True, padding_value=-100)
    mask = labels.ne(-100).long()
    return {"input_ids": pad(rows, batch_first=True), "attention_mask": mask, "labels": labels}


class Stream(IterableDataset):
    """The same lines, without a length."""

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return iter(lines())


def gpt2(loss_type: str | None = "ForCausalLM") -> nn.Module:
    """The Trainer asks a model's `loss_type` whether its loss shifts labels. GPT-2's is None, and it does."""
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **SHARED, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    model.loss_type = loss_type
    return model


def unknown_loss() -> nn.Module:
    return gpt2(None)


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **SHARED))


class MeanLoss(nn.Module):
    """A model whose loss is the mean over each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()
        self.loss_type = "ForCausalLM"

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.inner(input_ids=input_ids, attention_mask=attention_mask).logits
        return {"logits": logits} | (
            {} if labels is None else {"loss": next_token_loss(logits, labels, "mean")}
        )


def next_token_loss(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    targets = labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction=reduction)


def stock(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: str | Path | None = None,
    resume: str | Path | None = None,
    data: Any = None,
    trainer_class: type[Trainer] = Trainer,
    callbacks: Iterable[Any] = (),
    compute_loss_func: Any = None,
    **arguments: Any,
) -> Trainer:
    """Train, and return the Trainer. `arguments` go to TrainingArguments."""
    settings = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": STEPS,
        "num_train_epochs": EPOCHS,
        "train_sampling_strategy": "sequential",
        "max_grad_norm": 0.0,
        "warmup_steps": WARMUP,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "use_cpu": True,
    }
    with tempfile.TemporaryDirectory() as temporary:
        trainer = trainer_class(
            model=model,
            args=Arguments(output_dir=str(folder or temporary), **settings | arguments),
            train_dataset=lines() if data is None else data,
            data_collator=collate,
            optimizers=(optimizer, None),
            callbacks=list(callbacks),
            compute_loss_func=compute_loss_func,
        )
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def wrapped(net: nn.Module, **options: Any) -> fusedacc.AccumulatingOptimizer:
    return fusedacc.AccumulatingOptimizer(stock(net), **options)


def train_ours(model: nn.Module, callbacks: Iterable[Any] = (), optimizer=None, **settings: Any) -> Trainer:
    optimizer = wrapped(model) if optimizer is None else optimizer
    return train(model, optimizer, callbacks=[AccumulationCallback(), *callbacks], **settings)


def exact(model: nn.Module, schedule: str = "linear") -> int:
    """Train in float64 with the token mean of each whole window. Return the number of updates."""
    model.double()
    optimizer, updates = stock(model), EPOCHS * UPDATES_PER_EPOCH
    scheduler = transformers.get_scheduler(schedule, optimizer, WARMUP, updates)
    for _epoch in range(EPOCHS):
        examples = iter(lines())
        while window := list(itertools.islice(examples, 2 * STEPS)):
            batches = [collate(window[at : at + 2]) for at in range(0, len(window), 2)]
            total = sum(int(batch["labels"][:, 1:].ne(-100).sum()) for batch in batches)
            for batch in batches:
                labels = batch.pop("labels")
                (next_token_loss(model(**batch)["logits"], labels, "sum") / total).backward()
            optimizer.step(), scheduler.step(), optimizer.zero_grad()
    return updates


def compare() -> list[Row]:
    """Return a row for each case."""
    stream = {"data": Stream(), "lr_scheduler_type": "constant_with_warmup"}
    return [
        _row("token-weighted loss, partly filled last window", llama),
        _row(
            "partly filled last window, loader without a length",
            llama,
            stream | {"max_steps": 20},
            stream | {"max_steps": 24},
            "carries the last window into the next epoch",
        ),
        _row("loss of the model's own, a mean", MeanLoss, remark="mean of means, and so with fusedacc"),
        _row("GPT-2", unknown_loss, remark="counts a token too many in each row, and so with fusedacc"),
    ]


def tolerance() -> float:
    reference = llama()
    return float32_tolerance(reference, exact(reference), llama(), rows=2 * STEPS * 64)


def _row(
    case: str,
    make: Callable[[], nn.Module],
    theirs: dict[str, Any] | None = None,
    ours: dict[str, Any] | None = None,
    remark: str = "",
) -> Row:
    start, reference, their_model, our_model = (make() for _ in range(4))
    updates = exact(reference, (ours or {}).get("lr_scheduler_type", "linear"))
    their_trainer = train(their_model, stock(their_model), **(theirs or {}))
    our_trainer = train_ours(our_model, **(ours or {}))
    their_run = their_model, their_trainer.state.global_step
    our_run = our_model, our_trainer.state.global_step
    framework = f"Transformers {transformers.__version__}"
    return compared(framework, case, snapshot(start), (reference, updates), their_run, our_run, remark)
