"""LLaMA-Factory's supervised training with and without fusedacc, update by update.

pip install llamafactory==0.9.5
python examples/other_libraries/llamafactory_sft.py
"""

import importlib.machinery
import importlib.util
import json
import os
import sys
import tempfile
import types
from pathlib import Path

import tiny

os.environ["DISABLE_VERSION_CHECK"] = "1"
if importlib.util.find_spec("torchaudio") is None:  # only imported, for text
    sys.modules["torchaudio"] = types.ModuleType("torchaudio")
    sys.modules["torchaudio"].__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)

from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer
from llamafactory.train.tuner import run_exp

import fusedacc
from fusedacc.integrations.transformers import AccumulationCallback

folder = Path(tempfile.mkdtemp())
tiny.save_llama(folder / "model")
tiny.save_instructions(folder / "toy.json", 40)
(folder / "dataset_info.json").write_text(json.dumps({"toy": {"file_name": "toy.json"}}))
create_optimizer = CustomSeq2SeqTrainer.create_optimizer


def train(wraps, in_place=False, finetuning_type="full"):
    """Train for two epochs of three updates, and return the record."""

    def create_wrapped(self, *args, **kwargs):
        inner = create_optimizer(self, *args, **kwargs)
        self.optimizer = fusedacc.AccumulatingOptimizer(inner, model=self.model if in_place else None)
        return self.optimizer

    CustomSeq2SeqTrainer.create_optimizer = create_wrapped if wraps else create_optimizer
    record = tiny.Record()
    arguments = {
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": str(folder / "model"),
        "template": "default",
        "finetuning_type": finetuning_type,
        "dataset": "toy",
        "dataset_dir": str(folder),
        "cutoff_len": 128,
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 8,  # set it only here
        "num_train_epochs": 2.0,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
    }
    run_exp(arguments, [record, *([AccumulationCallback()] if wraps else [])])
    return record


for finetuning_type in ("full", "lora"):
    stock = train(False, finetuning_type=finetuning_type)
    for in_place in (False, True):
        ours = train(True, in_place, finetuning_type)
        name = f"{finetuning_type}, model=" if in_place else finetuning_type
        tiny.compare(name, stock, ours, exact=not in_place)
