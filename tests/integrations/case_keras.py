"""Keras's accumulation and ours in `fit`, compared with float64 updates on whole batches."""

import math
import os
import warnings
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch
from comparison import Row, difference

from fusedacc.integrations.keras import AccumulatingOptimizer, AccumulationCallback

FRAMEWORK = f"Keras {keras.__version__}"
#: 150 samples make 10 micro-batches, the last of 6 samples, and 3 windows of 64, 64 and 22 samples.
SAMPLES, MICRO, STEPS, EPOCHS = 150, 16, 4, 12
UPDATES = EPOCHS * math.ceil(SAMPLES / (MICRO * STEPS))
#: Keras continues the last window of an epoch in the next epoch, and drops it after `fit`.
THEIR_UPDATES = EPOCHS * math.ceil(SAMPLES / MICRO) // STEPS
LONGEST, WORDS = 24, 20

Optimizer = keras.optimizers.Optimizer


def samples() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(0)
    x = random.randn(SAMPLES, 6)
    return x, np.sin(x @ np.arange(6.0))[:, None]


def regression(dtype: str = "float32") -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, activation="tanh", dtype=dtype), keras.layers.Dense(1, dtype=dtype)]
    return keras.Sequential([keras.Input((6,)), *layers])


def sentences() -> tuple[np.ndarray, np.ndarray]:
    """Return sentences of different lengths: words 1 to 19, padded with 0. The target is a word's class."""
    random = np.random.RandomState(1)
    words = random.randint(1, WORDS, (SAMPLES, LONGEST))
    lengths = np.minimum(1 + random.geometric(0.15, SAMPLES), LONGEST)
    words[np.arange(LONGEST) >= lengths[:, None]] = 0
    return words, words % 3


class Tagger(keras.Model):
    """Predicts a class for each word. The loss of a batch is the mean over its words."""

    def __init__(self, dtype: str = "float32") -> None:
        super().__init__(dtype=dtype)
        keras.utils.set_random_seed(0)
        self.embedding = keras.layers.Embedding(WORDS, 8, mask_zero=True, dtype=dtype)
        self.head = keras.layers.Dense(3, activation="softmax", dtype=dtype)

    def call(self, words: Any) -> Any:
        return self.head(self.embedding(words))

    def train_step(self, data: Any) -> Any:
        if isinstance(self.optimizer, AccumulatingOptimizer):
            self.optimizer.weight = int((data[0] != 0).sum())
        return super().train_step(data)


def snapshot(model: keras.Model) -> list[torch.Tensor]:
    return [variable.value.detach().clone() for variable in model.weights]


def fit(
    model: keras.Model,
    optimizer: Optimizer,
    data: tuple[np.ndarray, np.ndarray],
    batch_size: int,
    loss: str,
    epochs: int = EPOCHS,
) -> list[torch.Tensor]:
    """Train on `data` in order and return the model's weights."""
    model.compile(optimizer=optimizer, loss=loss)
    callbacks = [AccumulationCallback()] if isinstance(optimizer, AccumulatingOptimizer) else []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Gradients do not exist")
        model.fit(*data, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    return snapshot(model)


def three_ways(
    case: str,
    remark: str,
    build: Callable[[str], keras.Model],
    data: tuple[np.ndarray, np.ndarray],
    optimizer: Callable[..., Optimizer],
    loss: str,
) -> Row:
    """Train in float64 on whole batches, and in float32 with Keras's accumulation and with ours."""

    def started(dtype: str) -> keras.Model:
        model = build(dtype)
        model(data[0][:2])
        for variable, value in zip(model.weights, initial, strict=True):
            variable.assign(value)
        return model

    first = build("float32")
    first(data[0][:2])
    initial = [variable.numpy() for variable in first.weights]
    start = snapshot(first)
    whole = optimizer()
    reference = fit(started("float64"), whole, data, MICRO * STEPS, loss)
    own = optimizer(gradient_accumulation_steps=STEPS)
    theirs = fit(started("float32"), own, data, MICRO, loss)
    wrapped = AccumulatingOptimizer(optimizer(), STEPS)
    ours = fit(started("float32"), wrapped, data, MICRO, loss)
    return Row(
        FRAMEWORK,
        case,
        theirs=difference(theirs, reference, start),
        ours=difference(ours, reference, start),
        updates=int(whole.iterations),
        their_updates=int(own.iterations),
        our_updates=int(wrapped.iterations),
        remark=remark,
    )


def momentum(**settings: Any) -> Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9, **settings)


def scheduled(**settings: Any) -> Optimizer:
    """Return SGD whose learning rate falls by a fifth with each update."""
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.2, 1, 0.8), **settings)


def averaged(**settings: Any) -> Optimizer:
    """Return SGD whose result is a moving average of the parameters."""
    return keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9, **settings)


def full_windows() -> tuple[np.ndarray, np.ndarray]:
    """Return samples that make two full windows."""
    x, y = samples()
    return x[: 2 * MICRO * STEPS], y[: 2 * MICRO * STEPS]


class Branches(keras.Model):
    """The second branch has gradients only in the first two micro-batches of each window."""

    def __init__(self, dtype: str = "float32") -> None:
        super().__init__(dtype=dtype)
        keras.utils.set_random_seed(0)
        self.first = keras.layers.Dense(1, dtype=dtype)
        self.second = keras.layers.Dense(1, dtype=dtype)

    def call(self, x: Any) -> Any:
        chosen = x[:, 0] > 0
        if not bool(chosen.any()):
            return self.first(x)
        return keras.ops.where(chosen[:, None], self.second(x), self.first(x))


def branching() -> tuple[np.ndarray, np.ndarray]:
    x, y = full_windows()
    second = (np.arange(len(x)) // MICRO) % STEPS < 2
    x[:, 0] = np.where(second, 1, -1) * np.abs(x[:, 0])
    return x, y


#: Name, what Keras does, and the arguments of `three_ways`.
CASES: list[tuple[str, str, Any, Callable, Any, str]] = [
    (
        "partly filled last window",
        "carries the last window into the next epoch; drops it after `fit`",
        *(regression, samples, momentum, "mse"),
    ),
    (
        "token-weighted loss, ragged lengths",
        "mean of means; carries the last window on",
        *(Tagger, sentences, momentum, "sparse_categorical_crossentropy"),
    ),
    (
        "learning rate schedule",
        "its schedule counts micro-batches",
        *(regression, full_windows, scheduled, "mse"),
    ),
    (
        "moving average (`use_ema`)",
        "averages after every micro-batch",
        *(regression, full_windows, averaged, "mse"),
    ),
    (
        "layer without gradient in the last micro-batch",
        "drops that layer's sum",
        *(Branches, branching, momentum, "mse"),
    ),
    ("full windows", "", regression, full_windows, momentum, "mse"),
]


def compare() -> list[Row]:
    return [three_ways(case, remark, build, data(), *how) for case, remark, build, data, *how in CASES]
