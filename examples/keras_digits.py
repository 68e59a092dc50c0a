"""Handwritten digits with Keras on torch, in batches of 64 as 4 x 16."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
from sklearn.datasets import load_digits

from fusedacc.integrations.keras import AccumulatingOptimizer, AccumulationCallback

keras.utils.set_random_seed(0)
images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1) / 16

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Flatten(),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
rate = keras.optimizers.schedules.CosineDecay(1e-2, decay_steps=24 * 10)  # 24 updates per epoch
model.compile(
    optimizer=AccumulatingOptimizer(keras.optimizers.AdamW(rate, global_clipnorm=1.0), 4),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
model.fit(
    images[:1500], labels[:1500], batch_size=16, epochs=10, verbose=0, callbacks=[AccumulationCallback()]
)
_, accuracy = model.evaluate(images[1500:], labels[1500:], verbose=0)
print(f"{int(model.optimizer.iterations)} updates, accuracy on 297 unseen digits: {accuracy:.1%}")
