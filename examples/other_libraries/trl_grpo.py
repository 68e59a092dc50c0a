"""TRL's GRPOTrainer with and without fusedacc, update by update, for each loss_type that is given.

    pip install trl==1.16.0
    python examples/other_libraries/trl_grpo.py [LOSS_TYPE ...]

Then the same gradients come from a loop without the Trainer: a "dapo" loss is a sum over tokens, divided by
the tokens of all micro-batches, which is what reduction="normalized" computes.
"""

import sys
import tempfile

import torch
from datasets import Dataset
from tiny import Record, compare, llama, tokenizer
from trl import GRPOConfig, GRPOTrainer

import fusedacc
from fusedacc.integrations.transformers import AccumulationCallback

K = 4
PROMPTS = Dataset.from_dict({"prompt": ["abcdefgh"[i % 5 : i % 5 + 2 + i % 3] for i in range(16)]})
#: The inputs of each micro-batch, of the training that runs.
micro_batches = []


class Trainer(GRPOTrainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        micro_batches.append(inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)


def reward(completions, **kwargs):
    return [
        completion.count("a") + completion.count("e") - len(completion) / 10 for completion in completions
    ]


def train(loss_type, wraps, in_place=False):
    """Train for six updates, and return the trainer and the record."""
    micro_batches.clear()
    model, record = llama(), Record()
    arguments = GRPOConfig(
        tempfile.mkdtemp(),
        loss_type=loss_type,
        gradient_accumulation_steps=K,  # set it only here
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=12,
        max_steps=6,
        learning_rate=1e-2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    optimizer, callbacks = torch.optim.AdamW(model.parameters(), lr=1e-2), [record]
    if wraps:
        optimizer = fusedacc.AccumulatingOptimizer(optimizer, model=model if in_place else None)
        callbacks.append(AccumulationCallback())
    trainer = Trainer(
        model,
        reward,
        arguments,
        PROMPTS,
        processing_class=tokenizer(),
        optimizers=(optimizer, None),
        callbacks=callbacks,
    )
    trainer.train()
    return trainer, record


def gradients_of_a_loop(trainer, loss_type, reduction):
    """Return the gradients of the first window, by a counted loop and the trainer's loss.

    The loss of "dapo" is multiplied by the number of tokens, so that it is a sum. That of other types is
    multiplied by K, by which the trainer divides it.
    """
    model = trainer.model
    model.load_state_dict(llama().state_dict())
    model.zero_grad()
    trainer.loss_type = loss_type
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = fusedacc.AccumulatingOptimizer(inner, K, reduction=reduction)
    for inputs in micro_batches[:K]:
        loss = GRPOTrainer.compute_loss(trainer, model, inputs)
        loss = loss * (inputs["num_items_in_batch"] if loss_type == "dapo" else K)
        tokens = None if reduction == "mean" else int(inputs["completion_mask"].sum())
        with optimizer.accumulate(weight=tokens):
            loss.backward()
        optimizer.step()
        if not optimizer.has_updated:
            optimizer.zero_grad()
    gradients = [param.grad for param in model.parameters()]
    optimizer.close()
    return gradients


for loss_type in sys.argv[1:] or ["dapo", "grpo", "dr_grpo", "bnpo"]:
    _, stock = train(loss_type, wraps=False)
    _, inside = train(loss_type, wraps=True, in_place=True)
    compare(f"{loss_type}, model=", stock, inside, exact=False)
    trainer, ours = train(loss_type, wraps=True)
    compare(loss_type, stock, ours, exact=True)
    trainer.optimizer.optimizer.close()

    loops = {"dapo": [("dapo", "normalized"), ("bnpo", "weighted")]}
    for loss, reduction in loops.get(loss_type, [(loss_type, "mean")]):
        gradients = gradients_of_a_loop(trainer, loss, reduction)
        error = max(
            ((mine - theirs).abs().max() / theirs.abs().max()).item()
            for mine, theirs in zip(gradients, stock.gradients, strict=True)
        )
        print(f'{loss_type}: a loop with the loss of "{loss}" and "{reduction}" differs by {error:.0e}')
        assert error < 1e-5
