"""The arguments of each command. Imports PyTorch only to check one, so that `--help` answers at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .gpu_names import DRIVER_MIB, TOTAL_MIB
from .plots import add_plot_argument

if TYPE_CHECKING:
    import torch

Parser = argparse.ArgumentParser

SELFTEST_FILE = "fusedacc-selftest.json"


def _add_audit(parser: Parser) -> None:
    parser.description = (
        "Runs a training script, unchanged, and finds which micro-batches reach the optimizer in each "
        "update, and with which weight. Exit status: 0 no problem; 1 problems; 2 nothing could be checked, "
        "an argument is wrong, or the script failed. After Ctrl-C the report so far decides."
    )
    parser.add_argument(
        "--updates",
        type=int,
        default=100,
        metavar="N",
        help="watch the first N updates of an optimizer (default: 100; 0: all), then let the script go on",
    )
    parser.add_argument("--stop", action="store_true", help="end the script after these updates")
    parser.add_argument(
        "--steps", type=int, metavar="K", help="require K micro-batches in each update on a rank"
    )
    parser.add_argument(
        "--scale", type=float, metavar="S", help="what the weights of a window should add up to (default: 1)"
    )
    parser.add_argument(
        "--ignore", default="", metavar="KIND,...", help="do not report problems of these kinds"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the report to this file, as JSON")
    parser.add_argument(
        "--folder", help="where ranks exchange files (default: in the folder for temporary files)"
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="the script is a module's name")
    parser.add_argument("script", help="the training script")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments"
    )


def _add_info(parser: Parser) -> None:
    parser.description = (
        "Runs one small sum per dtype pair, backend and device, and checks the results. Exit status: 0; 1 if "
        "a kernel or a self-test gives a wrong result, a variable has a wrong value, or a device has no "
        "backend."
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def _add_bench(parser: Parser) -> None:
    parser.description = (
        "Checks and times fusedacc's kernels and the equivalent PyTorch code, in about a minute. Exit "
        "status: 0; 1 if a result is wrong; 2 if an argument or FUSEDACC_BACKEND cannot be used; 130 if "
        "interrupted."
    )
    parser.add_argument(
        "--device", type=device, help="cpu, cuda or cuda:N (default: cuda where torch has one)"
    )
    parser.add_argument("--full", action="store_true", help="more sizes, dtypes and rounds: several minutes")
    parser.add_argument("--threads", type=_count, help="CPU threads of torch and of our kernels")
    parser.add_argument("--json", action="store_true", help="print everything, each sample too, as JSON")


def _add_plan(parser: Parser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = """\
Predicts the largest micro-batch that fits, the number of micro-batches per update, and where the memory goes,
by running the training step on fake tensors. Then runs one real update, if the device is available.

FACTORY is called without arguments. It returns a tuple (model, optimizer, sample_batch), optionally with
loss_fn and batch_dims at the end:
  model         an nn.Module as it will train, or on the meta device
  optimizer     an AccumulatingOptimizer of its parameters, or a bare optimizer for the plain loop
  sample_batch  a tensor, or nested tensors, whose first dimension counts samples
  loss_fn       loss_fn(model, batch) returns the loss; default: model(**batch).loss
  batch_dims    the dimension that counts samples, if it is not the first of every tensor
"""
    parser.epilog = f"""\
A GPU given by name need not be available. {DRIVER_MIB} MiB of its memory are reserved for driver, context and
libraries, and 5 % of the rest. Exit status: 0; 1 if the measured peak exceeds the budget; 2 if an argument
cannot be used; 130 if interrupted.
"""
    parser.add_argument("--model", required=True, metavar="FACTORY", help="package.module:factory")
    parser.add_argument(
        "--batch", required=True, type=_count, metavar="N", help="samples of an update, on all ranks together"
    )
    sizes = 'bytes, or text like "24GiB"; includes parameters (default: the free memory of the device)'
    parser.add_argument("--memory", type=_memory, metavar="SIZE", help=sizes)
    parser.add_argument(
        "--world", type=_count, default=1, metavar="N", help="data-parallel ranks (default: %(default)s)"
    )
    stage = "for a pipeline's stage: micro-batches with activations in memory at once (default: %(default)s)"
    parser.add_argument("--in-flight", type=_count, default=1, metavar="N", help=stage)
    names = f"cpu, cuda, cuda:N, or a GPU that need not be available: {', '.join(TOTAL_MIB)}"
    parser.add_argument(
        "--device", type=_device_or_gpu, metavar="NAME", help=f"{names} (default: the model's device)"
    )
    parser.add_argument("--stock", action="store_true", help="plan the plain loop, without the wrapper")
    parser.add_argument("--json", action="store_true", help="print the plan's figures as JSON")
    add_plot_argument(parser, "memory by kind against the micro-batch, in both loops")
    parser.add_argument("--no-verify", action="store_true", help="run no real update")


def _add_selftest(parser: Parser) -> None:
    parser.description = (
        "Checks the results of every backend on every device against plain torch, and compares its bandwidth "
        "with that of a copy, in about a minute. Writes a file to attach to an issue, as JSON. On a GPU the "
        "results also replace those of the self-tests at first use. FUSEDACC_BACKEND and FUSEDACC_SELFTEST "
        "have no effect. Exit status: 0; 1 if something that is used by default fails; 2 if the report "
        "cannot be written; 130 if interrupted."
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(SELFTEST_FILE),
        metavar="FILE",
        help="the report (default: %(default)s)",
    )
    parser.add_argument("--no-benchmark", action="store_true", help="check only")


#: The line of help and the arguments of each command. Its module in this package has the same name.
COMMANDS: dict[str, tuple[str, Callable[[Parser], None]]] = {
    "audit": ("run a training script and check that it accumulates gradients correctly", _add_audit),
    "info": ("show what is built, which backends work on which devices, and why others do not", _add_info),
    "bench": ("compare the speed of fusedacc's kernels with that of plain PyTorch", _add_bench),
    "plan": ("predict which micro-batch fits in memory, and where the memory goes", _add_plan),
    "selftest": (
        "check and measure every backend here, and write a report to attach to an issue",
        _add_selftest,
    ),
}


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count; allowed: integers of at least 1")
    return int(text)


def device(text: str) -> torch.device:
    """Return an available device by its name."""
    import torch

    allowed = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    allowed += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if text not in allowed:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an available device; allowed: {', '.join(allowed)}"
        )
    return torch.device("cuda", torch.cuda.current_device()) if text == "cuda" else torch.device(text)


def _device_or_gpu(text: str) -> str:
    import torch

    allowed = ["cpu", "cuda", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    allowed += TOTAL_MIB
    if text.lower() not in allowed:
        raise argparse.ArgumentTypeError(f"{text!r} is not a device; allowed: {', '.join(allowed)}")
    return text.lower()


def _memory(text: str) -> int:
    from ..planner.budget import parse_bytes

    try:
        return parse_bytes(int(text) if text.isdecimal() else text, "--memory")
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None
