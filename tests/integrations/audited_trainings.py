"""Trainings with the frameworks' own accumulation, and ours inside them. One with "bad_" has a problem.

They are the trainings of case_*.py. `CASES` has all: functions without arguments, by their names.
"""

import contextlib
import tempfile

import torch

CASES = {}
#: Epochs of a training.
EPOCHS = 3


def case(function):
    """Add a training to the cases."""
    CASES[function.__name__] = function
    return function


# Accelerate


@case
def bad_accelerate_last_window():
    import case_accelerate

    case_accelerate.theirs(case_accelerate.Digits())


@case
def bad_accelerate_tokens():
    import case_accelerate

    case_accelerate.theirs(case_accelerate.Text())


@case
def right_accelerate_full_windows():
    import case_accelerate
    from torch.utils.data import DataLoader, TensorDataset

    class FullWindows(case_accelerate.Digits):
        def loader(self):
            tensors = super().loader().dataset.tensors
            return DataLoader(TensorDataset(*(tensor[:320] for tensor in tensors)), batch_size=16)

    case_accelerate.theirs(FullWindows())


@case
def right_accelerate_ours():
    import case_accelerate

    case_accelerate.ours(case_accelerate.Digits())


@case
def right_accelerate_ours_tokens():
    import case_accelerate

    case_accelerate.ours(case_accelerate.Text())


@case
def right_accelerate_ours_tokens_model():
    import case_accelerate

    case_accelerate.ours(case_accelerate.Text(), model=True)


@case
def right_accelerate_docs_token_loss():
    """The loop of Accelerate's guide "Gradient accumulation with variable-size training samples"."""
    import case_accelerate
    from accelerate import Accelerator

    training, k = case_accelerate.Text(), case_accelerate.STEPS
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=k)
    model = training.model()
    model, optimizer, loader = accelerator.prepare(model, case_accelerate.stock(model), training.loader())
    criterion = torch.nn.CrossEntropyLoss(reduction="sum")
    for _ in range(2):
        iterator = iter(loader)
        sizes = [k] * (len(loader) // k) + [len(loader) % k] * (len(loader) % k > 0)
        for size in sizes:
            batches = [next(iterator) for _ in range(size)]
            items = sum(labels.ne(-100).sum() for _, labels in batches)
            items = accelerator.gather(items).sum().item()
            for i, (x, labels) in enumerate(batches):
                is_last = i == size - 1
                with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
                    loss = criterion(model(x).flatten(0, 1), labels.flatten())
                    # The guide multiplies by k, because accelerate divides by it.
                    accelerator.backward(loss * k * accelerator.num_processes / items)
            optimizer.step()
            optimizer.zero_grad()


@case
def right_accelerate_bfloat16_clipped():
    import case_accelerate
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    training = case_accelerate.Digits()
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
    model = training.model()
    model, optimizer, loader = accelerator.prepare(model, case_accelerate.stock(model), training.loader())
    for _, batch in zip(range(20), loader, strict=False):
        with accelerator.accumulate(model):
            accelerator.backward(training.loss(model, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()


# Transformers


@case
def right_transformers_llama():
    import case_transformers as cases

    model = cases.llama()
    cases.train(model, cases.stock(model))


@case
def right_transformers_llama_clipped():
    import case_transformers as cases

    model = cases.llama()
    cases.train(model, cases.stock(model), max_grad_norm=0.05)


@case
def right_transformers_no_accumulation():
    import case_transformers as cases

    model = cases.llama()
    cases.train(model, cases.stock(model), gradient_accumulation_steps=1)


@case
def bad_transformers_stream():
    import case_transformers as cases

    model = cases.llama()
    options = {"lr_scheduler_type": "constant_with_warmup", "max_steps": 20}
    cases.train(model, cases.stock(model), data=cases.Stream(), **options)


@case
def bad_transformers_mean_loss():
    import case_transformers as cases

    model = cases.MeanLoss()
    cases.train(model, cases.stock(model))


@case
def bad_transformers_gpt2():
    import case_transformers as cases

    model = cases.unknown_loss()
    cases.train(model, cases.stock(model))


@case
def bad_transformers_classifier():
    """A model that takes **kwargs and ignores num_items_in_batch: nothing divides by k."""
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(vocab_size=99, **sizes))
    rows = [{"input_ids": torch.randint(0, 99, (12,)), "labels": torch.tensor(i % 2)} for i in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=4,
            num_train_epochs=2,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
        )
        Trainer(model, arguments, train_dataset=rows).train()


@case
def right_transformers_ours():
    import case_transformers as cases

    cases.train_ours(cases.llama())


@case
def right_transformers_ours_model():
    import case_transformers as cases

    model = cases.llama()
    cases.train_ours(model, optimizer=cases.wrapped(model, model=model))


@case
def right_transformers_ours_stream():
    import case_transformers as cases

    options = {"lr_scheduler_type": "constant_with_warmup", "max_steps": 24}
    cases.train_ours(cases.llama(), data=cases.Stream(), **options)


@case
def right_peft_lora():
    import case_transformers as cases
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(cases.llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    cases.train(model, cases.stock(model))


# Lightning


def lightning_batches(index):
    """Return the batches and options of a case of case_lightning.py."""
    import case_lightning

    _, lengths, _, options, _ = case_lightning.CASES[index]
    return case_lightning.batches(lengths), options


@case
def right_lightning_full_windows():
    import case_lightning

    case_lightning.fit_theirs(lightning_batches(0)[0], EPOCHS)


@case
def bad_lightning_last_window():
    import case_lightning

    case_lightning.fit_theirs(lightning_batches(1)[0], EPOCHS)


@case
def bad_lightning_tokens():
    import case_lightning

    case_lightning.fit_theirs(lightning_batches(2)[0], EPOCHS)


@case
def bad_lightning_epoch_shorter_than_k():
    import case_lightning

    case_lightning.fit_theirs(case_lightning.batches([6] * 3), 6)


@case
def right_lightning_no_accumulation():
    import case_lightning as cases

    cases.trainer(EPOCHS).fit(cases.Module(cases.network()), cases.loader(cases.batches([6] * 8)))


@case
def right_lightning_clipped():
    import case_lightning as cases

    trainer = cases.trainer(EPOCHS, accumulate_grad_batches=4, gradient_clip_val=0.1)
    trainer.fit(cases.Module(cases.network()), cases.loader(cases.batches([6] * 8)))


@case
def right_lightning_ours():
    import case_lightning

    batches, options = lightning_batches(1)
    case_lightning.fit_ours(batches, EPOCHS, **options)


@case
def right_lightning_ours_tokens():
    import case_lightning

    batches, options = lightning_batches(2)
    case_lightning.fit_ours(batches, EPOCHS, **options)


# fastai


def fastai_batches(index):
    """Return the batches of a case of case_fastai.py."""
    import case_fastai

    return case_fastai.batches(case_fastai.CASES[index][1])


@case
def right_fastai_full_windows():
    import case_fastai

    case_fastai.fit_theirs(fastai_batches(0), EPOCHS)


@case
def right_fastai_windows_cross_epochs():
    import case_fastai

    case_fastai.fit_theirs(fastai_batches(1), EPOCHS)


@case
def bad_fastai_ragged():
    import case_fastai

    case_fastai.fit_theirs(fastai_batches(2), EPOCHS)


@case
def right_fastai_ours():
    import case_fastai

    case_fastai.fit_ours(fastai_batches(1), EPOCHS)


@case
def right_fastai_ours_ragged():
    import case_fastai

    case_fastai.fit_ours(fastai_batches(2), EPOCHS)


@case
def right_fastai_own_optimizer():
    """fastai's own Adam, which is no torch optimizer."""
    import case_fastai as cases
    from fastai.callback.training import GradientAccumulation
    from fastai.optimizer import Adam

    accumulation = GradientAccumulation(cases.SAMPLES)
    cases.fit(cases.learner(cases.batches([8] * 6), Adam, accumulation), EPOCHS)


@case
def right_fastai_own_optimizer_windows_cross_epochs():
    import case_fastai as cases
    from fastai.callback.training import GradientAccumulation
    from fastai.optimizer import Adam

    accumulation = GradientAccumulation(cases.SAMPLES)
    cases.fit(cases.learner(cases.batches([8] * 8), Adam, accumulation), EPOCHS)


# Keras


def train_keras(index, with_ours=False):
    """Run a case of case_keras.py."""
    import case_keras as cases

    _, _, build, data, optimizer, loss = cases.CASES[index]
    if with_ours:
        chosen = cases.AccumulatingOptimizer(optimizer(), cases.STEPS)
    else:
        chosen = optimizer(gradient_accumulation_steps=cases.STEPS)
    cases.fit(build("float32"), chosen, data(), cases.MICRO, loss, EPOCHS)


@case
def right_keras_full_windows():
    train_keras(5)


@case
def bad_keras_last_window():
    train_keras(0)


@case
def bad_keras_tokens():
    train_keras(1)


@case
def bad_keras_branches():
    train_keras(4)


@case
def right_keras_no_accumulation():
    import case_keras as cases

    cases.fit(cases.regression(), cases.momentum(), cases.full_windows(), 64, "mse", EPOCHS)


@case
def right_keras_clips():
    """Keras clips each parameter by itself."""
    import case_keras as cases

    for clipping in ({"clipnorm": 0.05}, {"clipvalue": 1e-3}):
        chosen = cases.momentum(gradient_accumulation_steps=cases.STEPS, **clipping)
        cases.fit(cases.regression(), chosen, cases.full_windows(), cases.MICRO, "mse", EPOCHS)


@case
def right_keras_ours():
    train_keras(0, with_ours=True)


@case
def right_keras_ours_branches():
    train_keras(4, with_ours=True)
