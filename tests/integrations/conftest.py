"""Settings that must stand before a framework is imported: Keras on torch, no network, no telemetry."""

import os

os.environ["KERAS_BACKEND"] = "torch"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
