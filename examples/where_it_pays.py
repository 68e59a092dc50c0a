"""Train two small transformers with plain PyTorch, with fusedacc, and with model=, and compare them.

    python examples/where_it_pays.py              # the standard library's sources, on a GPU if available
    python examples/where_it_pays.py --dtype autocast --text war_and_peace.txt

One model reads bytes, in large micro-batches. Accumulating gradients is a small part of its work. The other
model reads words, in small micro-batches. There it is a large part. The script prints a table, and writes a
plot and the numbers behind it to `--out`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keeps the profiler's messages out of the progress bar

import torch
from demo.loops import DTYPES, LOOPS, Config
from demo.measure import Length, Loop, bytes_by_part, peak_memory, train_in_turns
from demo.model import load_text, load_words
from demo.plot import plot
from demo.progress import Progress
from demo.report import SETTINGS, ModelResult, Result, table
from torch import Tensor

import fusedacc

#: Updates of a loop in the measurement of memory.
MEMORY_UPDATES = 2
#: The fewest and the most updates of each loop without `--updates`.
LEAST_UPDATES, MOST_UPDATES = 8, 32


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="default: bfloat16 if the hardware supports it, else float32"
    )
    parser.add_argument("--text", type=Path, help="a text to train on (default: Python's standard library)")
    spent = "time for training all loops of both models; each loop makes "
    spent += f"{LEAST_UPDATES} to {MOST_UPDATES} updates (%(default)s)"
    parser.add_argument("--seconds", type=float, default=40.0, help=spent)
    parser.add_argument("--updates", type=int, help="number of updates of each loop, however long they take")
    parser.add_argument("--steps", type=int, default=8, help="micro-batches per update (%(default)s)")
    parser.add_argument("--width", type=int, default=256, help="width of the models (%(default)s)")
    parser.add_argument("--backend", default="auto", help="auto, cuda, triton, cpu or eager (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path("build/demo"), help="folder for plot and numbers (%(default)s)"
    )
    options = parser.parse_args(arguments)
    for name in ("updates", "steps"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1; got {getattr(options, name)}")
    if not options.seconds > 0:
        parser.error(f"--seconds must be above 0; got {options.seconds}")
    if options.width < 1 or options.width % Config.heads:
        parser.error(f"--width must be a positive multiple of {Config.heads}; got {options.width}")
    try:
        options.device = torch.device(options.device)
        ones = torch.ones(1, device=options.device)
        fusedacc.functional.scale_accumulate_([ones], [ones.clone()], backend=options.backend)
        options.out.mkdir(parents=True, exist_ok=True)
        options.bytes, options.words = load_text(options.text), load_words(options.text)
    except (AssertionError, OSError, RuntimeError, ValueError) as error:  # AssertionError: no CUDA in torch
        parser.error(str(error))
    return options


def default_dtype(device: torch.device) -> str:
    """Return bfloat16 if it is as fast as float32: on a GPU, or on a CPU with bfloat16 instructions."""
    if device.type == "cuda":
        return "bfloat16"
    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"


def conditions(config: Config, models: Sequence[ModelResult]) -> str:
    device = (
        torch.cuda.get_device_name(config.device)
        if config.device.type == "cuda"
        else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    )
    updates = ", ".join(f"{len(model.losses['stock'])} updates on {model.name}" for model in models)
    return (
        f"{device}, torch {torch.__version__}, backend {config.backend}. {SETTINGS[config.dtype]}, "
        f"fused AdamW, {config.steps} micro-batches per update; each loop in turns from one seed: {updates}."
    )


def compare(name: str, text: Tensor, config: Config, length: Length, progress: Progress) -> ModelResult:
    """Return all measurements of one model."""
    progress.begin(f"{name}: training in turns")
    loops: list[Loop] = [kind(config) for kind in LOOPS]
    parameters = sum(p.numel() for p in loops[0].parameters)

    def decided(updates: int, seconds: float) -> None:
        progress.expect(len(LOOPS) * (updates - expected(length)))
        if length.updates is None:
            progress.begin(f"{name}: training in turns, {updates} rounds of {seconds:.1f} s")

    losses, times = train_in_turns(loops, text, length, lambda loss: progress.advance(loss=loss), decided)
    parts, calls, peaks = {}, {}, {}
    for loop in loops:
        progress.begin(f"{name}: bytes, {loop.name}")
        parts[loop.name], calls[loop.name] = bytes_by_part(loop, text, len(losses[loop.name]))
        progress.advance()
    del loop, loops  # frees their memory
    # Two micro-batches are enough, because more have the same peak.
    short = dataclasses.replace(config, steps=min(2, config.steps))
    for kind in LOOPS:
        progress.begin(f"{name}: memory, {kind.name}")
        peaks[kind.name] = peak_memory(kind, short, text, MEMORY_UPDATES)
        progress.advance(MEMORY_UPDATES)
    shape = (config.vocabulary, config.micro_batch_size, config.context)
    return ModelResult(name, parameters, *shape, losses, times, peaks, parts, calls)


def length_of(options: argparse.Namespace, models: int) -> Length:
    """Return how long to train each model, if `models` models share the time."""
    return Length(options.updates, options.seconds / models, LEAST_UPDATES, MOST_UPDATES)


def expected(length: Length) -> int:
    """Return the expected number of updates of a loop before the time of an update is known."""
    return length.most if length.updates is None else length.updates


def main(arguments: list[str] | None = None) -> Result:
    options = parse(arguments)
    dtype = options.dtype or default_dtype(options.device)
    config = Config(dtype, options.device, options.steps, options.backend, options.seed, options.width)
    text, vocabulary = options.words
    words = dataclasses.replace(config, vocabulary=vocabulary, micro_batch_size=1)
    runs = (("bytes", options.bytes, config), ("words", text, words))
    length = length_of(options, len(runs))
    # Each loop also makes one update whose bytes are counted.
    total = len(runs) * len(LOOPS) * (expected(length) + 1 + MEMORY_UPDATES)
    with Progress(total) as progress:
        models = [compare(name, text, own, length, progress) for name, text, own in runs]
    result = Result(dtype, options.steps, conditions(config, models), models)
    print(table(result))
    path = options.out / f"where_it_pays-{dtype}.png"
    plot(result, path)
    path.with_suffix(".json").write_text(json.dumps(dataclasses.asdict(result), indent=1) + "\n")
    print(f"\nplot: {os.path.relpath(path)}, numbers: {os.path.relpath(path.with_suffix('.json'))}")
    return result


if __name__ == "__main__":
    main()
