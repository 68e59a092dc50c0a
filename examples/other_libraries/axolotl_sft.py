"""Axolotl's supervised training with and without fusedacc, update by update.

pip install axolotl==0.19.0
python examples/other_libraries/axolotl_sft.py
"""

import os
import sys
import tempfile
from pathlib import Path

import tiny

os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
from axolotl.cli.args import TrainerCliArgs
from axolotl.cli.config import load_cfg
from axolotl.common.datasets import load_datasets
from axolotl.core.trainers.base import AxolotlTrainer
from axolotl.integrations.base import BasePlugin
from axolotl.train import train as axolotl_train

import fusedacc
from fusedacc.integrations.transformers import AccumulationCallback

folder = Path(tempfile.mkdtemp())


def plugin(record, wraps, in_place):
    """Return a plugin class that wraps the optimizer, if asked to, and records the training."""

    class FusedTrainer(AxolotlTrainer):
        def create_optimizer(self, model=None):
            inner = super().create_optimizer(model)
            self.optimizer = fusedacc.AccumulatingOptimizer(inner, model=self.model if in_place else None)
            return self.optimizer

    class Plugin(BasePlugin):
        def get_trainer_cls(self, cfg):
            return FusedTrainer if wraps else None

        def add_callbacks_pre_trainer(self, cfg, model):
            return [record, *([AccumulationCallback()] if wraps else [])]

    return Plugin


def train(wraps, in_place=False):
    """Train for two epochs of three updates, and return the record."""
    record = tiny.Record()
    vars(sys.modules["__main__"])["Plugin"] = plugin(record, wraps, in_place)
    file = Path(tempfile.mkdtemp()) / "config.yml"
    file.write_text(f"""
base_model: {folder / "model"}
plugins: [__main__.Plugin]
datasets: [{{path: {folder / "toy.json"}, ds_type: json, type: alpaca}}]
dataset_prepared_path: {file.parent / "prepared"}
output_dir: {file.parent / "output"}
sequence_len: 256
micro_batch_size: 2
gradient_accumulation_steps: 8  # set it only here
num_epochs: 2
optimizer: adamw_torch
lr_scheduler: constant
learning_rate: 0.01
val_set_size: 0.0
bf16: false
save_strategy: "no"
device: cpu
seed: 1
""")
    cfg = load_cfg(str(file))
    axolotl_train(cfg=cfg, dataset_meta=load_datasets(cfg=cfg, cli_args=TrainerCliArgs()))
    return record


if __name__ == "__main__":  # Axolotl starts processes that import this script
    tiny.save_llama(folder / "model")
    tiny.save_instructions(folder / "toy.json", 48)
    stock = train(False)
    tiny.compare("full", stock, train(True), exact=True)
    tiny.compare("full, model=", stock, train(True, in_place=True), exact=False)
