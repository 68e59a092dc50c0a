"""Trains a small byte-level transformer by the stock accumulation loop, then wrapped, and compares them.

    python examples/byte_transformer.py              # the standard library's sources, a GPU if there is one
    python examples/byte_transformer.py --dtype autocast --text war_and_peace.txt

Prints a table and writes a plot and the numbers behind it to `--out`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would write into the progress bar

import torch
from demo.loops import DTYPES, LOOPS, Config
from demo.measure import calls_per_micro_batch, peak_memory, time_per_update, train
from demo.model import CONTEXT, MICRO_BATCH_SIZE, load_text
from demo.report import SETTINGS, Result, plot, table
from tqdm import tqdm


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="default: bfloat16 where the hardware has it, else float32"
    )
    parser.add_argument("--text", type=Path, help="a file to learn instead of the standard library's sources")
    parser.add_argument(
        "--updates", type=int, default=60, help="optimizer updates of each loop (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=8, help="micro-batches per update (%(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of the model (%(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=11, help="timed updates of each loop, in turns (%(default)s)"
    )
    parser.add_argument("--backend", default="auto", help="auto, cuda, triton, cpu or eager (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path("build/demo"), help="folder for plot and numbers (%(default)s)"
    )
    options = parser.parse_args(arguments)
    for name in ("updates", "steps", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1; got {getattr(options, name)}")
    return options


def default_dtype(device: torch.device) -> str:
    """bfloat16 where it is no slower than float32: a GPU, or a CPU with instructions for it."""
    if device.type == "cuda":
        return "bfloat16"
    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"


def describe(config: Config, parameters: int) -> str:
    device = (
        torch.cuda.get_device_name(config.device)
        if config.device.type == "cuda"
        else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    )
    return (
        f"Byte-level transformer, {parameters / 1e6:.2f} M parameters, {SETTINGS[config.dtype][0]}, AdamW; "
        f"{config.steps} micro-batches of {MICRO_BATCH_SIZE} x {CONTEXT} bytes per update.\n"
        f"{device}, torch {torch.__version__}, backend {config.backend}. Bytes: the accounting of "
        "fusedacc/traffic/accounting.py, weight-gradient write included."
    )


def main(arguments: list[str] | None = None) -> Result:
    options = parse(arguments)
    device = torch.device(options.device)
    dtype = options.dtype or default_dtype(device)
    config = Config(dtype, device, options.steps, options.backend, options.seed, options.width)
    text = load_text(options.text)

    peaks = {kind.name: peak_memory(kind, config, text) for kind in LOOPS}
    calls = calls_per_micro_batch(config, text)
    losses: dict[str, list[float]] = {kind.name: [] for kind in LOOPS}
    with tqdm(
        total=len(LOOPS) * (options.updates + options.rounds), unit="update", dynamic_ncols=True
    ) as bar:
        loops = [kind(config) for kind in LOOPS]
        for loop in loops:
            bar.set_description(f"training, {loop.name}")
            for loss in train(loop, text, options.updates):
                losses[loop.name].append(loss)
                bar.set_postfix(loss=f"{loss:.3f}")
                bar.update()
        bar.set_postfix()
        bar.set_description("timing, in turns")
        times = time_per_update(loops, text, options.rounds, bar.update)
    parameters = sum(p.numel() for p in loops[0].parameters)
    conditions = describe(config, parameters)
    result = Result(dtype, options.steps, parameters, conditions, losses, times, peaks, calls)
    print(table(result))
    path = options.out / f"byte_transformer-{dtype}.png"
    plot(result, path)
    path.with_suffix(".json").write_text(json.dumps(dataclasses.asdict(result), indent=1) + "\n")
    print(f"\nplot: {os.path.relpath(path)}, numbers: {os.path.relpath(path.with_suffix('.json'))}")
    return result


if __name__ == "__main__":
    main()
