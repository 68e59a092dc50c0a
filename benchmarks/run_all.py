"""Every benchmark as one run: `make bench` (ten minutes on two cores) and `make bench-full`.

    python -m benchmarks.run_all [--quick | --full] [--only kernels,models]

Rows are written as soon as they are measured. Exit status: 0; 1 if a benchmark failed, after all others have
run; 130 after an interruption.
"""

import importlib
import sys
import traceback

from tqdm import tqdm

from .harness import INTERRUPTED, arguments, chosen, complete, effort, results
from .records import Results, first_line

#: Suites with `figures(results, effort)`, in the order of the documents.
SHOWN = (
    *("models", "update", "kernels", "linear", "embedding", "layers", "compiled", "training", "experts"),
    *("head", "experts_model", "data_parallel", "pipelines", "wrapper_window", "gradients", "host_time"),
    "peak_memory",
)
#: Suites that need other packages or more time, and the commands that run them.
APART = {
    "experts_model": "make bench-integrations",
    "planner": "make bench-integrations",
    "real_models": "python -m benchmarks.suites.real_models",
    "planner_limit": "python -m benchmarks.suites.planner_limit",
    "fsdp": "python -m benchmarks.suites.fsdp",
    "end_to_end": "python -m benchmarks.suites.end_to_end",
}
BENCHMARKS = tuple(name for name in SHOWN if name not in APART)


def run(names: list[str], kept: Results, effort: str) -> dict[str, str]:
    """Run the benchmarks. Return the first line of the error of each that failed, by name."""
    failed = {}
    bar = tqdm(names, desc="benchmarks", unit="benchmark", dynamic_ncols=True, leave=False)
    for name in bar:
        bar.set_postfix_str(name)
        try:
            complete(kept, importlib.import_module(f"benchmarks.suites.{name}").figures, effort)
        except Exception as error:
            with tqdm.external_write_mode(file=sys.stderr):
                traceback.print_exc()
            failed[name] = first_line(error)
    return failed


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", help=f"comma-separated, of {', '.join(BENCHMARKS)} (default: all)")
    options = parser.parse_args()
    names = chosen(options.only, BENCHMARKS, "benchmark")
    kept = results(options)
    try:
        failed = run(names, kept, effort(options))
    except KeyboardInterrupt:
        kept.report()
        where = f"all of them are in {kept.path}" if kept.path else "none of them recorded: --quick"
        print(f"\ninterrupted: {len(kept.rows)} rows were finished, {where}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    kept.report()
    for name, why in failed.items():
        print(f"{name} FAILED: {why}", file=sys.stderr)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
