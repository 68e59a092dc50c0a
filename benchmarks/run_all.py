"""All CPU figures of the README, one after the other: `make bench`.

python benchmarks/run_all.py [--quick]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cpu_figures
import peak_memory
import wrapper_window
from common import RESULTS, append_csv, environment, table
from tqdm import tqdm

BENCHMARKS = {
    "cpu_figures": cpu_figures.figures,
    "wrapper_window": wrapper_window.figures,
    "peak_memory": peak_memory.figures,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to try the scripts: nothing is recorded"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = []
    for name, figures in tqdm(BENCHMARKS.items(), desc="benchmarks", unit="benchmark", dynamic_ncols=True):
        found = figures(options.quick)
        if not options.quick:
            append_csv(options.results / f"{name}.csv", found)
        rows += found
    print(table(rows))
    print("\n" + ", ".join(f"{key} {value}" for key, value in environment().items()))
    missed = [f"{row.case}: {row.variant}" for row in rows if row.reached == "no"]
    reached = sum(row.reached == "yes" for row in rows)
    print(f"{reached} goals reached, {len(missed)} missed" + "".join(f"\n  {line}" for line in missed))


if __name__ == "__main__":
    main()
